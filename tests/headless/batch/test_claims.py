"""Claims of a batch's jobs: whose they are, and when their owners are dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch.claims import Claims

HOLD = """
import sys, time
from pathlib import Path
from comfyui_onediff_guard.headless.batch.claims import Claims
print(Claims(Path(sys.argv[1])).take("c"), flush=True)
time.sleep(3600)
"""


def test_the_claim_of_a_killed_command_is_taken_over_at_once(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "True\n"
        claims = Claims(tmp_path)
        assert not claims.take("c") and not claims.free("c")
        other.kill()
    assert claims.take("c") and not claims.take("c")
    claims.release_all()
    assert claims.take("c")


@pytest.mark.parametrize(
    ("owner", "age", "dead"),
    [
        ({}, 0, False),
        ({}, 7200, False),  # its process lives, however busy
        ({"began": 1.0}, 0, True),  # another process has its number
        ({"process": 2**40}, 0, True),
        ({"host": "elsewhere"}, 0, False),
        ({"host": "elsewhere"}, 7200, True),
        (None, 0, False),  # being written
        (None, 7200, True),
    ],
)
def test_which_claims_are_dead(tmp_path: Path, owner: dict[str, Any] | None, age: float, dead: bool) -> None:
    claims = Claims(tmp_path)
    file = tmp_path / "c.claim"
    assert claims.take("c")
    file.write_text("" if owner is None else json.dumps(json.loads(file.read_text()) | owner))
    os.utime(file, (time.time() - age,) * 2)
    Claims(tmp_path).sweep()
    assert file.exists() is not dead and Claims(tmp_path).take("c") is dead


KILLED = """
import os, sys
from pathlib import Path
from comfyui_onediff_guard.headless.batch.claims import Claims

folder = Path(sys.argv[1])
place = ended = 0
while not ended:
    place += 1
    child = os.fork()
    if not child:
        left = place
        def count(*_):
            global left
            left -= 1
            if not left:
                os._exit(9)
        claims = Claims(folder)
        sys.setprofile(count)
        claims.take("c")
        sys.setprofile(None)
        os._exit(0)
    ended = not os.waitpid(child, 0)[1]
    after = Claims(folder)
    print(after.take("c"))
    after.release_all()
"""


def test_a_command_that_is_killed_at_any_place_of_claiming_leaves_no_claim_that_anybody_waits_for(
    tmp_path: Path,
) -> None:
    """A driver is killed when its next job begins, as likely as not: an empty claim held that job up for 10 minutes."""
    answers = subprocess.check_output([sys.executable, "-c", KILLED, str(tmp_path)], text=True, timeout=600).split()
    assert len(answers) > 20 and set(answers) == {"True"}
