"""`onediff-guard compare --server` on real ComfyUIs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import legs
import pytest
from runs import OVERFLOWING, SMALL, finish
from waiting import HANG_SECONDS

pytestmark = pytest.mark.comfyui

OVERFLOWS = {
    "OneDiffGuardLoadPipeline.model": OVERFLOWING,
    **SMALL,
    "OneDiffGuardDecodeLatents.precision": "fp32",
}


def test_plain_fp16_is_black_and_guarded_fp16_is_near_fp32(server: legs.Server, tmp_path: Path) -> None:
    saved = set((server.base / "output").rglob("*"))
    command = [sys.executable, "-m", "comfyui_onediff_guard", "compare", str(server.leg.workflow)]
    command += ["--server", server.url, "--out", str(tmp_path / "out"), "--json", "--timeout", str(HANG_SECONDS)]
    command += ["--precisions", "fp16,fp16 (plain)"]
    command += [part for name, value in OVERFLOWS.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    pipe = subprocess.PIPE
    ran = finish(subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True), server)
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
