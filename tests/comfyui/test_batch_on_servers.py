"""`onediff-guard batch --server`: one queue feeds two real ComfyUIs, of which some are lost, late, or lack nodes."""

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

# The command, with less patience, so that a test has not to wait for a minute.
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
    """Nodes of ComfyUI's own. blurs: how many, one after the other; each takes its time."""
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
    """A line of jobs of a second or more."""
    return {"workflow": plain(size=768, blurs=blurs), "matrix": {"inputs": {"1.color": list(range(1, jobs + 1))}}}


class ServerBatch(Batch):
    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, lambda: f"{what}\n{self.told.read_text()}", meanwhile=self.process)

    def records(self) -> list[dict[str, Any]]:
        """Of all outputs, which are whole: each file that a record names is there, and no other."""
        found = []
        for file in self.out.glob("*/job.json"):
            record = json.loads(file.read_text(encoding="utf-8"))
            assert record["content"] == file.parent.name and record["files"], record
            there = {path.relative_to(file.parent).as_posix() for path in file.parent.rglob("*") if path.is_file()}
            assert there == {*record["files"], "job.json"}
            found.append(record)
        return found

    def nothing_is_left(self) -> bool:
        """Whether there are outputs and nothing that was begun."""
        return not list((self.out / ".running").rglob("*.*"))


BatchOf = Callable[..., ServerBatch]


@pytest.fixture(scope="module")
def both(any_leg: legs.Leg, small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A ComfyUI with the pack and a small model, and one without the pack."""
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


def runs_of(server: legs.Server) -> int:
    return len(server.history())


def queue_of(server: legs.Server) -> int:
    queue = server.ask("/queue")
    return len(queue["queue_running"]) + len(queue["queue_pending"])


def lose(server: legs.Server) -> None:
    """End a ComfyUI as a lack of memory does."""
    children = psutil.Process(server.pid).children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children, HANG_SECONDS)


def test_one_queue_feeds_both_and_each_gets_what_it_has_nodes_for(both: Pair, batch: BatchOf) -> None:
    """The one without the pack is named first, takes none of our jobs, and spoils none."""
    one, other = both
    before = runs_of(one) + runs_of(other)
    lines = [ours(one.leg, 2), {"workflow": plain(), "matrix": {"inputs": {"1.color": COLORS}}}, slow(4)]
    answer = (run := batch(lines, other, one)).run()
    assert answer["code"] == 0 and answer["done"] == 10 and not answer["faults"], answer["told"]
    records = run.records()
    assert len(records) == 10 and run.nothing_is_left()
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
    assert runs_of(one) + runs_of(other) == before + 10, "each once"
    answer = run.run()
    assert answer["code"] == 0 and answer["already_done"] == 10
    assert runs_of(one) + runs_of(other) == before + 10, "none again"


def test_what_no_server_takes_is_parked_and_the_rest_goes_on(both: Pair, batch: BatchOf) -> None:
    """It passes the check of the file, since a server has the node. The model is on none."""
    one, other = both
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


def test_a_node_that_no_server_has_is_told_before_anything_runs(both: Pair, batch: BatchOf) -> None:
    before = [runs_of(server) for server in both]
    unknown = {"1": {"class_type": "NoSuchNode", "inputs": {}}}
    answer = (run := batch([{"workflow": plain(8)}, {"workflow": unknown}], *both)).run()
    assert answer["code"] == 2
    assert "jobs.jsonl, line 2: " in answer["error"] and "has no node type NoSuchNode" in answer["error"]
    assert [runs_of(server) for server in both] == before and not run.out.exists()


def test_ctrl_c_leaves_nothing_at_the_servers_and_the_same_command_goes_on(both: Pair, batch: BatchOf) -> None:
    run = batch([slow(8, blurs=2)], *both)
    process = run.start()
    run.until(lambda: len(run.records()) >= 2 and all(map(queue_of, both)), "both work")
    process.send_signal(signal.SIGINT)
    answer = run.finish()
    assert answer["code"] == 130 and "the same command goes on" in answer["told"]
    wait_until(lambda: not any(map(queue_of, both)), "the servers' queues are empty")  # what computes is waited for
    done = len(run.records())
    assert 2 <= done < 8 and run.nothing_is_left()
    before = sum(map(runs_of, both))
    answer = run.run()
    assert answer["code"] == 0 and answer["already_done"] == done and answer["done"] == 8 - done
    assert sum(map(runs_of, both)) == before + 8 - done and len(run.records()) == 8


def test_a_server_is_killed_and_another_comes_up_late(
    both: Pair, any_leg: legs.Leg, batch: BatchOf, tmp_path: Path
) -> None:
    """Three of which one is there all the time. The one that is killed is the one that comes up late: it is started
    twice."""
    port = legs.free_port()
    run = batch([slow(40)], both[1], f"http://127.0.0.1:{port}")
    run.start()
    run.until(lambda: "It gets jobs as soon as it does" in run.told.read_text(), "it is told to be away")
    for _ in range(2):
        had = len([record for record in run.records() if f":{port}" in record["worker"]])
        with legs.started(any_leg, tmp_path / "late", port=port) as late:

            def works(late: legs.Server = late, had: int = had) -> bool:
                mine = [record for record in run.records() if record["worker"] == late.url]
                return len(mine) > had and bool(late.ask("/queue")["queue_running"])

            run.until(works, "the late one works")
            lose(late)
    answer = run.finish()
    assert answer["code"] == 0 and answer["done"] == 40 and not answer["failed"], answer["told"]
    assert answer["workers_lost"] in (1, 2)  # a batch may be over before the second is noticed
    assert sorted(record["workflow"]["1"]["inputs"]["color"] for record in run.records()) == [*range(1, 41)]
    assert run.nothing_is_left()


def test_the_only_server_restarts(any_leg: legs.Leg, batch: BatchOf, tmp_path: Path) -> None:
    port = legs.free_port()
    with legs.started(any_leg, tmp_path / "base", port=port) as server:
        run = batch([slow(6)], server)
        run.start()
        run.until(lambda: len(run.records()) >= 2 and bool(server.ask("/queue")["queue_running"]), "it works")
        lose(server)
    with legs.started(any_leg, tmp_path / "base", port=port):
        answer = run.finish()
    assert answer["code"] == 0 and answer["done"] == 6 and answer["workers_lost"] == 1, answer["told"]
    assert len(run.records()) == 6 and run.nothing_is_left()


def test_a_run_that_is_interrupted_there_is_tried_again(both: Pair, batch: BatchOf) -> None:
    """Whoever sits at that page may press the button; a run that always is, is parked."""
    one = both[0]
    run = batch([slow(1, blurs=6)], one)
    process = run.start("--attempts", "2")
    for _ in range(2):
        before = runs_of(one)
        run.until(lambda: bool(one.ask("/queue")["queue_running"]), "it runs")
        one.ask("/interrupt", {})
        run.until(lambda before=before: runs_of(one) > before or process.poll() is not None, "it is interrupted")
    answer = run.finish()
    assert answer["code"] == 4 and answer["failed"] == 1, answer["told"]
    assert "interrupted on the server" in answer["faults"][0]["error"]
    answer = run.run("--retry")
    assert answer["code"] == 0 and answer["done"] == 1
