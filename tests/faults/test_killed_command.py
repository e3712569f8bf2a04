"""The command is killed while its ComfyUI runs: no process and no temporary folder stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless import files
from stand_in_checkout import is_running, write_checkout
from waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
COMMAND = """\
import signal, sys
background = sys.argv[3] == "in the background"  # a shell lets it ignore Ctrl+C
signal.signal(signal.SIGINT, signal.SIG_IGN if background else signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the test process may ignore it
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.hosts import checkout
checkout._has_accelerator = lambda python: False
sys.exit(cli.main(["run", sys.argv[1], "--comfyui", sys.argv[2]]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose ComfyUI never answers its first request."""
    write_checkout(tmp_path, monkeypatch)
    (tmp_path / "busy").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "workflow.json").write_text('{"1": {"class_type": "SaveImage", "inputs": {}}}')
    return tmp_path


@pytest.mark.parametrize(
    ("signal_name", "where"),
    [(name, "at a terminal") for name in ("SIGKILL", "SIGHUP", "SIGTERM", "SIGINT")]
    + [(name, "in the background") for name in ("SIGHUP", "SIGTERM")],
)
def test_killed_command_leaves_no_processes(
    folder: Path, signal_name: str, where: str, figure: Callable[[str, object], None]
) -> None:
    command = [sys.executable, "-c", COMMAND, str(folder / "workflow.json"), str(folder), where]
    started = subprocess.Popen(command, cwd=folder, start_new_session=True)
    wait_until((folder / "asked").exists, "ComfyUI did not come up")
    started.send_signal(getattr(signal, signal_name))
    assert started.wait(HANG_SECONDS) == (-signal.SIGKILL if signal_name == "SIGKILL" else 130)
    for pid in json.loads((folder / "seen.json").read_text())["pids"]:
        wait_until(lambda pid=pid: not is_running(pid), "a process outlives the command")
    left = list((folder / "tmp").iterdir())
    assert len(left) == (1 if signal_name == "SIGKILL" else 0)
    with files.temporary_folder("onediff-guard-", folder / "tmp") as own:
        assert list((folder / "tmp").iterdir()) == [own], "the next run removes what the killed one left"
    figure(f"{signal_name} {where} while its ComfyUI is busy: processes and folders left", 0)


def test_folders_in_use_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "x-unlocked").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / files.OWNER).touch()
    (tmp_path / "x-link").symlink_to(tmp_path / "elsewhere")
    with files.temporary_folder("x-", tmp_path) as one, files.temporary_folder("x-", tmp_path) as other:
        assert one.is_dir() and other.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"x-unlocked", "x-link", "elsewhere"}
    assert (tmp_path / "elsewhere" / files.OWNER).exists()


def test_nohup_is_respected(folder: Path) -> None:
    code = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    code += "from comfyui_onediff_guard.headless.commands import cli\n"
    code += "with cli._stopped_alike():\n    print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
