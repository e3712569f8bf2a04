"""A batch on running ComfyUIs: two stand-in servers that share jobs, lose them, reject them or answer late."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from aiohttp import web
from comfyui_onediff_guard.headless.batch import batch_run, server_pool
from comfyui_onediff_guard.headless.errors import InterruptedRunError
from comfyui_onediff_guard.headless.server import api, follow
from fake_comfy import FakeComfy

Console = Callable[..., tuple[int, str, str]]


@pytest.fixture
def two_servers(comfy: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two servers whose runs have different ids."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(follow, "RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(api, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(server_pool, "ASK_SECONDS", 0.05)
    numbers = itertools.count()

    def numbered(server: Any) -> Callable[[web.Request], None]:
        def first(request: web.Request) -> None:
            if request.path == "/prompt":
                server.prompt_id = f"prompt-{next(numbers)}"

        return first

    with FakeComfy() as other:
        for server in (comfy, other):
            server.first = numbered(server)
        yield [comfy, other]


@pytest.fixture
def batch(two_servers: list[Any], console: Console, workflow: dict[str, Any], tmp_path: Path) -> Callable[..., Any]:
    """batch(seeds) → exit code, JSON answer, stderr."""

    def run(seeds: int, *options: str, servers: list[Any] | None = None) -> tuple[int, dict[str, Any], str]:
        lines = [{"workflow": workflow, "matrix": {"seeds": {"count": seeds}}}]
        file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", lines)
        urls = [word for server in (servers or two_servers) for word in ("--server", server.url)]
        code, out, err = console("batch", file, "--out", tmp_path / "out", *urls, *options, "--json")
        return code, json.loads(out), err

    return run


def submitted_seeds(server: Any) -> list[int]:
    """The seeds of the workflows that were submitted to a server."""
    return [body["prompt"]["1"]["inputs"]["seed"] for kind, body in server.requests if kind == "prompt"]


def test_jobs_are_shared_between_two_servers(batch: Callable[..., Any], two_servers: list[Any], tmp_path: Path) -> None:
    code, answer, err = batch(12)
    assert code == 0 and answer["done"] == 12, err
    first, second = map(submitted_seeds, two_servers)
    assert first and second and sorted(first + second) == list(range(12))
    records = [json.loads(path.read_text()) for path in (tmp_path / "out").glob("*/job.json")]
    assert {record["worker"] for record in records} == {server.url for server in two_servers}
    assert all((tmp_path / "out" / record["content"] / "sub" / "a_00001_.png").is_file() for record in records)
    code, answer, _ = batch(12)
    assert answer["already_done"] == 12 and sum(map(len, map(submitted_seeds, two_servers))) == 12


def test_servers_with_one_output_folder_do_not_share_file_names(
    batch: Callable[..., Any], two_servers: list[Any], tmp_path: Path
) -> None:
    """Two processes of one ComfyUI number their files alike, and overwrite each other's."""
    shared: dict[str, bytes] = {}

    async def script(server: Any) -> None:
        prompt = server.requests[-1][1]["prompt"]
        folder, _, stem = prompt["2"]["inputs"]["filename_prefix"].rpartition("/")
        shared[name := f"{stem}_00001_.png"] = str(prompt["1"]["inputs"]["seed"]).encode()
        await asyncio.sleep(0.1)  # the other writes
        server.finish({"2": {"images": [{"filename": name, "subfolder": folder, "type": "output"}]}})

    for server in two_servers:
        server.script, server.files = script, shared
    code, answer, err = batch(8)
    assert code == 0 and answer["done"] == 8, err
    for record in (tmp_path / "out").glob("*/job.json"):
        job = json.loads(record.read_text())
        assert job["files"] == ["pictures/noise_00001_.png"], "the name as for any other host"
        picture = record.with_name("pictures") / "noise_00001_.png"
        assert picture.read_text() == str(job["workflow"]["1"]["inputs"]["seed"])


def test_job_lost_by_server_is_retried(batch: Callable[..., Any], two_servers: list[Any]) -> None:
    succeed = type(two_servers[0]).succeed
    forgets = iter([True])

    async def script(server: Any) -> None:
        if next(forgets, False):
            server.running.clear()
        else:
            await succeed(server)

    for server in two_servers:
        server.script = script
    code, answer, err = batch(4)
    assert code == 0 and answer["done"] == 4 and answer["workers_lost"] == 1, err
    assert sum(map(len, map(submitted_seeds, two_servers))) == 5


