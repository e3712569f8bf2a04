"""`make demo` at its default size, as in README: the command checks its own runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_demo_at_default_size_is_black_only_in_plain_fp16(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "comfyui_onediff_guard", "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert "25 of 25 frames NaN" in done.stdout and "every frame finite" in done.stdout
