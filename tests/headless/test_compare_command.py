"""`onediff-guard compare`: files, numbers and exit codes, with stand-in nodes."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from comfyui_onediff_guard.headless.commands.compare import PrecisionOutcome
from comfyui_onediff_guard.headless.comparison.precisions import SHOWN
from fake_comfy import FakeComfy
from PIL import Image

HEADER = ["precision", "plan", "PSNR (dB)", "max error", "seconds", "reruns", "finite frames"]
ERRORS = {"fp32": 0.0, "bf16": 3 / 64, "fp16": 1 / 256, "auto": 0.0}  # error of the stand-in's frames


class Painter:
    """Frames of noise with the error of their precision, and a report like that of the samplers."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "paint"
    PRECISIONS = ("auto", "bf16", "fp16", "fp16 (plain)", "fp32", "broken", "Ctrl-C")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"precision": (list(cls.PRECISIONS),), "frames": ("INT", {"default": 3})}}

    def paint(self, precision: str, frames: int) -> dict[str, Any]:
        if precision == "broken":
            raise RuntimeError("this precision is broken")
        if precision == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        images = torch.rand(frames, 24, 32, 3, generator=torch.Generator().manual_seed(0)) / 2
        images = images + ERRORS[precision] if precision in ERRORS else images * math.nan
        outcome = "finite" if precision in ERRORS else "non-finite"
        steps = [{"stage": "denoiser", "step": n, "outcome": outcome, "seconds": 0.5} for n in range(2)]
        if precision == "fp16":
            steps[1]["outcome"] = "rerun"
        plan = {"component": "denoiser", "dtype": precision[:4], "guarded": precision != "fp16 (plain)"}
        protection = "overflow protection" if precision == "fp16" else ""
        report = {"plan": plan, "steps": steps, "protection": protection}
        return {"ui": {"onediff_guard": [report]}, "result": (images,)}


@pytest.fixture
def here(here: Path, classes: dict[str, type]) -> Path:
    """Change to a folder with a workflow of Painter, and register Painter as a known node."""
    classes["Painter"] = Painter
    workflow = {
        "1": {"class_type": "Painter", "inputs": {"precision": "auto", "frames": 3}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "p"}},
    }
    (here / "workflow.json").write_text(json.dumps(workflow))
    return here


@pytest.fixture
def compare(console: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    return partial(console, "compare")


def rows(out: str) -> dict[str, list[str]]:
    """The cells of the table by precision."""
    header, *lines = out.splitlines()
    starts = [header.index(name) for name in HEADER]
    cells = [[line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines[:4]]
    return {row[0]: row[1:] for row in cells}


def test_table_shows_plan_errors_time_and_reruns(here: Path, compare: Any) -> None:
    code, out, err = compare("workflow.json")
    assert code == 0
    assert rows(out) == {
        "fp32": ["fp32", "inf", "0", "1.00", "0", "3 of 3"],
        "bf16": ["bf16", "26.6", "0.047", "1.00", "0", "3 of 3"],
        "fp16": ["fp16, overflow protection", "48.2", "0.0039", "1.00", "1", "3 of 3"],
        "fp16 (plain)": ["fp16, with neither overflow protection nor guard", "none", "none", "1.00", "0", "0 of 3"],
    }
    assert "errors: from float frames" in out and "seconds: the denoising steps only" in out
    files = [str(Path("output", "compare", f"compare.{kind}")) for kind in ("png", "webp", "json")]
    assert out.splitlines()[-3:] == files
    assert [line for line in err.splitlines() if line.startswith("in ")] == [
        "in fp32:", "in bf16:", "in fp16:", "in fp16 (plain):",
    ]  # fmt: skip
    assert sorted(path.name for path in (here / "output" / "compare").iterdir()) == sorted(
        ["compare.png", "compare.webp", "compare.json"]
    ), "no other file is left"


def test_json_output_matches_json_file(here: Path, compare: Any) -> None:
    code, out, _ = compare("workflow.json", "--precisions", 'fp32,fp16,"fp16 (plain)"', "--json", "--out", "o")
    answer = json.loads(out, parse_constant=pytest.fail)
    assert (code, answer["status"], answer["reference"]) == (0, "done", "fp32")
    reference, fp16, plain = answer["runs"]
    assert reference["psnr_db"] == "inf" and reference["max_error"] == 0
    assert fp16["psnr_db"] == pytest.approx(20 * math.log10(256), abs=1e-4)
    assert (fp16["seconds"], fp16["median_step_seconds"], fp16["reruns"]) == (1.0, 0.5, 1)
    assert 0 < fp16["total_seconds"] != fp16["seconds"], "of the run, not of its steps"
    assert (plain["psnr_db"], plain["max_error"], plain["frame_psnr_db"]) == (None, None, [None] * 3)
    assert (plain["finite_frames"], plain["calls_not_finite"]) == (0, 2)
    files = answer.pop("files")
    assert answer.pop("status") == "done"
    assert json.loads(Path(files[2]).read_text(), parse_constant=pytest.fail) == answer


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        (["finite", "rerun"], "finite"),
        (["finite", "saturated"], "clipped in steps"),
        (["finite", "non-finite"], "NaN/inf in steps"),
        (["saturated", "non-finite"], "NaN/inf in steps"),
    ],
)
def test_verdict_names_bad_steps_although_frames_are_finite(outcomes: list[str], verdict: str) -> None:
    steps = [{"stage": "denoiser", "outcome": outcome, "seconds": 0.5} for outcome in outcomes]
    stage = {"plan": {"component": "denoiser", "dtype": "fp16", "guarded": False}, "steps": steps, "protection": ""}
    result: Any = SimpleNamespace(stages=lambda: [stage], seconds=1.0, results={"2": None})
    frames = np.full((2, 8, 8, 3), 0.5, np.float32)
    assert PrecisionOutcome.of("fp16 (plain)", result, frames + 0.1, frames).run.verdict == verdict


