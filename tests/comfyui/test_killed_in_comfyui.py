"""`onediff-guard run --comfyui` is killed: the real ComfyUI that it started ends too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import legs
import psutil
import pytest
from waiting import HANG_SECONDS, wait_until

LONG = {  # pictures whose compression takes minutes
    "1": {"class_type": "EmptyImage", "inputs": {"width": 4096, "height": 4096, "batch_size": 8, "color": 0}},
    "2": {"class_type": "ImageAddNoise", "inputs": {"image": ["1", 0], "seed": 1, "strength": 1.0}},
    "3": {"class_type": "SaveImage", "inputs": {"images": ["2", 0], "filename_prefix": "a"}},
}


def is_busy(server: psutil.Process) -> bool:
    """Return whether the ComfyUI runs a prompt."""
    with suppress(OSError, psutil.Error):
        command = server.cmdline()
        port = command[command.index("--port") + 1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/queue", timeout=60) as response:
            return bool(json.load(response)["queue_running"])
    return False


def is_gone(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGHUP"])
def test_comfyui_and_supervisor_end_with_killed_command(leg: legs.Leg, tmp_path: Path, signal_name: str) -> None:
    (tmp_path / "long.json").write_text(json.dumps(LONG))
    code = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # the test process may ignore it
    code += "from comfyui_onediff_guard.headless.commands import cli; sys.exit(cli.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", "long.json", "--comfyui", str(leg.checkout), "--out", "out"]
    environment = os.environ | {"COMFYUI_PYTHON": str(leg.python), "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(command, cwd=tmp_path, env=environment, start_new_session=True)
    family = psutil.Process(started.pid)

    def servers() -> list[psutil.Process]:
        return [process for process in family.children(recursive=True) if "main.py" in "".join(process.cmdline()[1:2])]

    try:
        wait_until(lambda: any(map(is_busy, servers())), "no ComfyUI started and ran the workflow")
        others = family.children(recursive=True)
        assert len(others) >= 2, "the supervisor and ComfyUI"
        started.send_signal(getattr(signal, signal_name))
        assert started.wait(HANG_SECONDS) == (-signal.SIGKILL if signal_name == "SIGKILL" else 130)
        wait_until(lambda: all(map(is_gone, others)), "a process outlives the command that started it")
    finally:
        if started.poll() is None:
            started.kill()
    assert not list((tmp_path / "out").glob("*.png"))
