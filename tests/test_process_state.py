"""The fixture around every test sees each kind of thing that a test can leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_of(root: Path, folder: Path, test: str) -> tuple[int, str]:
    """Its exit code, and what it told."""
    (folder / "test_it.py").write_text(test)
    options = ["-q", "-p", "no:cacheprovider", "-p", "conftest", "--rootdir", folder, "-c", root / "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *map(str, options), str(folder)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "tests"), str(root / "tests" / "support")))}
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout


def test_a_test_that_leaves_something_fails(root: Path, tmp_path: Path) -> None:
    leaves = "import os\ndef test_left(): os.environ['LEFT_BEHIND'] = '1'\n"
    code, told = run_of(root, tmp_path, f"{leaves}def test_next(): assert os.environ['LEFT_BEHIND']\n")
    assert code == 1 and "variable LEFT_BEHIND: absent → 1" in told and "2 passed, 1 error" in told, told


def test_a_run_fails_whose_tests_change_a_model_that_they_share(root: Path, tmp_path: Path) -> None:
    builds = "import shared_models\ndef test_it():\n    folder = shared_models.built(lambda path: path.mkdir())\n"
    code, told = run_of(root, tmp_path, f"{builds}    (folder / 'new').touch()\n")
    assert code == 1 and "1 passed" in told and "though all tests share it: " in told, told