@pytest.mark.parametrize(("path", "lost"), [("/prompt", 0), ("/view", 1)])
def test_no_job_is_parked_while_server_behind_proxy_restarts(
    batch: Callable[..., Any], two_servers: list[Any], path: str, lost: int
) -> None:
    server = two_servers[0]
    numbered, gone = server.first, iter([True] * api.DOWNLOADS)

    def first(request: web.Request) -> web.Response | None:
        return web.Response(status=502) if request.path == path and next(gone, False) else numbered(request)

    server.first = first
    code, answer, err = batch(2, servers=[server])
    assert code == 0 and answer["done"] == 2 and answer["workers_lost"] == lost and next(gone, None) is None, err


def test_jobs_file_that_becomes_shorter_during_a_batch_is_reported(
    console: Console, two_servers: list[Any], workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "CHUNK", 1)
    file, line = tmp_path / "jobs.jsonl", json.dumps({"workflow": workflow})
    file.write_text(line + "\n" * 2**17 + line)  # more than is read ahead
    server, succeed = two_servers[0], type(two_servers[0]).succeed

    async def script(server: Any) -> None:
        file.write_text("")
        await succeed(server)

    server.script = script
    code, out, err = console("batch", file, "--out", tmp_path / "out", "--server", server.url)
    assert code == 4 and "1 done" in out and "1 of 2 jobs did not run" in err


@pytest.mark.parametrize("entry", [{"subfolder": "../elsewhere"}, {"subfolder": 5}])
def test_job_whose_node_lists_a_foreign_file_does_not_end_batch(
    batch: Callable[..., Any], two_servers: list[Any], entry: dict[str, Any]
) -> None:
    async def script(server: Any) -> None:
        await server.succeed()
        if submitted_seeds(server) == [0]:
            server.finish({"2": {"images": [{"filename": "a_00001_.png", "type": "output", **entry}]}})

    two_servers[0].script = script
    code, answer, _ = batch(3, servers=two_servers[:1])
    assert code == 4 and answer["done"] == 2 and answer["failed"] == 1


def test_rejected_job_is_parked_until_retry(batch: Callable[..., Any], two_servers: list[Any], tmp_path: Path) -> None:
    two_servers[0].refuse = two_servers[1].refuse = True
    code, answer, _ = batch(2)
    assert code == 4 and answer["failed"] == 2 and "failed validation" in answer["faults"][0]["error"]
    assert len([*(tmp_path / "out" / "parked").iterdir()]) == 2
    two_servers[0].refuse = two_servers[1].refuse = False
    assert batch(2)[0] == 4
    code, answer, _ = batch(2, "--retry")
    assert code == 0 and answer["done"] == 2 and not [*(tmp_path / "out" / "parked").iterdir()]


def test_batch_completes_when_server_with_a_long_queue_answers_late(
    batch: Callable[..., Any], two_servers: list[Any], others: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "AWAY_SECONDS", 20.0)
    two_servers[1].pending = others
    silent = iter([True] * 5)
    numbered = two_servers[1].first

    def first(request: web.Request) -> web.Response | None:
        if request.path == "/prompt" and next(silent, False):
            return web.Response(status=503)
        return numbered(request)

    two_servers[1].first = first
    code, answer, _ = batch(3, servers=[two_servers[0], two_servers[1]])
    assert code == 0 and answer["done"] == 3
    code, answer, _ = batch(6, servers=[two_servers[1]])
    assert code == 0 and answer["done"] == 3


def test_unreachable_server_ends_batch(console: Console, workflow: dict[str, Any], tmp_path: Path) -> None:
    file = toy_jobs.write_jobs(tmp_path / "jobs.jsonl", [{"workflow": workflow}])
    code, _, err = console("batch", file, "--out", tmp_path / "out", "--server", "http://127.0.0.1:9")
    assert code == 3 and "No ComfyUI answers at http://127.0.0.1:9" in err
    assert not (tmp_path / "out").exists()


def test_stop_event_interrupts_run(there: Any, comfy: Any) -> None:
    stop = threading.Event()

    async def never(server: Any) -> None:
        stop.set()

    comfy.script = never
    with pytest.raises(InterruptedRunError, match="was interrupted"):
        there(stop=stop)
    assert ("interrupt" in dict(comfy.requests)) or ("queue" in dict(comfy.requests)), "it is cancelled on the server"
