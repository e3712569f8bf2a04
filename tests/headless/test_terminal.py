"""Untrusted text is printed without control characters, and closed or full streams end no command with a traceback."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.terminal import Cleaned, cleaned_output
from fake_comfy import picture
from PIL import Image

Console = Callable[..., tuple[int, str, str]]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\b\rgone"
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.fixture
def hostile(here: Path, workflow: dict[str, Any]) -> Path:
    """A current folder with a workflow whose every text is hostile."""
    workflow["1"]["_meta"]["title"] = HOSTILE
    workflow["1"]["inputs"]["text"] = HOSTILE
    (here / "workflow.json").write_text(json.dumps(workflow))
    (here / "unknown.json").write_text(json.dumps({HOSTILE: {"class_type": HOSTILE}}))
    workflow["1"]["inputs"]["kind"] = HOSTILE
    (here / "wrong.json").write_text(json.dumps(workflow))
    return here


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "workflow.json"],
        ["run", "workflow.json", "--json"],
        ["run", "unknown.json"],
        ["run", "unknown.json", "--json"],
        ["run", "wrong.json", "--verbose"],
        ["run", f"{HOSTILE}.json"],
        ["run", "workflow.json", "--set", f"{HOSTILE}.{HOSTILE}={HOSTILE}"],
        ["run", "workflow.json", "--comfyui", HOSTILE],
        ["compare", "workflow.json", "--precisions", HOSTILE],
        ["doctor", "--arch", HOSTILE],
        ["doctor", "--model", HOSTILE],
        ["profile", "show", HOSTILE],
        ["compiled", "--dir", HOSTILE, "list"],
        ["profile", "--dir", HOSTILE, "list"],
        ["run", "w.json", "--timeout", HOSTILE, HOSTILE],
    ],
)
def test_output_contains_no_control_characters(
    hostile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with suppress(SystemExit):
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert out + err
    assert not CONTROL.search(out + err)
    if "--json" in arguments:
        json.loads(out)


def test_log_output_contains_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with cleaned_output():
        handler = logging.StreamHandler()
        handler.emit(logging.LogRecord("x", logging.WARNING, "", 0, HOSTILE, None, None))
        print(HOSTILE, file=sys.stderr)
        sys.stderr.writelines([HOSTILE, "\n"])
    err = capsys.readouterr().err
    assert err.count("evil") == 3
    assert not CONTROL.search(err)


def test_carriage_return_of_progress_line_is_kept() -> None:
    stream = io.StringIO(newline="")
    Cleaned(stream).write("\r  3 of 10\r\n\r\n")
    Cleaned(stream).write("\r\nx")
    assert stream.getvalue() == "\r  3 of 10\n\n\nx"


def test_output_streams_are_restored() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.skipif(sys.platform == "win32", reason="pipes break differently on Windows")
@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"], ["profile", "list"]])
def test_closed_pipe_ends_command_silently(arguments: list[str], tmp_path: Path) -> None:
    """As `| head` closes its pipe once it has its lines."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "comfyui_onediff_guard", *arguments]
    ended = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["profile", "list"], ["profile", "list", "--json"]])
def test_full_disk_at_stdout_is_reported(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "comfyui_onediff_guard", *arguments]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 5
    assert ended.stderr.startswith(b"onediff-guard: Cannot print the result") and ended.stderr.count(b"\n") == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_streams_do_not_change_result(closed: str, tmp_path: Path) -> None:
    """Printed lines do not end up in a result file either."""
    (tmp_path / "input").mkdir()
    Image.new("RGB", (8, 8), "red").save(tmp_path / "input" / "a.png")
    (tmp_path / "w.json").write_text(json.dumps(picture()))
    command = f'exec {closed}; "{sys.executable}" -m comfyui_onediff_guard run w.json --input input --out out'
    ended = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 0, ended
    with Image.open(tmp_path / "out" / "x_00001_.png") as saved:
        assert saved.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are text on Windows")
def test_set_is_read_as_utf_8_in_ascii_locale(tmp_path: Path) -> None:
    code = (
        "import sys; from comfyui_onediff_guard.headless.workflow.settings import Setting\n"
        "print(ascii(Setting.parse(sys.argv[1]).text), ascii(Setting.parse('1.a=\\xe9').text))"
    )
    locale = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", code, "1.prompt=été 🎈".encode()]
    ended = subprocess.run(command, env=locale, capture_output=True, text=True, check=True)
    assert ended.stdout == r"'\xe9t\xe9 \U0001f388' '\xe9'" + "\n"


def test_command_runs_in_another_thread(tmp_path: Path, console: Console) -> None:
    """Such a thread may not set signal handlers."""
    ended: list[tuple[int, str, str]] = []
    thread = threading.Thread(target=lambda: ended.append(console("profile", "--dir", tmp_path, "list")))
    thread.start()
    thread.join()
    assert ended[0][0] == 0, ended
