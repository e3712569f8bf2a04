"""Tests on the second device, in processes of their own: one file of on_it/ each, or its cases with one mark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import second_device

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")
MARKS = ("quick", "long")


def parts() -> Iterator[tuple[str, str, str]]:
    """(name, file, marks to select)"""
    for file in sorted((Path(__file__).parent / "on_it").glob("*.py")):
        marks = [mark for mark in MARKS if f"mark.{mark}" in file.read_text(encoding="utf-8")]
        yield file.stem, str(file), " and ".join(f"not {mark}" for mark in marks)
        yield from ((f"{file.stem}, {mark}", str(file), mark) for mark in marks)


PARTS = {name: part for name, *part in parts()}


@pytest.mark.parametrize("name", PARTS)
def test_cases_pass_on_second_device(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "on_second_device", "-p", "no:xdist"]
    file, marks = PARTS[name]
    done = subprocess.run([*command, file, "-m", marks], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
