"""`onediff-guard doctor`: output for people and for scripts, and invalid arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import shared_models
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands.doctor import examine
from comfyui_onediff_guard.pipelines.families import table
from comfyui_onediff_guard.pipelines.insight import diagnosis
from comfyui_onediff_guard.pipelines.insight.diagnosis import Backends, BackendState, ComfyUI, Diagnosis, Flag, summary
from comfyui_onediff_guard.pipelines.insight.vram_estimate import RunEstimate, StageEstimate
from comfyui_onediff_guard.precision import arch, quantised
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, Switch
from comfyui_onediff_guard.precision.arch import COMPILED
from comfyui_onediff_guard.precision.machine import Gpu, Obstacle
from comfyui_onediff_guard.precision.policy import Plan

Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(console: Doctor) -> Doctor:
    """doctor(*arguments) → exit code, stdout, stderr."""
    return partial(console, "doctor")


def strict_json(text: str) -> Any:
    """Parse one JSON object; reject NaN and Infinity, which Python would accept."""
    return json.loads(text, parse_constant=pytest.fail)


VERBOSE_ONLY = ("This machine", "packages: ", "Compile backends", ATTENTION_SWITCH, "was trained in", "Never run by")
SM90 = arch.named("sm90")


def test_summary_lists_all_variants_and_verbose_adds_details(doctor: Doctor) -> None:
    code, out, err = doctor()
    assert (code, err) == (0, "")
    whole = doctor("--verbose")[1]
    assert all(name in one_line(text) for name in table.VARIANTS for text in (out, whole))
    assert [part for part in VERBOSE_ONLY if part in whole and part not in out] == [*VERBOSE_ONLY]
    assert "OneFlow's special builds and nexfort: neither has been available" in whole
    assert "doctor --verbose" in out


def one_line(text: str) -> str:
    return " ".join(text.split())


def with_card(found: Diagnosis, **changes: Any) -> Diagnosis:
    return replace(found, architecture=replace(found.architecture, **changes))


def with_advice(found: Diagnosis, advice: str) -> Diagnosis:
    return replace(found, machine=replace(found.machine, advice=(advice,)), notes=(advice,))


def without_compiler(found: Diagnosis) -> Diagnosis:
    lacking, eager = BackendState("inductor", False, "inductor needs a C++ compiler"), BackendState("eager", True, "")
    return replace(found, backends=Backends((lacking, eager), "eager", ""))


def run_in(gib: int, **fits: bool) -> RunEstimate:
    stages = (StageEstimate(name, "bf16", "whole", 1, 1, fits.get(name, True)) for name in ("denoiser", "decode"))
    return RunEstimate("CogVideoX-5B", (64, 48, 9), gib * 2**30, 1, tuple(stages))


def int8_plan(found: Diagnosis) -> Plan:
    return next(replace(plan, quantised="int8") for plan in found.models[0].plans if plan.component == "denoiser")


PROBLEMS: dict[str, tuple[Callable[[Diagnosis], Diagnosis], str, str]] = {
    "none": (
        lambda found: found,
        "Yes, on cuda:0: Card 0, sm90 (Hopper), with PyTorch 2.9.",
        "Backend inductor compiles the denoiser when it saves time: after 60 s of eager calls, or at "
        "once if the compile cache has it Self-test passed (today)",
    ),
    "no PyTorch": (
        lambda found: with_advice(found, Obstacle("PyTorch is not installed. Get it from there")),
        "No. First follow 'To fix'.",
        "To fix PyTorch is not installed. Get it from there Next Run `onediff-guard doctor` again",
    ),
    "unused card": (
        lambda found: with_advice(found, "The driver is too old"),
        "with PyTorch 2.9. But see 'To fix'.",
        "To fix The driver is too old Next Run `onediff-guard doctor` again",
    ),
    "all components refused": (
        lambda found: replace(found, models=(replace(found.models[0], plans=(), refused={"denoiser": "no bf16"}),)),
        "No, not on cuda:0: Card 0, sm90 (Hopper) with precision 'auto': see 'Refused'.",
        "Refused no bf16",
    ),
    "one component refused": (
        lambda found: replace(found, models=(replace(found.models[0], refused={"denoiser": "no bf16"}),)),
        "No, not on cuda:0: Card 0, sm90 (Hopper) with precision 'auto': see 'Refused'.",
        "Refused no bf16",
    ),
    "no self-test": (
        lambda found: with_card(found, tested=""),
        "Yes, ",
        "not run yet with this card, driver and PyTorch Next `onediff-guard selftest` checks",
    ),
    "failed self-test": (
        lambda found: with_card(found, failed=("fp16", COMPILED)),
        "Yes, ",
        "eager, so nothing is compiled: inductor is available, but compiled code failed this card's self-test of today "
        "Self-test fp16, compiled code failed, so 'auto' does not choose it (today) Next Update the driver",
    ),
    "no compiler": (without_compiler, "Yes, ", "Backend eager, so nothing is compiled: inductor needs a C++ compiler"),
    "no torchao": (
        lambda found: replace(found, missing="It needs torchao", notes=("It needs torchao",)),
        "No, precision 'auto' lacks a package: see 'To fix'.",
        "To fix It needs torchao Next Run `onediff-guard doctor` again",
    ),
    "stage does not fit": (
        lambda found: replace(found, runs=(run_in(4, decode=False),)),
        "with PyTorch 2.9, but not on a card of 4 GiB: no room for decode.",
        "no room",
    ),
    "model does not fit": (
        lambda found: replace(found, runs=(run_in(4), run_in(4, decode=False))),
        "with PyTorch 2.9, but not 1 of 2 models on a card of 4 GiB: see 'no room' below.",
        "no room",
    ),
    "all stages fit": (lambda found: replace(found, runs=(run_in(4),)), "with PyTorch 2.9.", "a card of 4 GiB"),
    "unknown backend": (
        lambda found: replace(found, backends=Backends((BackendState("eager", True, ""),), "eager", "")),
        "Yes, ",
        "Backend unknown: the compile backends could not be checked",
    ),
    "emulated bf16": (
        lambda found: with_card(found, bf16="emulated"),
        "Yes, ",
        "Backend eager, so nothing is compiled: inductor cannot compile bf16 for sm90 (Hopper)",
    ),
    "quantised": (
        lambda found: replace(found, models=(replace(found.models[0], plans=(int8_plan(found),)),)),
        "Yes, ",
        "Backend inductor compiles the denoiser in its first run, since it is quantised",
    ),
    "other card": (lambda found: replace(found, here=False), "Yes, on sm90 (Hopper).", "bf16, guarded"),
    "note": (
        lambda found: replace(found, notes=("sm130: not a known architecture",)),
        "Yes, ",
        "Note sm130: not a known",
    ),
    "switch set against advice": (
        lambda found: replace(found, switches=(Switch("A", "1", "user", "respected, although it is NaN"),)),
        "Yes, ",
        "Note A = 1: respected, although it is NaN",
    ),
    "flag without effect": (
        lambda found: replace(found, comfyui=ComfyUI("0.33.0", (), (Flag("--fast", "no effect", "choose X", ""),))),
        "Yes, ",
        "Note ComfyUI's --fast has no effect on this pack's pipelines: choose X",
    ),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_summary_states_verdict_and_problem(problem: str) -> None:
    change, verdict, message = PROBLEMS[problem]
    examined = examine(architecture="sm90")
    machine = replace(examined.machine, torch="2.9", torch_works=True, device="cuda:0", advice=())
    healthy = replace(examined, here=True, notes=(), machine=replace(machine, gpus=(Gpu(0, "Card 0", SM90, 80.0),)))
    inductor = Backends((BackendState("inductor", True, ""), BackendState("eager", True, "")), "inductor", "")
    found = change(with_card(replace(healthy, backends=inductor), tested="today"))
    text = summary(found)
    lines = text.split("\n\n")[0].splitlines()
    assert verdict in one_line("\n".join(lines[:2])) and message in one_line(text)
    assert len(lines) <= 22 and max(map(len, lines)) < 80, "fits a terminal of 80 columns"
    assert found.here or not [part for part in ("Backend", "Self-test", "PyTorch") if part in text], "only if here"
    if problem == "none":
        assert not [label for label in ("To fix", "Refused", "Note") if label in "\n".join(lines)]


@pytest.mark.parametrize(("value", "reported"), [("1", True), ("0", False)])
def test_unsafe_attention_switch_is_reported(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, value: str, reported: bool
) -> None:
    monkeypatch.setenv(ATTENTION_SWITCH, value)
    assert (f"{ATTENTION_SWITCH} = {value}: set before this run" in one_line(doctor("--arch", "sm80")[1])) == reported


def test_model_is_planned_for_another_card(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    asked = ("--arch", "7.5", "--model", model_folder("5b"))
    code, out, _ = doctor(*asked)
    assert code == 0 and len(out.splitlines()) <= 22
    for part in ("Yes, on sm75 (Turing)", "fp16, guarded: VAE decoder", "has no native bf16", "unknown variant"):
        assert part in out
    assert "Self-test" not in out, "of this card only"
    out = doctor(*asked, "--verbose")[1]
    assert "Plan for 5b-none: CogVideoX-5B on sm75 (Turing), precision auto" in out
    assert "fp16, since sm75 (Turing) has no native bf16" in out


@pytest.mark.parametrize(("missing", "verdict"), [("It needs torchao", "No, precision 'int8' "), ("", "Yes, on sm80")])
def test_missing_package_of_precision_is_reported(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch, missing: str, verdict: str
) -> None:
    monkeypatch.setattr(quantised, "lacking", lambda _: missing)
    out = doctor("--arch", "sm80", "--precision", "int8")[1]
    assert verdict in out and ("It needs torchao" in out) == bool(missing)


def test_json_option_prints_one_json_object(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    asked = ("--model", model_folder("2b"), "--arch", "sm86", "--precision", "fp16 (plain)", "--accumulation", "fast")
    code, out, err = doctor("--json", *asked)
    answer = strict_json(out)
    assert (code, err, answer["status"]) == (0, "", "done")
    assert answer["architecture"]["name"] == "sm86" and answer["here"] is False
    assert (answer["precision"], answer["accumulation"]) == ("fp16 (plain)", "fast")
    (model,) = answer["models"]
    assert [plan["component"] for plan in model["plans"]] == ["text_encoder", "vae_encode", "denoiser", "vae_decode"]
    assert {plan["dtype"] for plan in model["plans"]} == {"fp16"} and not any(p["guarded"] for p in model["plans"])
    assert answer["not_run"] and answer["machine"]["packages"]["diffusers"]


def test_vram_option_estimates_each_stage(doctor: Doctor, model_folder: Callable[..., Path]) -> None:
    asked = ("--model", str(model_folder("2b")), "--arch", "sm75", "--size", "64x48x9")
    code, out, _ = doctor(*asked, "--vram", "12")
    estimate = out[out.index("Estimates for a card of 12 GiB") :]
    assert code == 0 and max(map(len, estimate.splitlines())) <= 96
    for part in ("text encoder", "64×48×9", "denoiser", "decode", "none", "whole"):
        assert part in estimate
    (run,) = strict_json(doctor(*asked, "--vram", "1", "--json")[1])["runs"]
    assert run["memory"] == 2**30 and [stage["stage"] for stage in run["stages"]] == [
        "text encoder",
        "denoiser",
        "decode",
    ]
    assert all(stage["fits"] and stage["beside"] > 0 for stage in run["stages"])


def test_comfyui_version_is_reported(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = {"version": "", "tested": list(host.TESTED), "flags": [], "plans_memory": False}
    assert strict_json(doctor("--json")[1])["comfyui"] == unknown
    assert f"ComfyUI: not found; this release was tested with {', '.join(host.TESTED)}" in doctor("--verbose")[1]
    monkeypatch.setattr(host, "__file__", str(tmp_path / "custom_nodes" / "pack" / "nodes" / "host.py"))
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.45.0"\n')
    assert "ComfyUI: 0.45.0;" in doctor("--verbose")[1]
    monkeypatch.setitem(sys.modules, "folder_paths", ModuleType("folder_paths"))
    assert host.version() == "of an unknown version"
    monkeypatch.setitem(sys.modules, "comfyui_version", SimpleNamespace(__version__="0.33.0"))  # the running one
    assert host.version() == "0.33.0"


def test_readme_names_tested_comfyui_versions(root: Path) -> None:
    *others, last = host.TESTED
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"Tested in ComfyUI {', '.join(others)} and {last}." in readme
    pinned = (root / "constraints" / "comfyui-0.0.1.txt").read_text(encoding="utf-8")
    assert f"\ncomfyui=={host.TESTED[0]}\n" in pinned


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "potato"], "'potato' is unknown. Use one of sm60"),
        (["--arch", ""], "'' is unknown"),
        (["--model", "absent"], "There is no 'absent'. Name the folder"),
        (["--model", "absent"], "or the hub id of a model that Load Pipeline has downloaded."),
        (["--model", "file"], "'file' is not a .safetensors file"),
        (["--model", "."], "has no model_index.json. Choose a folder in diffusers format"),
        (["--model", "other"], "'other' holds a FluxPipeline. Supported: CogVideoXPipeline"),
        (["--model", "cut"], "header too small"),
        (["--vram", "0.1"], "--vram 0.1 is not a card's memory"),
        (["--vram", "nan"], "--vram nan is not a card's memory"),
        (["--vram", "12", "--size", "7x7x7"], "is 7, but must be a multiple of"),
        (["--vram", "12", "--size", "720x480x50"], "frames is 50, but must be"),
        (["--size", "720x480x49"], "--size needs --vram: add the card's memory in GiB"),
    ],
)
def test_invalid_arguments_are_rejected(
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
    answer = strict_json(out)
    assert (code, answer["status"], answer["exit_code"]) == (2, "error", 2)
    assert message in answer["error"]


def test_unreadable_model_is_reported(
    doctor: Doctor, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnosis, "open_model", refuse)
    code, _, err = doctor("--model", str(model_folder("2b")))
    assert code == 2 and "cannot be read: [Errno 13] Permission denied" in err


def test_failed_import_of_pytorch_is_reported(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('[WinError 126] c10.dll or one of its dependencies')"
    )
    command = [sys.executable, "-m", "comfyui_onediff_guard", "doctor", "--model", str(model_folder("2b"))]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cannot be imported (OSError: [WinError 126] c10.dll" in " ".join(done.stdout.split())
    assert done.stdout.startswith("Can it run?   No. ")
    assert "none: nothing runs without PyTorch" in done.stdout
    assert "accumulation switches could not be read" in one_line(done.stdout)
