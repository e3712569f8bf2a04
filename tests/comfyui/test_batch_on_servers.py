"""`onediff-guard batch --server` on two real ComfyUIs, some of which are killed, start late, or lack nodes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import legs
import numpy as np
import psutil
import pytest
from batch_runs import Batch
from PIL import Image
from runs import HEALTHY, SMALL, frames_of
from toy_jobs import write_jobs
from waiting import HANG_SECONDS, wait_until

pytestmark = pytest.mark.comfyui

# The command with shorter time-outs, so that a test does not wait for a minute.
COMMAND = """\
import sys
from comfyui_onediff_guard.headless.batch import server_pool
from comfyui_onediff_guard.headless.commands import cli
server_pool.PATIENCE_SECONDS, server_pool.ASK_SECONDS = 4.0, 1.0
sys.exit(cli.main())
"""
COLORS = [0xFF0000, 0x00FF00, 0x0000FF, 0x102030]
Pair = tuple[legs.Server, legs.Server]


def plain(color: int = 0, size: int = 32, blurs: int = 0) -> dict[str, Any]:
    """A graph of ComfyUI's own nodes. blurs: number of blur nodes in a row, which take time."""
    graph: dict[str, Any] = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": size, "height": size, "batch_size": 1, "color": color}}
    }
    last = "1"
    for number in range(blurs):
        inputs = {"image": [last, 0], "blur_radius": 31, "sigma": 10.0}
        graph[last := f"b{number}"] = {"class_type": "ImageBlur", "inputs": inputs}
    graph["9"] = {"class_type": "SaveImage", "inputs": {"images": [last, 0], "filename_prefix": "plain"}}
    return graph


def slow(jobs: int, blurs: int = 1) -> dict[str, Any]:
    """A line of jobs that take a second or more each."""
    return {"workflow": plain(size=768, blurs=blurs), "matrix": {"inputs": {"1.color": list(range(1, jobs + 1))}}}


class ServerBatch(Batch):
    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"{what}\n{self.told.read_text()}", meanwhile=self.process)

    def records(self) -> list[dict[str, Any]]:
        """Return the records of all outputs; each output has exactly the files that its record names."""
        found = []
        for file in self.out.glob("*/job.json"):
            record = json.loads(file.read_text(encoding="utf-8"))
            assert record["content"] == file.parent.name and record["files"], record
            files = {path.relative_to(file.parent).as_posix() for path in file.parent.rglob("*") if path.is_file()}
            assert files == {*record["files"], "job.json"}
            found.append(record)
        return found

    def has_nothing_unfinished(self) -> bool:
        """Return whether no unfinished output is left."""
        return not list((self.out / ".running").rglob("*.*"))


BatchOf = Callable[..., ServerBatch]


