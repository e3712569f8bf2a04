"""A Ray cluster of two machines, in network namespaces: both work, compiled code travels, and the head is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from batch_runs import HANG_SECONDS, TOYS, Batch, Found, surroundings
from machines import PORT, Machine, machines, why_not
from waiting import wait_until

pytestmark = [
    pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'"),
    pytest.mark.skipif(bool(reason := why_not()), reason=reason or "namespaces work"),
]
TRAVEL = """\
import json, sys
from pathlib import Path
from comfyui_onediff_guard.headless.batch.crews.ray_crew import Cluster, RayCrew, connected
from comfyui_onediff_guard.headless.batch.crews.ray_actor import Setup
from comfyui_onediff_guard.headless.batch.jobs import JobsFile
from comfyui_onediff_guard.headless.batch.outputs import Outputs
from comfyui_onediff_guard.headless.hosts.local import read_local

address, here, workflows = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
jobs = list(JobsFile(here / "jobs.jsonl", workflows=workflows, input_dir=None, read=read_local))
outputs = Outputs(here / "out")
with connected(Cluster(address)) as ray, outputs.token() as token:
    setup = Setup((here / "models",), here, here / "out", token, 1, None)
    with RayCrew(ray, setup, 2) as crew:
        ready = [crew.events.get(timeout=300) for _ in range(2)]
        found = []
        for event, job in zip(ready, jobs):
            event.worker.start(job)
            done = crew.events.get(timeout=600)
            found.append([event.worker.name, repr(done.outcome), getattr(done.outcome, "graphs", None)])
print(json.dumps(found))
"""


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[Machine, Machine, Path]]:
    """Two machines, and a folder that both see."""
    with surroundings() as environment, tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        of_all = {name: value for name, value in environment.items() if name != "RAY_TMPDIR"}
        with machines(["a", "b"], Path(folder), of_all) as (head, other):
            shared = tmp_path / "shared"
            (shared / "models").mkdir(parents=True)
            yield head, other, shared


@pytest.fixture
def pair(apart: tuple[Machine, Machine, Path]) -> tuple[Machine, Machine, Path]:
    """The same as one cluster: the head, another one."""
    head, other, _ = apart
    head.start_ray(head.address)
    other.start_ray(head.address)
    return apart


def on(machine: Machine, shared: Path, jobs: int, *options: str, **busy: Any) -> tuple[Batch, list[str]]:
    """A batch, and its command there."""
    log = shared / "log"
    lines = [{"workflow": toy_jobs.workflow(log=str(log), **busy), "matrix": {"seeds": {"count": jobs}}}]
    file = toy_jobs.write_jobs(shared / "jobs.jsonl", lines)
    batch = Batch(file, shared / "out", (), machine.environment, log=log)
    return batch, machine.command(
        *(sys.executable, "-c", TOYS, "batch", str(file), "--out", str(shared / "out"), "--json"),
        *(
            "--models",
            str(shared / "models"),
            "--ray",
            f"{machine.address}:{PORT}",
            "--workers",
            "2",
            "--attempts",
            "5",
        ),
    )


def test_both_machines_work_and_the_head_is_lost(
    pair: tuple[Machine, Machine, Path], figure: Callable[[str, object], None]
) -> None:
    head, other, shared = pair
    batch, command = on(head, shared, 24, "--workers", "2", seconds=1.0)
    running = subprocess.Popen(command, env=head.environment, cwd=shared, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: len(batch.whole()) >= 8, "eight jobs are done", meanwhile=running)
    workers = {json.loads((path / "job.json").read_text())["worker"].partition(":")[0] for path in batch.whole()}
    assert workers == {head.name, other.name}
    head.lose()
    assert running.wait(HANG_SECONDS) != 0
    other.lose()  # as its Ray does by itself within a minute without a head
    done = len(batch.whole())
    assert done < 24
    other.start_ray(other.address, cpus=2)  # a new head
    batch, command = on(other, shared, 24, "--workers", "2", seconds=1.0)
    again = subprocess.run(
        command, env=other.environment, cwd=shared, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    answer = json.loads(again.stdout)
    assert again.returncode == 0 and answer["already_done"] >= done
    found = Found.in_(batch)
    assert found.seeds == list(range(24)) and not found.broken and found.redone == 0
    figure("a head of two machines lost in a batch: outputs that lack, are broken, or were made again though whole", 0)


def test_what_one_machine_compiled_the_other_does_not(
    pair: tuple[Machine, Machine, Path], root: Path, model_folder: Callable[..., Path]
) -> None:
    head, other, shared = pair
    (shared / "models" / "CogVideoX-2b").symlink_to(model_folder("2b"))
    sets = ["1.backend=inductor", "1.precision=fp32", "4.width=64", "4.height=48", "4.frames=9", "4.steps=2"]
    line = {"workflow": "cogvideox_text_to_video_webp.json", "set": sets, "matrix": {"seeds": {"count": 2}}}
    toy_jobs.write_jobs(shared / "jobs.jsonl", [line])
    words = [sys.executable, "-c", TRAVEL, f"{head.address}:{PORT}", str(shared), str(root / "workflows" / "api")]
    ran = subprocess.run(
        head.command(*words), env=head.environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (first, one, compiled), (second, two, compiled_there) = json.loads(ran.stdout.splitlines()[-1])
    assert {first.partition(":")[0], second.partition(":")[0]} == {head.name, other.name}
    assert compiled, one
    assert compiled_there == 0, two
    kept = [sorted(path.name for path in (machine.folder / "compiled").iterdir()) for machine in pair[:2]]
    ends = sorted(name.partition(".")[2] for name in kept[0])
    assert kept[0] == kept[1]
    assert ends == ["compiled"]
