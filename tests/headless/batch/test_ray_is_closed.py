"""Ray runs whatever reaches it: one that `batch` starts listens to this machine alone, and asks for a token; a cluster
that asks for one gets it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy_jobs
from batch_runs import HANG_SECONDS, TOYS, Batch, surroundings
from comfyui_onediff_guard.headless.batch import ray_pool
from machines import PORT, Machine, machines, why_not
from waiting import wait_until

pytestmark = pytest.mark.skipif(not find_spec("ray"), reason="Ray is not installed: pip install '.[scale]'")


def without_a_say(environment: dict[str, str], home: Path) -> dict[str, str]:
    """The environment of somebody who told Ray nothing about tokens."""
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
    return {**kept, "HOME": str(home), "USERPROFILE": str(home)}


def listening(process: psutil.Process) -> dict[str, str]:
    """The addresses on which it and its children take connections, and which of them does."""
    found: dict[str, str] = {}
    for each in [process, *process.children(recursive=True)]:
        for connection in each.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found[f"{connection.laddr.ip}:{connection.laddr.port}"] = each.name()
    return found


def is_loopback(address: str) -> bool:
    ip = ip_address(address.rpartition(":")[0])
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


@pytest.mark.skipif(sys.platform != "linux", reason="on macOS and Windows Ray does so by itself")
def test_a_ray_that_is_started_here_listens_to_this_machine_alone_and_lets_nobody_in(
    toy_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    log, gate = tmp_path / "log", tmp_path / "gate"
    gate.write_text("0")
    lines = [{"workflow": toy_jobs.workflow(gate=str(gate), log=str(log))}]
    run = toy_batch(lines, "--workers", "1", log=log)
    run.environment = without_a_say(run.environment, tmp_path / "home")
    process = run.start()
    wait_until(run.starts, "a job begins", meanwhile=process)
    found = listening(psutil.Process(process.pid))
    assert {"gcs_server", "raylet"} <= {*found.values()}, found
    assert not [address for address in found if not is_loopback(address)], found
    words = [word for each in psutil.Process(process.pid).children(recursive=True) for word in each.cmdline()]
    (address,) = {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    intruder = toy_batch(lines, "--ray", address)
    intruder.environment = run.environment | ray_pool.LOOPBACK
    token_in(tmp_path / "home", "a" * 32)
    intruder.start()
    answer = intruder.finish()
    assert answer["code"] == 3 and "token" in answer["error"]
    gate.write_text("1")
    assert run.finish()["done"] == 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[Machine, Path]]:
    """A machine without a Ray yet, to which nothing was told about tokens, and a folder."""
    if reason := why_not():
        pytest.skip(reason)
    with surroundings() as environment, tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        told = without_a_say({n: v for n, v in environment.items() if n != "RAY_TMPDIR"}, tmp_path / "home")
        with machines(["a", "b"], Path(folder), told) as (head, _):
            (tmp_path / "models").mkdir()
            yield head, tmp_path


def answer_of(head: Machine, here: Path, **variables: str) -> tuple[int, dict[str, Any], str]:
    """Of a batch of one job."""
    file = toy_jobs.write_jobs(here / "jobs.jsonl", [{"workflow": toy_jobs.workflow()}])
    words = [sys.executable, "-c", TOYS, "batch", str(file), "--out", tempfile.mkdtemp(dir=here), "--json"]
    words += ["--models", str(here / "models"), "--ray", f"{head.address}:{PORT}", "--workers", "1"]
    ran = subprocess.run(
        head.command(*words),
        env=head.environment | variables,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )
    return ran.returncode, json.loads(ran.stdout), ran.stderr


def token_in(home: Path, text: str) -> None:
    (home / ".ray").mkdir(parents=True, exist_ok=True)
    (home / ".ray" / "auth_token").write_text(text)


def test_a_cluster_that_asks_for_a_token_gets_it_and_nobody_else_gets_in(cluster: tuple[Machine, Path]) -> None:
    head, here = cluster
    token_in(here / "home", "a" * 32)
    head.start_ray(head.address)  # with the token that it finds
    code, answer, said = answer_of(head, here)
    assert code == 0 and answer["done"] == 1, said
    token_in(here / "other", "b" * 32)
    (here / "nobody").mkdir()
    for home in ("other", "nobody"):
        code, answer, said = answer_of(head, here, HOME=str(here / home))
        assert code == 3 and "auth_token" in answer["error"], said
    code, answer, _ = answer_of(head, here, HOME=str(here / "nobody"), RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="a" * 32)
    assert code == 0 and answer["done"] == 1


def test_where_nobody_asks_for_a_token_it_is_not_to_be_shown(cluster: tuple[Machine, Path]) -> None:
    """Ray's two modes do not get on."""
    head, here = cluster
    head.environment["RAY_AUTH_MODE"] = "disabled"
    head.start_ray(head.address)
    del head.environment["RAY_AUTH_MODE"]
    code, answer, said = answer_of(head, here)
    assert code == 0 and answer["done"] == 1, said
    token_in(here / "home", "a" * 32)
    code, answer, said = answer_of(head, here)
    assert code == 3 and "set RAY_AUTH_MODE=disabled" in answer["error"], said
    code, answer, said = answer_of(head, here, RAY_AUTH_MODE="disabled")
    assert code == 0 and answer["done"] == 1, said
