"""What runs in a process that has the second device: a file of on_it/ at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import second_device

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")
FILES = sorted((Path(__file__).parent / "on_it").glob("*.py"))


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_it_holds(name: str) -> None:
    file = Path(__file__).parent / "on_it" / f"{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_second_device", "-p", "no:xdist", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
