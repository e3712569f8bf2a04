"""Whatever a server does in place of an answer: the run ends in time, in one line, and leaves nothing half-written."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.server import follow
from comfyui_onediff_guard.headless.server.api import Server
from lies import AFTER_THE_RUN, Case, cases, told
from lying_server import PICTURE, WORKFLOW, LyingServer
from PIL import Image

TIMEOUT = 0.6  # seconds
HUNG = 60  # seconds after which a run is given up
CASES = cases()
ENDED: dict[str, float] = {}  # seconds that a run went on after its time was up


@pytest.fixture
def _given_up_when_it_hangs() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise AssertionError(f"the run still goes on after {HUNG} s")

    before = signal.signal(signal.SIGALRM, give_up), signal.getsignal(signal.SIGTERM)
    signal.alarm(HUNG)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of `onediff-guard run`, but for the server. The history is looked into more often than it is by users."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.1)
    (tmp_path / "in").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "in" / "a.png")
    (tmp_path / "workflow.json").write_text(json.dumps(WORKFLOW))
    folders = ["--out", str(tmp_path / "out"), "--input", str(tmp_path / "in")]
    return ["run", str(tmp_path / "workflow.json"), *folders, "--timeout", str(TIMEOUT)]


def test_a_server_that_does_not_lie(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LyingServer() as server:
        assert cli.main([*arguments[:-1], "60", "--server", server.url]) == 0, capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == [PICTURE]
    assert server.posted == ["upload/image", "prompt"]


@pytest.mark.usefixtures("_given_up_when_it_hangs")
@pytest.mark.parametrize("endpoint", ["upload", "prompt"])
def test_a_server_that_reads_nothing(
    endpoint: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than the buffers of both sides hold: an image, and a prompt of as many bytes."""
    Image.effect_noise((3000, 3000), 100).save(tmp_path / "in" / "a.png")
    workflow = {**WORKFLOW, "2": {"class_type": "SaveImage", "inputs": {"filename_prefix": "x" * 10_000_000}}}
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    with LyingServer(endpoint, deaf=True) as server:
        started = time.monotonic()
        code = cli.main([*arguments, "--server", server.url])
        ENDED[f"{endpoint}: reads nothing"] = time.monotonic() - started - TIMEOUT
    assert code == ExitCode.RUN_FAILED
    assert "did not take the" in capsys.readouterr().err


@pytest.mark.usefixtures("_given_up_when_it_hangs")
@pytest.mark.parametrize("case", CASES, ids=[f"{endpoint}: {name}" for endpoint, name, _ in CASES])
def test_a_lie(
    case: Case,
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint, name, lie = case
    if endpoint != "queue":  # which is asked before a run is interrupted: here it answers, however busy the machine is
        monkeypatch.setattr(follow, "CANCEL_SECONDS", HUNG)
    with LyingServer(endpoint, lie) as server:
        started = time.monotonic()
        code = cli.main([*arguments, "--server", server.url])
        ENDED[f"{endpoint}: {name}"] = time.monotonic() - started - TIMEOUT
        interrupted = "interrupt" in server.posted
    _, said = capsys.readouterr()
    errors = [line for line in said.splitlines() if line.startswith("onediff-guard: ")]
    assert "Unexpected" not in said and "Traceback" not in said
    assert "secret" not in said and len(said) < 20_000
    assert len(errors) == (code != ExitCode.DONE)
    assert code in ExitCode.__members__.values()
    written = [path.read_bytes() for path in (tmp_path / "out").glob("**/*") if path.is_file()]
    assert set(written) <= {PICTURE} and (code == ExitCode.DONE or not written)
    submitted = "prompt" in server.posted and endpoint in ("prompt", "history") and name not in AFTER_THE_RUN
    assert interrupted or not submitted or code == ExitCode.DONE, said


@pytest.mark.usefixtures("_given_up_when_it_hangs")
def test_leaving_the_websocket_waits_for_nothing_that_the_server_says() -> None:
    """Not for its goodbye, nor until all is read that it has sent by then."""

    async def leave(url: str) -> None:
        async with Server(url) as server, server.events() as socket:
            await socket.receive()

    with LyingServer("ws", told((b"{}", 1, True))) as server:
        asyncio.run(asyncio.wait_for(leave(server.url), 8))  # of the 10 s that aiohttp waits for a goodbye


def test_enough_lies_were_told_and_each_ended_in_time(figure: Callable[[str, object], None]) -> None:
    if len(ENDED) < len(CASES):
        pytest.skip("not all lies were told")
    assert len(ENDED) >= 100
    figure("lying servers: lies told", len(ENDED))
    figure("lying servers: the latest end, in seconds after --timeout", f"{max(ENDED.values()):.1f}")


MEASURED = """
import json, sys
from pathlib import Path
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.server import follow
def told(what):
    return int(Path("/proc/self/status").read_text().split(what)[1].split()[0]) / 1024
first, *others = json.loads(sys.argv[1])
cli.main(first)  # of a server that does not lie: all that a run imports
for arguments in others:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = told("VmRSS:")
    cli.main(arguments)
    print("grew by", told("VmHWM:") - start)
"""
LARGE_OVER_HTTP = ("an endless body", "endless headers", "an endless header", "endless continues", "packed")
LARGE_ANSWERS = (
    "deep",
    "too long a text",
    "too many values",
    "almost too long a text",
    "almost too many values",
    "a million files",
    "faults of every node",
    "a flood of previews",
    "an endless message",
    "a giant frame",
    "a flood of progress",
    "a flood of empty events",
)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory that starts anew")
def test_large_lies_take_little_memory(arguments: list[str], figure: Callable[[str, object], None]) -> None:
    large = [case for case in CASES if case[1] in LARGE_ANSWERS]
    large += [case for case in CASES if case[1] in LARGE_OVER_HTTP and case[0] in ("history", "view", "ws")]
    with ExitStack() as stack:
        honest = stack.enter_context(LyingServer())
        runs = [[*arguments[:-1], "60", "--server", honest.url]]
        for endpoint, _, lie in large:
            runs.append([*arguments[:-1], "2", "--server", stack.enter_context(LyingServer(endpoint, lie)).url])
        child = [sys.executable, "-c", MEASURED, json.dumps(runs)]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
    grown = [float(line.removeprefix("grew by")) for line in done.stdout.splitlines() if line.startswith("grew by")]
    assert len(grown) == len(large) and max(grown) > 1
    worst = max(range(len(large)), key=grown.__getitem__)
    figure(
        f"lying servers: the most memory above the start, of {len(large)} large lies, MiB",
        f"{grown[worst]:.0f} ({large[worst][0]}: {large[worst][1]})",
    )
    assert max(grown) <= 200
