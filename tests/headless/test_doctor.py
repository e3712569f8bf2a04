"""`onediff-guard doctor`: for people, for scripts, and at bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import shared_models
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.families import table
from comfyui_onediff_guard.pipelines.insight import diagnosis
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(console: Doctor) -> Doctor:
    """doctor(*arguments) → exit code, stdout, stderr."""
    return partial(console, "doctor")


def strictly(text: str) -> Any:
    """One JSON object, without the NaN and Infinity that Python's parser would take."""
    return json.loads(text, parse_constant=pytest.fail)


def test_all_variants_on_this_machine(doctor: Doctor) -> None:
    code, out, err = doctor()
    assert (code, err) == (0, "")
    for part in ("This machine", "PyTorch", "Compile backends", ATTENTION_SWITCH, *table.VARIANTS):
        assert part in out
    assert "OneFlow's special builds and nexfort: neither has been available" in out


def test_a_model_on_another_card(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    code, out, _ = doctor("--arch", "7.5", "--model", model_folder("5b"))
    assert code == 0
    assert "Plan for 5b-none: CogVideoX-5B on sm75 (Turing), precision auto" in out
    assert "sm75 (Turing) has no native bf16 → fp16" in out


def test_one_json_object(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    asked = ("--model", model_folder("2b"), "--arch", "sm86", "--precision", "fp16 (plain)", "--accumulation", "fast")
    code, out, err = doctor("--json", *asked)
    told = strictly(out)
    assert (code, err, told["status"]) == (0, "", "done")
    assert told["architecture"]["name"] == "sm86" and told["here"] is False
    assert (told["precision"], told["accumulation"]) == ("fp16 (plain)", "fast")
    (model,) = told["models"]
    assert [plan["component"] for plan in model["plans"]] == ["text_encoder", "vae_encode", "denoiser", "vae_decode"]
    assert {plan["dtype"] for plan in model["plans"]} == {"fp16"} and not any(p["guarded"] for p in model["plans"])
    assert told["not_run"] and told["machine"]["packages"]["diffusers"]


def test_a_card_of_so_much_memory(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    asked = ("--model", str(model_folder("2b")), "--arch", "sm75", "--size", "64x48x9")
    code, out, _ = doctor(*asked, "--vram", "12")
    told = out[out.index("What would run on a card of 12 GiB") : out.index("Never run")]
    assert code == 0 and max(map(len, told.splitlines())) <= 96
    for part in ("text encoder", "64×48×9", "denoiser", "decode", "none", "whole"):
        assert part in told
    (run,) = strictly(doctor(*asked, "--vram", "1", "--json")[1])["runs"]
    assert run["memory"] == 2**30 and [stage["stage"] for stage in run["stages"]] == [
        "text encoder",
        "denoiser",
        "decode",
    ]
    assert all(stage["fits"] and stage["beside"] > 0 for stage in run["stages"])


def test_in_which_comfyui_it_is(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert strictly(doctor("--json")[1])["comfyui"] == {"version": "", "tested": list(host.TESTED), "flags": []}
    assert f"ComfyUI: none here; this release was tested in {', '.join(host.TESTED)}" in doctor()[1]
    monkeypatch.setattr(host, "__file__", str(tmp_path / "custom_nodes" / "pack" / "nodes" / "host.py"))
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.45.0"\n')
    assert "ComfyUI: 0.45.0;" in doctor()[1]
    monkeypatch.setitem(sys.modules, "folder_paths", ModuleType("folder_paths"))
    assert host.version() == "of an unknown version"
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__="0.33.0"))  # what runs here counts
    assert host.version() == "0.33.0"


def test_the_readme_names_the_comfyuis_of_this_release(root: Path) -> None:
    *others, last = host.TESTED
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"Tested in ComfyUI {', '.join(others)} and {last}." in readme
    pinned = (root / "constraints" / "comfyui-0.0.1.txt").read_text(encoding="utf-8")
    assert f"\ncomfyui=={host.TESTED[0]}\n" in pinned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "potato"], "'potato' is no architecture. Write one of sm60"),
        (["--arch", ""], "'' is no architecture"),
        (["--model", "absent"], "There is no 'absent'. Name the folder"),
        (["--model", "file"], "'file' is not a .safetensors file"),
        (["--model", "."], "has no model_index.json. Choose a folder in diffusers format"),
        (["--model", "other"], "'other' holds a FluxPipeline. Known: CogVideoXPipeline"),
        (["--model", "cut"], "header too small"),
        (["--vram", "0.1"], "--vram 0.1 is no card's memory"),
        (["--vram", "nan"], "--vram nan is no card's memory"),
        (["--size", "720x480x49"], "--size is of no use alone: say with --vram how many GiB the card has"),
    ],
)
def test_bad_input(
    doctor: Doctor,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    shared_models.copied(model_folder("2b"), tmp_path / "cut")
    next((tmp_path / "cut" / "vae").glob("*.safetensors")).write_bytes(b"1234")
    code, out, err = doctor(*arguments, "--json")
    assert message in err and "Traceback" not in err
    told = strictly(out)
    assert (code, told["status"], told["exit_code"]) == (2, "error", 2)
    assert message in told["error"]


def test_a_model_that_may_not_be_read(
    doctor: Doctor, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnosis, "open_model", refuse)
    code, _, err = doctor("--model", str(model_folder("2b")))
    assert code == 2 and "cannot be read: [Errno 13] Permission denied" in err


def test_a_fresh_process_away_from_the_repository(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "comfyui_onediff_guard", "doctor", "--json"]
    environment = {**os.environ, ATTENTION_SWITCH: "maybe", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = strictly(done.stdout)
    assert told["machine"]["gpus"] == [] and told["status"] == "done"


def test_a_pytorch_that_cannot_be_imported_is_told(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('[WinError 126] c10.dll or one of its dependencies')"
    )
    command = [sys.executable, "-m", "comfyui_onediff_guard", "doctor", "--model", str(model_folder("2b"))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be imported (OSError: [WinError 126] c10.dll" in " ".join(done.stdout.split())
    assert "none: nothing runs without PyTorch" in done.stdout
    assert "accumulation switches could not be read" in done.stdout