def test_picture_and_animation_are_written_and_not_overwritten(here: Path, compare: Any) -> None:
    compare("workflow.json", "--precisions", "bf16,fp16 (plain)", "--out", "o")
    with Image.open("o/compare.png") as still, Image.open("o/compare.webp") as moving:
        assert still.width <= 1600 and moving.n_frames == 3
        pixels = np.asarray(still.convert("RGB")).astype(int)
    assert pixels[:, : still.width // 3].std() > 20, "fp32's picture"
    first = {path.name: path.read_bytes() for path in Path("o").iterdir()}
    compare("workflow.json", "--precisions", "bf16", "--set", "1.frames=1", "--out", "o")
    more = [path.name for path in sorted(Path("o").iterdir()) if path.name not in first]
    assert more == ["compare_00001_.json", "compare_00001_.png"], "one frame is not animated"
    assert all(Path("o", name).read_bytes() == data for name, data in first.items()), "no file is overwritten"


def test_failing_precision_does_not_stop_others(here: Path, compare: Any) -> None:
    code, out, err = compare("workflow.json", "--precisions", "broken,bf16", "--out", "o")
    assert code == 4
    assert "broken     failed: node 1 (Painter) failed: RuntimeError: this precision is broken" in out
    assert rows(out)["bf16"][1] == "26.6"
    assert "Not every precision ran" in err and "this precision is broken" in err
    assert len(list(Path("o").iterdir())) == 3
    code, out, _ = compare("workflow.json", "--precisions", "broken,bf16", "--out", "o", "--json")
    answer = json.loads(out)
    assert (code, answer["status"], answer["exit_code"], len(answer["files"])) == (4, "error", 4, 3)
    assert [set(run) == {"precision", "error"} for run in answer["runs"]] == [False, True, False]


def test_different_frame_count_is_reported_as_failure(here: Path, compare: Any, monkeypatch: Any) -> None:
    paint = Painter.paint
    monkeypatch.setattr(Painter, "paint", lambda self, precision, frames: paint(self, precision, len(precision)))
    code, out, _ = compare("workflow.json", "--precisions", "fp16,auto,fp16 (plain)")
    assert code == 4 and "failed: Its frames have the shape (12, 24, 32, 3), the reference's (4, 24, 32, 3)" in out
    assert rows(out)["fp16"][1] == "48.2"


@pytest.mark.parametrize(
    ("paint", "precisions", "code", "message"),
    [  # without fp32 there is nothing to compare with
        (lambda self, precision, frames: 1 / 0, "bf16", 4, "ZeroDivisionError"),
        (None, "bf16,Ctrl-C,fp16", 130, ""),
    ],
)
def test_failed_reference_or_ctrl_c_ends_compare_without_file(
    here: Path, compare: Any, monkeypatch: Any, paint: Any, precisions: str, code: int, message: str
) -> None:
    monkeypatch.setattr(Painter, "paint", paint or Painter.paint)
    found, out, err = compare("workflow.json", "--precisions", precisions, "--out", "o", "--json")
    assert (found, json.loads(out)["exit_code"]) == (code, code) and message in err
    assert f"in {precisions.rpartition(',')[2]}:" not in err and list(Path("o").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["workflow.json", "--precisions", "fp4"], 2, "has no precision 'fp4'. It has 'auto', 'bf16'"),
        (["workflow.json", "--set", "1.precision=bf16"], 2, "--set sets every precision of the workflow"),
        (["workflow.json", "--set", "1.frames=many"], 2, "expected a whole number"),
        (["noise.json"], 2, "no node with a precision to set. Found: Noise, SaveImage"),
        (["workflow.json", "--out", "workflow.json"], 5, "Cannot write"),
    ],
)
def test_invalid_arguments_are_rejected_before_any_node_runs(
    here: Path, workflow: dict[str, Any], compare: Any, arguments: list[str], code: int, message: str
) -> None:
    (here / "noise.json").write_text(json.dumps(workflow))
    before = sorted(here.iterdir())
    found, out, err = compare(*arguments, "--json")
    assert found == code
    answer = json.loads(out)
    assert (answer["status"], answer["exit_code"]) == ("error", code)
    assert message in answer["error"] and message in err
    assert "node 2 (SaveImage)" not in err and [p for p in sorted(here.iterdir()) if p.is_file()] == before


