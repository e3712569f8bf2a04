"""A batch command in its own process, usually with toy jobs: watch it, kill parts of it, check its outputs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from waiting import HANG_SECONDS

HERE = Path(__file__).resolve().parent
TOYS = "import toy_jobs; toy_jobs.main()"
INDUCTORS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")  # removed, so that workers use their own caches


@contextmanager
def batch_environment() -> Iterator[dict[str, str]]:
    """The environment of a batch, with Ray's files in a temporary folder. Ray's sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        yield {
            **{name: value for name, value in os.environ.items() if name not in INDUCTORS},
            "PYTHONPATH": path,
            "RAY_TMPDIR": folder,
            "RAY_AUTH_TOKEN_PATH": str(Path(folder) / "token"),
            "RAY_AUTH_MODE": "disabled",
            "RAY_worker_niceness": "0",  # with Ray's 15, workers of a busy machine wait for minutes
            "OMP_NUM_THREADS": "1",
        }


def without_ray_auth(environment: dict[str, str], home: Path) -> dict[str, str]:
    """The environment without any setting of Ray's tokens."""
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH_")}
    return {**kept, "HOME": str(home), "USERPROFILE": str(home)}


@dataclass
class Batch:
    """One batch command, which can be started repeatedly on one folder."""

    jobs: Path
    out: Path
    options: tuple[str, ...]
    environment: dict[str, str]
    log: Path | None = None  # toy jobs write their starts to it
    within: Callable[..., list[str]] = lambda *words: [*words]  # command → command that runs it on a machine
    killed: list[int] = field(default_factory=list)  # workers
    process: subprocess.Popen[str] | None = None
    program: str = TOYS

    @property
    def told(self) -> Path:
        """The file with its standard error."""
        return self.jobs.with_suffix(".told")

    def start(self, *more: str) -> subprocess.Popen[str]:
        """more: further options."""
        options = ["--out", str(self.out), *self.options, *more, "--json"]
        command = [sys.executable, "-c", self.program, "batch", str(self.jobs), *options]
        with self.told.open("w", encoding="utf-8") as told:  # a pipe that nobody reads would fill and block it
            self.process = subprocess.Popen(
                self.within(*command),
                cwd=self.jobs.parent,
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=told,
                text=True,
                start_new_session=True,
            )
        return self.process

    def finish(self) -> dict[str, Any]:
        """Wait for the end and return the printed JSON."""
        assert self.process
        out, _ = self.process.communicate(timeout=HANG_SECONDS)
        err = self.told.read_text(encoding="utf-8")
        if not out.startswith("{"):
            raise RuntimeError(
                f"it ended with {self.process.returncode}, printed {out[:300]!r}, and said: {err[-3000:]}"
            )
        return {**json.loads(out), "code": self.process.returncode, "told": err}

    def run(self, *more: str) -> dict[str, Any]:
        self.start(*more)
        return self.finish()

    def end(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            self.process.communicate()

    def whole(self) -> list[Path]:
        return [path.parent for path in self.out.glob("*/job.json")]

    def starts(self) -> list[dict[str, Any]]:
        """Each start of a toy job: seed, process, time."""
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()] if self.log and self.log.exists() else []
        )

    def kill_worker(self) -> bool:
        """Kill a worker that has started a job. Returns whether there was one."""
        for start in reversed(self.starts()):
            pid = start["pid"]
            with suppress(psutil.Error):
                if pid not in self.killed and psutil.Process(pid).is_running():
                    os.kill(pid, signal.SIGKILL)
                    self.killed.append(pid)
                    return True
        return False

    def run_with_kills(self, every: int, driver_at: int, jobs: int) -> int:
        """Kill a worker after each `every` finished jobs; kill and restart the command once, after `driver_at` jobs.
        Returns the number of starts when all outputs are complete or the command ended."""
        process, next_kill, starts = self.start(), every, 1
        until = time.monotonic() + HANG_SECONDS
        while time.monotonic() < until:
            finished = len(self.whole())
            if finished >= driver_at and starts == 1:
                process.kill()
                process.communicate()
                process, starts = self.start(), 2
            elif finished >= next_kill and finished < jobs and self.kill_worker():
                next_kill += every
            if process.poll() is not None or finished >= jobs:
                return starts
            time.sleep(0.02)
        raise TimeoutError(f"{len(self.whole())} of {jobs} jobs are done after {HANG_SECONDS:g} s")


@dataclass(frozen=True)
class OutputCheck:
    """The outputs of toy jobs in a folder, checked against the jobs."""

    seeds: list[int]  # of complete outputs, sorted
    broken: list[str]  # incomplete outputs
    redone: int  # starts of jobs whose outputs were complete
    begun: int  # starts

    @classmethod
    def of(cls, batch: Batch) -> OutputCheck:
        seeds, broken, ends = [], [], dict[int, float]()
        for folder in batch.out.iterdir():
            if folder.name in ("parked", ".running"):
                broken += [str(left) for left in folder.rglob("*.txt")]
                continue
            try:
                record = json.loads((folder / "job.json").read_text())
                seed = record["workflow"]["1"]["inputs"]["seed"]
                texts = [(folder / name).read_text() for name in record["files"]]
                whole = [text.rpartition(" ")[2] for text in texts] == ["0", "1", "2"] and len(texts) == 3
                others = {path.name for path in folder.iterdir()} - {*record["files"], "job.json"}
                if others or not whole or any(f" {seed} " not in text for text in texts):
                    broken.append(folder.name)
                seeds.append(seed)
                ends[seed] = (folder / "job.json").stat().st_mtime
            except (OSError, ValueError, KeyError) as error:
                broken.append(f"{folder.name}: {error}")
        starts = batch.starts()
        redone = sum(start["at"] > ends.get(start["seed"], float("inf")) for start in starts)
        return cls(sorted(seeds), broken, redone, len(starts))
