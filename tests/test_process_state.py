"""A run fails if a test leaves something behind or changes a shared model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_pytest(root: Path, folder: Path, test: str) -> tuple[int, str]:
    """Run a test file in a folder of its own; return the exit code and the output."""
    (folder / "test_it.py").write_text(test)
    options = ["-q", "-p", "no:cacheprovider", "-p", "conftest", "--rootdir", folder, "-c", root / "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *map(str, options), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "tests"), str(root / "tests" / "support")))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout


def test_leftover_environment_variable_fails_run(root: Path, tmp_path: Path) -> None:
    leaves = "import os\ndef test_left(): os.environ['LEFT_BEHIND'] = '1'\n"
    code, output = run_pytest(root, tmp_path, f"{leaves}def test_next(): assert os.environ['LEFT_BEHIND']\n")
    assert code == 1 and "variable LEFT_BEHIND: absent → 1" in output and "2 passed, 1 error" in output, output


def test_changed_shared_model_fails_run(root: Path, tmp_path: Path) -> None:
    builds = "import shared_models\ndef test_it():\n    folder = shared_models.built(lambda path: path.mkdir())\n"
    code, output = run_pytest(root, tmp_path, f"{builds}    (folder / 'new').touch()\n")
    assert code == 1 and "1 passed" in output and "though all tests share it: " in output, output
