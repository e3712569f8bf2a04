"""ComfyUI's own tests: same outcomes without the pack, with it, and with every workflow guarded.

They run in a copy of each checkout. Tests that start a ComfyUI use the leg's interpreter instead of `python`, and wait
longer than 20 or 90 seconds, which a slow machine exceeds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import legs
import pytest

pytestmark = pytest.mark.comfyui

NEEDED = ("pytest", "pytest_asyncio", "websocket")
SUITES = {"tests/execution": ("--skip-timing-checks",), "tests-unit": ()}  # folder → options
NOT_COPIED = {".git", ".venv", "venv", "custom_nodes", "input", "models", "output", "temp", "user"}  # not ComfyUI's own
MIN_PASSED = 0.9  # share of tests that must pass: with fewer, equal outcomes mean little
SECONDS = 3600.0  # a limit for hangs: a suite takes minutes
REPLACEMENTS = {  # replacements in files that start a ComfyUI: theirs → ours
    "tests/execution/test_*.py": {"'python'": "{python!r}", "n_tries = 5": "n_tries = 60"},
    "tests-unit/assets_test/conftest.py": {"timeout=90.0": "timeout=600.0"},
}


@pytest.fixture
def checkout(leg: legs.Leg, tmp_path: Path) -> Path:
    """A copy of the checkout with ComfyUI's own files only."""
    asked = subprocess.run([leg.python, "-c", f"import {', '.join(NEEDED)}"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"ComfyUI's own tests need what `make comfyui-env CHECKOUT={leg.checkout}` installs for them")
    copied = tmp_path / "ComfyUI"
    shutil.copytree(leg.checkout, copied, ignore=lambda folder, _: NOT_COPIED if Path(folder) == leg.checkout else ())
    (copied / "custom_nodes").mkdir()
    for pattern, replacements in REPLACEMENTS.items():
        for file in copied.glob(pattern):
            text = file.read_text(encoding="utf-8")
            for theirs, ours in replacements.items() if "main.py" in text else ():
                assert theirs in text, f"{file.name} starts ComfyUI in another way: no {theirs} in it"
                text = text.replace(theirs, ours.format(python=str(leg.python)))
            file.write_text(text, encoding="utf-8")
    return copied


def outcomes(python: Path, checkout: Path, suite: str, name: str, **variables: str) -> dict[str, str]:
    """Run a suite, and return the outcome of each test: passed, failure, error or skipped."""
    results = checkout.with_name(f"{name}.xml")
    command = [python, "-m", "pytest", suite, *SUITES[suite], f"--junitxml={results}", "-p", "no:cacheprovider"]
    if suite == "tests/execution":
        command += ["--port", str(legs.free_port()), "--output_dir", str(checkout / "output")]
    with checkout.with_name(f"{name}.log").open("w", encoding="utf-8") as log:
        environment = os.environ | variables
        subprocess.run(command, cwd=checkout, env=environment, stdout=log, stderr=log, check=False, timeout=SECONDS)
    assert results.is_file(), Path(log.name).read_text(encoding="utf-8")[-4000:]
    return {
        f"{case.get('classname')}::{case.get('name')}": next(
            (child.tag for child in case if child.tag in {"failure", "error", "skipped"}), "passed"
        )
        for case in ET.parse(results).iter("testcase")
    }


@pytest.mark.parametrize("suite", SUITES)
def test_comfyuis_own_tests_have_same_outcomes_with_pack(leg: legs.Leg, checkout: Path, suite: str) -> None:
    without = outcomes(leg.python, checkout, suite, "without")
    passed = [name for name, outcome in without.items() if outcome == "passed"]
    assert len(passed) >= MIN_PASSED * len(without) > 0, {n: o for n, o in without.items() if o != "passed"}
    pack = legs.install_pack(checkout / "custom_nodes")
    assert outcomes(leg.python, checkout, suite, "with") == without
    if suite == "tests/execution":
        log = checkout.with_name("with.log").read_text(encoding="utf-8", errors="replace")
        assert outcomes(leg.python, checkout, suite, "guarded", ONEDIFF_GUARD_EVERY_WORKFLOW="1") == without
        assert f"seconds: {pack}" in log  # in ComfyUI's list of successful imports
    print(f"{len(passed)} of {len(without)} passed, with and without: {Counter(without.values())}")