@pytest.fixture
def painter_server(comfy: FakeComfy, tmp_path: Path) -> FakeComfy:
    """A server whose Painter gives PNG files: noise in fp32 and bf16, black in plain fp16."""
    comfy.object_info["Painter"] = {"input": json.loads(json.dumps(Painter.INPUT_TYPES())), "output": ["IMAGE"]}
    comfy.object_info["SaveImage"]["output_node"] = True
    comfy.object_info["PreviewImage"] = {"input": {"required": {"images": ["IMAGE"]}}, "output_node": True}

    async def script(server: FakeComfy) -> None:
        precision = server.requests[-1][1]["prompt"]["1"]["inputs"]["precision"]
        result = Painter().paint(precision, 2)
        names = []
        for number, frame in enumerate(result["result"][0].nan_to_num().mul(255).byte().numpy()):
            names.append(f"{precision}_{number:05}_.png")
            Image.fromarray(frame).save(tmp_path / "frame.png")
            server.files[names[-1]] = (tmp_path / "frame.png").read_bytes()
        images = [{"filename": name, "subfolder": "", "type": "temp"} for name in names]
        server.finish({"1": result["ui"], SHOWN: {"images": images}})
        await server.send("execution_success")

    comfy.script = script
    return comfy


def test_compare_on_server_uses_png_files(here: Path, painter_server: FakeComfy, compare: Any) -> None:
    code, out, err = compare(
        "workflow.json", "--server", painter_server.url, "--precisions", "bf16,fp16 (plain)", "--out", "o"
    )
    assert code == 0, err
    assert "errors: from 8-bit PNG files, whose steps are 1/255" in out
    answer = json.loads(Path("o/compare.json").read_text())
    reference, bf16, plain = answer["runs"]
    assert bf16["max_error"] == pytest.approx(12 / 255) and reference["psnr_db"] == "inf"
    assert (plain["finite_frames"], plain["black_frames"], plain["psnr_db"]) == (0, 2, None), "taken from the report"
    prompts = [body["prompt"] for path, body in painter_server.requests if path == "prompt"]
    assert [prompt["1"]["inputs"]["precision"] for prompt in prompts] == ["fp32", "bf16", "fp16 (plain)"]
    assert all(prompt[SHOWN]["class_type"] == "PreviewImage" and "2" not in prompt for prompt in prompts)
    assert len(list(Path("o").iterdir())) == 3
