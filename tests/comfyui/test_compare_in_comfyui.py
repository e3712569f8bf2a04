"""`onediff-guard compare --server` on real ComfyUIs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legs
import pytest
from runs import OVERFLOWING, SMALL, Ran, finish
from waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.comfyui

OVERFLOWS = {
    "OneDiffGuardLoadPipeline.model": OVERFLOWING,
    **SMALL,
    "OneDiffGuardDecodeLatents.precision": "fp32",
}


@pytest.fixture
def start_compare(server: legs.Server, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Function that starts the command on the leg's text-to-video workflow. changes: become --set."""

    def start(precisions: str, **changes: Any) -> subprocess.Popen[str]:
        sets = OVERFLOWS | {f"OneDiffGuard{name.replace('__', '.')}": value for name, value in changes.items()}
        command = [sys.executable, "-m", "comfyui_onediff_guard", "compare", str(server.leg.workflow)]
        command += [
            "--server",
            server.url,
            "--out",
            str(tmp_path / "out"),
            "--json",
            "--timeout",
            str(HANG_SECONDS),
        ]
        command += ["--precisions", precisions]
        command += [part for name, value in sets.items() for part in ("--set", f"{name}={json.dumps(value)}")]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_plain_fp16_is_black_and_guarded_fp16_is_near_fp32(
    start_compare: Callable[..., subprocess.Popen[str]], server: legs.Server, tmp_path: Path
) -> None:
    saved = set((server.base / "output").rglob("*"))
    ran: Ran = finish(start_compare("fp16,fp16 (plain)"), server)
    assert ran.code == 0, ran.answer
    reference, fp16, plain = ran.answer["runs"]
    assert ran.answer["errors_from"].startswith("8-bit PNG")
    assert (plain["finite_frames"], plain["black_frames"], plain["psnr_db"]) == (0, 9, None)
    assert plain["calls_not_finite"] >= 2
    assert (fp16["finite_frames"], fp16["frames"], fp16["reruns"]) == (9, 9, 0)
    assert fp16["max_error"] <= 2e-2 and fp16["psnr_db"] > 40
    assert reference["seconds"] > 0 and reference["reruns"] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["compare.json", "compare.png", "compare.webp"]
    assert set((server.base / "output").rglob("*")) == saved, "nothing is left in the server's output folder"


def test_cached_reference_run_keeps_its_report(
    start_compare: Callable[..., subprocess.Popen[str]], run_graph: Callable[..., Ran], server: legs.Server
) -> None:
    before = run_graph(server.leg.workflow, OVERFLOWS | {"OneDiffGuardLoadPipeline.precision": "fp32"})
    (sampled,) = (report for report in before.reports() if report["plan"]["component"] == "denoiser")
    ran = finish(start_compare("fp16"), server)
    assert ran.code == 0, ran.answer
    reference = ran.answer["runs"][0]
    assert (reference["plan"], reference["steps"], reference["finite_frames"]) == ("fp32", 2, 9)
    assert reference["seconds"] == sum(step["seconds"] for step in sampled["steps"]), "not sampled again"


def test_interrupt_ends_comparison_without_output_files(
    start_compare: Callable[..., subprocess.Popen[str]], server: legs.Server, tmp_path: Path
) -> None:
    child = start_compare("fp16", SampleCogVideoX__steps=1000, SampleCogVideoX__seed=31)
    server.wait_until_running()

    def ended() -> bool:  # ComfyUI ignores a request that arrives before the graph has started
        server.ask("/interrupt", {})
        return child.poll() is not None

    wait_until(ended, "the comparison ended")
    ran = finish(child, server)
    assert ran.code == 130, ran.answer
    assert "in fp16:" not in ran.stderr
    assert list((tmp_path / "out").iterdir()) == []
