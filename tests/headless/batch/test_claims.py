"""Claims of a batch's jobs: one command has each, and none after it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless.batch import claims as module
from comfyui_onediff_guard.headless.batch.claims import Claims

HOLD = """
import sys, time
from pathlib import Path
from comfyui_onediff_guard.headless.batch.claims import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.take("c"), flush=True)
time.sleep(3600)
"""


def test_the_claim_of_a_killed_command_is_free_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "True\n"
        claims = Claims(tmp_path)
        mine = claims.take("c")
        other.kill()
    assert not mine and claims.take("c") and not Claims(tmp_path).take("c")
    claims.release_all()
    assert not [*tmp_path.glob("*.claim")] and Claims(tmp_path).take("c")


def test_without_locks_no_job_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "locked", lambda _: False)
    assert Claims(tmp_path).take("c") and Claims(tmp_path).take("c")
