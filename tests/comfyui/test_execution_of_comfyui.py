"""ComfyUI's own tests of execution and caching come to the same with the pack in custom_nodes as without.

They run in a copy of leg (b)'s checkout, where two things are changed: they start ComfyUI with leg (b)'s interpreter,
and wait longer for it to be up, since a slow machine takes more than their 20 seconds.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import legs
import pytest

pytestmark = pytest.mark.comfyui

TESTS = ("tests/execution/test_execution.py",)  # all of tests/execution takes two to three times as long
PERSONAL = {".git", ".venv", "venv", "custom_nodes", "input", "models", "output", "temp", "user"}  # not ComfyUI's own
MOST = 0.9  # of the tests have to pass: else the same outcome says little


@pytest.fixture(scope="module")
def runner(leg: legs.Leg) -> str:
    """ComfyUI's interpreter where it has what its tests need, else this one."""
    for python in map(str, (leg.python, sys.executable)):
        found = subprocess.run([python, "-c", "import pytest, websocket, torch, PIL"], capture_output=True, check=False)
        if found.returncode == 0:
            return python
    pytest.skip("ComfyUI's own tests need websocket-client (pip install websocket-client)")


@pytest.fixture(scope="module")
def checkout(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Path:
    original = Path(leg.program[0]).parent
    copied = tmp_path_factory.mktemp("execution") / "ComfyUI"
    shutil.copytree(original, copied, ignore=lambda folder, _: PERSONAL if Path(folder) == original else ())
    (copied / "custom_nodes").mkdir()
    for file in (copied / "tests" / "execution").glob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        for theirs, ours in (("'python'", repr(str(leg.python))), ("n_tries = 5", "n_tries = 30")):
            assert theirs in text, f"{file.name} starts ComfyUI in another way: no {theirs} in it"
            text = text.replace(theirs, ours)
        file.write_text(text, encoding="utf-8")
    return copied


def outcomes(runner: str, checkout: Path, name: str) -> dict[str, str]:
    """What came of each test: passed, failed, error or skipped."""
    results = checkout.with_name(f"{name}.xml")
    command = [runner, "-m", "pytest", *TESTS, "--port", str(legs.free_port()), "--skip-timing-checks"]
    command += ["--output_dir", str(checkout / "output"), f"--junitxml={results}", "-p", "no:cacheprovider"]
    with checkout.with_name(f"{name}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=checkout, stdout=log, stderr=log, check=False, timeout=900)
    assert results.is_file(), Path(log.name).read_text(encoding="utf-8")[-4000:]
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in {"failure", "error", "skipped"}), "passed"
        )
        for case in ET.parse(results).iter("testcase")
    }


def test_comfyuis_own_tests_come_to_the_same_with_the_pack(leg: legs.Leg, runner: str, checkout: Path) -> None:
    without = outcomes(runner, checkout, "without")
    passed = [name for name, outcome in without.items() if outcome == "passed"]
    assert len(passed) >= MOST * len(without) > 0, {n: o for n, o in without.items() if o != "passed"}
    pack = legs.install_pack(checkout / "custom_nodes")
    assert outcomes(runner, checkout, "with") == without
    log = checkout.with_name("with.log").read_text(encoding="utf-8", errors="replace")
    assert (
        f"seconds: {pack}" in log
    )  # ComfyUI's list of what it imported; "(IMPORT FAILED)" would stand before the colon
    print(f"{len(passed)} of {len(without)} passed, both ways")
