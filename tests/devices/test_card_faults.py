"""Runs on the second device that something breaks off, or that go on beside each other."""

from __future__ import annotations

import subprocess
import sys

import card_faults
import pytest
import second_device

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")


@pytest.mark.parametrize("case", card_faults.CASES)
def test_the_run_or_the_next_one_is_right(case: str) -> None:
    command = [sys.executable, card_faults.__file__, case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