@pytest.fixture(scope="module")
def two_servers(any_leg: legs.Leg, small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Two servers: a ComfyUI with the pack and a small model, and one without the pack."""
    ours, others = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("others")
    legs.install_pack(ours / "custom_nodes")
    (ours / "models" / "diffusers").mkdir(parents=True)
    (ours / "models" / "diffusers" / HEALTHY).symlink_to(small_models / "diffusers" / HEALTHY)
    with legs.started(any_leg, ours) as one, legs.started(any_leg, others) as other:
        yield one, other


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[BatchOf]:
    """batch(lines, *servers or urls)"""
    made: list[ServerBatch] = []

    def make(lines: Sequence[dict[str, Any]], *servers: legs.Server | str) -> ServerBatch:
        options = ["--workflows", str(legs.ROOT / "workflows" / "api")]
        for server in servers:
            options += ["--server", server if isinstance(server, str) else server.url]
        jobs = write_jobs(tmp_path / "jobs.jsonl", lines)
        made.append(ServerBatch(jobs, tmp_path / "out", tuple(options), {**os.environ}, program=COMMAND))
        return made[-1]

    yield make
    for each in made:
        each.end()


def ours(leg: legs.Leg, seeds: int) -> dict[str, Any]:
    changes = {"OneDiffGuardLoadPipeline.model": HEALTHY, **SMALL}
    sets = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    return {"workflow": leg.workflow.name, "set": sets, "matrix": {"seeds": {"first": 1, "count": seeds}}}


def run_count(server: legs.Server) -> int:
    return len(server.history())


def queue_length(server: legs.Server) -> int:
    queue = server.ask("/queue")
    return len(queue["queue_running"]) + len(queue["queue_pending"])


def kill_server(server: legs.Server) -> None:
    """Kill a ComfyUI, as the out-of-memory killer does."""
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, HANG_SECONDS)


def test_queue_sends_each_server_only_jobs_it_has_nodes_for(two_servers: Pair, batch: BatchOf) -> None:
    """The server without the pack is named first, and gets none of the pack's jobs."""
    one, other = two_servers
    before = run_count(one) + run_count(other)
    lines = [ours(one.leg, 2), {"workflow": plain(), "matrix": {"inputs": {"1.color": COLORS}}}, slow(4)]
    answer = (run := batch(lines, other, one)).run()
    assert answer["code"] == 0 and answer["done"] == 10 and not answer["faults"], answer["told"]
    records = run.records()
    assert len(records) == 10 and run.has_nothing_unfinished()
    where = {record["worker"] for record in records if "OneDiffGuard" in json.dumps(record["workflow"])}
    assert where == {one.url}
    assert {record["worker"] for record in records} == {one.url, other.url}
    for record in records:
        (file,) = record["files"]
        color, path = record["workflow"]["1"]["inputs"].get("color"), run.out / record["content"] / file
        if color in COLORS:
            with Image.open(path) as image:
                assert image.size == (32, 32)
                assert {*image.convert("RGB").getdata()} == {(color >> 16, color >> 8 & 255, color & 255)}
        elif color is None:
            frames = frames_of(path)
            assert frames.shape == (9, 64, 96, 3) and np.ptp(frames) > 0
    assert run_count(one) + run_count(other) == before + 10, "each job ran once"
    answer = run.run()
    assert answer["code"] == 0 and answer["already_done"] == 10
    assert run_count(one) + run_count(other) == before + 10, "no job ran again"


def test_job_refused_by_every_server_is_parked_and_others_run(two_servers: Pair, batch: BatchOf) -> None:
    """The job passes the check of its file, since one server has the node. No server has the model."""
    one, other = two_servers
    lost = ours(one.leg, 1)
    lost["set"] = [*lost["set"], "OneDiffGuardLoadPipeline.model=nowhere"]
    answer = (run := batch([lost, {"workflow": plain(7)}], one, other)).run()
    assert answer["code"] == 4 and answer["done"] == 1 and answer["failed"] == 1, answer["told"]
    (fault,) = answer["faults"]
    assert "nowhere" in fault["error"] or "has no node type OneDiffGuard" in fault["error"]
    assert fault["error"] in answer["told"]
    (parked,) = (run.out / "parked").iterdir()
    assert json.loads(parked.read_text())["error"] == fault["error"]
    assert run.run()["parked_before"] == 1


def test_unknown_node_type_is_reported_before_any_job_runs(two_servers: Pair, batch: BatchOf) -> None:
    before = [run_count(server) for server in two_servers]
    unknown = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
    answer = (run := batch([{"workflow": plain(8)}, {"workflow": unknown}], *two_servers)).run()
    assert answer["code"] == 2
    assert "jobs.jsonl, line 2: " in answer["error"] and "has no node type NoSuchNode" in answer["error"]
    assert [run_count(server) for server in two_servers] == before and not run.out.exists()


def test_ctrl_c_empties_server_queues_and_same_command_resumes(two_servers: Pair, batch: BatchOf) -> None:
    run = batch([slow(8, blurs=2)], *two_servers)
    process = run.start()
    run.until(lambda: len(run.records()) >= 2 and all(map(queue_length, two_servers)), "both work")
    process.send_signal(signal.SIGINT)
    answer = run.finish()
    assert answer["code"] == 130 and "run the same command" in answer["told"]
    wait_until(lambda: not any(map(queue_length, two_servers)), "the queues are empty")  # running jobs end first
    done = len(run.records())
    assert 2 <= done < 8 and run.has_nothing_unfinished()
    before = sum(map(run_count, two_servers))
    answer = run.run()
    assert answer["code"] == 0 and answer["already_done"] == done and answer["done"] == 8 - done
    assert sum(map(run_count, two_servers)) == before + 8 - done and len(run.records()) == 8


def test_batch_completes_when_server_starts_late_and_is_killed_twice(
    two_servers: Pair, any_leg: legs.Leg, batch: BatchOf, tmp_path: Path
) -> None:
    """One server runs all the time. The other one starts late, is killed, starts again, and is killed again."""
    port = legs.free_port()
    run = batch([slow(40)], two_servers[1], f"http://127.0.0.1:{port}")
    run.start()
    run.until(lambda: "It gets jobs when it answers again" in run.told.read_text(), "it is reported as away")
    for _ in range(2):
        had = len([record for record in run.records() if f":{port}" in record["worker"]])
        with legs.started(any_leg, tmp_path / "late", port=port) as late:

            def is_working(late: legs.Server = late, had: int = had) -> bool:
                mine = [record for record in run.records() if record["worker"] == late.url]
                return len(mine) > had and bool(late.ask("/queue")["queue_running"])

            run.until(is_working, "the late server works")
            kill_server(late)
    answer = run.finish()
    assert answer["code"] == 0 and answer["done"] == 40 and not answer["failed"], answer["told"]
    assert answer["workers_lost"] in (1, 2)  # a batch may end before the second kill is noticed
    assert sorted(record["workflow"]["1"]["inputs"]["color"] for record in run.records()) == [*range(1, 41)]
    assert run.has_nothing_unfinished()


def test_batch_completes_when_only_server_restarts(any_leg: legs.Leg, batch: BatchOf, tmp_path: Path) -> None:
    port = legs.free_port()
    with legs.started(any_leg, tmp_path / "base", port=port) as server:
        run = batch([slow(6)], server)
        run.start()
        run.until(lambda: len(run.records()) >= 2 and bool(server.ask("/queue")["queue_running"]), "it works")
        kill_server(server)
    with legs.started(any_leg, tmp_path / "base", port=port):
        answer = run.finish()
    assert answer["code"] == 0 and answer["done"] == 6 and answer["workers_lost"] == 1, answer["told"]
    assert len(run.records()) == 6 and run.has_nothing_unfinished()


def test_job_interrupted_on_server_is_retried_then_fails(two_servers: Pair, batch: BatchOf) -> None:
    """A user may press Interrupt on the server's page. A job that is interrupted in each attempt fails."""
    one = two_servers[0]
    run = batch([slow(1, blurs=6)], one)
    process = run.start("--attempts", "2")
    for _ in range(2):
        before = run_count(one)
        run.until(lambda: bool(one.ask("/queue")["queue_running"]), "it runs")
        one.ask("/interrupt", {})
        run.until(lambda before=before: run_count(one) > before or process.poll() is not None, "it is interrupted")
    answer = run.finish()
    assert answer["code"] == 4 and answer["failed"] == 1, answer["told"]
    assert "interrupted on the server" in answer["faults"][0]["error"]
    answer = run.run("--retry")
    assert answer["code"] == 0 and answer["done"] == 1
