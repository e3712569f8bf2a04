"""`onediff-guard demo`: its files, report and verdicts, and its errors if it cannot write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from comfyui_onediff_guard.__main__ import main
from comfyui_onediff_guard.demo.files import STILL_WIDTH, write
from comfyui_onediff_guard.demo.outcome import MODEL, PROTECTED, RUNS, Outcome
from comfyui_onediff_guard.headless.errors import ExitCode, OutputError
from PIL import Image

SIZES = {"width": 96, "height": 64, "frames": 9}
FILES = {"side-by-side.png", "side-by-side.webp", "report.json"} | {f"{case.video}.mp4" for case in RUNS}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the command once, in its own process, at smaller sizes than `make demo`."""
    output = tmp_path_factory.mktemp("demo") / "out"
    smaller = "from comfyui_onediff_guard import __main__; from comfyui_onediff_guard.demo import run"
    smaller += f"; run.SIZES.update({SIZES}); raise SystemExit(__main__.main())"
    done = subprocess.run(
        [sys.executable, "-c", smaller, "demo", "--out", str(output), "--keep-model"],
        cwd=output.parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        check=False,
    )
    return output, done


def _frames(video: Path) -> np.ndarray:
    with av.open(video) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_demo_succeeds_and_writes_only_its_files(run: Any) -> None:
    output, done = run
    assert done.returncode == 0, done.stderr
    assert {path.name for path in output.iterdir()} == FILES | {"models"}
    for name in FILES:
        assert name in done.stdout
    assert "9 of 9 frames NaN" in done.stdout
    assert "every frame finite" in done.stdout
    assert "Traceback" not in done.stderr


def test_demo_prints_one_line_per_stage_to_pipe(run: Any) -> None:
    """Carriage returns of a progress bar would count as lines. Lines of other packages at import are ignored."""
    _, done = run
    stages = ("encoding prompt", "step", "decoding")
    lines = [line for line in done.stderr.splitlines() if line.startswith(stages)]
    assert len(lines) == len(stages) * len(RUNS), done.stderr
    assert all(map(str.startswith, lines, ["encoding prompt ", "step 8/8 · ", "decoding "] * len(RUNS))), done.stderr


def test_plain_fp16_video_is_black_and_guarded_fp16_is_near_fp32(run: Any) -> None:
    output, _ = run
    plain, guarded, inside, reference = (_frames(output / f"{case.video}.mp4") for case in RUNS)
    assert plain.shape == reference.shape == (9, 64, 96, 3)
    assert plain.max() <= 2  # black, after a video codec
    for made in (guarded, inside):
        assert made.std() > 30
        assert np.abs(made.astype(int) - reference).mean() < 3


def test_report_has_frames_steps_and_differences_of_each_run(run: Any) -> None:
    output, _ = run
    report = json.loads((output / "report.json").read_text(encoding="utf-8"))
    plain, guarded, inside, reference = report["runs"]
    assert [each["precision"] for each in report["runs"]] == ["fp16 (plain)", "fp16", "fp16", "fp32"]
    assert plain["frames_not_finite"] == plain["frames"] == 9
    assert plain["steps_not_finite"] == plain["steps"] == 8
    assert plain["max_difference_from_fp32"] == "NaN"  # strict JSON
    assert guarded["frames_not_finite"] == reference["frames_not_finite"] == 0
    assert guarded["steps_not_finite"] == 0
    for protected in (guarded, inside):
        assert protected["max_difference_from_fp32"] <= 2e-2
        assert {step["outcome"] for stage in protected["stages"] for step in stage["steps"]} == {"finite"}
    assert "toy" in report["note"].lower()


def test_comparison_pictures_have_detail_and_all_frames(run: Any) -> None:
    output, _ = run
    with Image.open(output / "side-by-side.png") as rows:
        assert rows.width == STILL_WIDTH
        assert len(np.unique(np.asarray(rows.convert("RGB").resize((120, 76))).reshape(-1, 3), axis=0)) > 500
    with Image.open(output / "side-by-side.webp") as moving:
        assert moving.n_frames == 9
        assert moving.info["loop"] == 0


def test_kept_model_is_saved_and_its_folder_is_printed(run: Any) -> None:
    output, done = run
    assert (output / "models" / MODEL / "model_index.json").is_file()
    assert f'--models "{output / "models"}"' in done.stdout


def test_unwritable_output_folder_exits_with_output_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    assert main(["demo", "--out", str(tmp_path / "taken")]) == ExitCode.OUTPUT_FAILED
    assert "taken" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_full_disk_keeps_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.json"
    target.write_text("earlier", encoding="utf-8")

    def disk_full(_path: Path, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", disk_full)
    with pytest.raises(OutputError, match=r"No space left.*--out"):
        write(target, b"later")
    assert target.read_text(encoding="utf-8") == "earlier"
    assert list(tmp_path.iterdir()) == [target]


def _outcome(value: float, outcomes: tuple[str, ...] = ()) -> Outcome:
    steps = [{"stage": "denoiser", "outcome": outcome} for outcome in outcomes]
    return Outcome(PROTECTED, torch.full((2, 4, 4, 3), value), Path("x.mp4"), [{"steps": steps}], 1.0)


@pytest.mark.parametrize(
    ("value", "verdict"), [(0.5, "right"), (0.515, "right"), (0.55, "wrong"), (float("nan"), "black")]
)
def test_verdict_follows_frame_values(value: float, verdict: str) -> None:
    assert _outcome(value).verdict(_outcome(0.5)) == verdict
