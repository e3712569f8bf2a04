"""One run over several GPUs: a process for each, none of which is ComfyUI's, and this process, which watches them.

The processes are called ranks. Rank 0 writes outputs and reports progress; the others take part in the shared
computation. A rank that ends early, or sends no heartbeat, ends the run, and the error names it: the others may wait
for it in a call that cannot be interrupted.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import HeadlessError, InterruptedRunError, OutputError, RunFailedError, WorkflowError
from ..files import temporary_folder
from ..terminal import cleaned_output
from ..workflow.graph import Graph
from .result import ProgressCallback, RunProgress, RunResult, no_progress

TICK = 0.5  # seconds between checks of the ranks
SETTLE = 1.0  # seconds to collect other ranks' errors, after the first one failed
GRACE = 5.0  # seconds between SIGTERM and SIGKILL
BEAT = 1.0  # seconds between a rank's heartbeats; their thread also runs while it computes, loads or compiles
SILENT = 60.0  # seconds without a heartbeat before the run is ended
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def gpus_here() -> int:
    """Return the number of GPUs that PyTorch sees; 0 on a machine that computes on its CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_number(asked: str) -> int:
    """Return the number of processes that `--gpus` requests: a number, or 'auto' for one per GPU.

    Raises WorkflowError if there are fewer GPUs, or this system's PyTorch has no `torch.distributed`.
    """
    from torch import distributed

    have = gpus_here()
    number = max(have, 1) if asked == "auto" else int(asked)
    if number > 1 and (os.name != "posix" or not distributed.is_available()):
        raise WorkflowError("--gpus needs Linux, and a PyTorch with torch.distributed. Remove it to use one GPU.")
    if have and number > have:
        raise WorkflowError(
            f"--gpus is {number}, but PyTorch sees {have} {'GPU' if have == 1 else 'GPUs'} here. "
            f"Use --gpus {have}, or --gpus auto."
        )
    return number


def run_over_ranks(
    workflow: Graph | Mapping[str, Any],
    *,
    size: int,
    timeout: float | None = None,
    on_progress: ProgressCallback = no_progress,
    **options: Any,
) -> RunResult:
    """Run a workflow over several GPUs; on a machine without a GPU, in as many processes on its CPU.

    The result has files only: `results` is empty, as for a server's run. Other arguments and errors are those of
    `run_local`; an error other than WorkflowError names its rank.
    """
    started = time.perf_counter()
    with temporary_folder("onediff-guard-ranks-") as folder:
        job = _RankRun(workflow, options, size, gpus_here(), folder / "meeting")
        with _started(job) as ranks:
            result = _watch(ranks, timeout, on_progress)
    return replace(result, seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class _RankRun:
    """A run, as passed to every rank.

    options: for `run_local`. gpus: the number that PyTorch sees; 0: CPU. meeting: a file through which ranks find each
    other.
    """

    workflow: Any
    options: Mapping[str, Any]
    size: int
    gpus: int
    meeting: Path


@dataclass(frozen=True)
class _Failed:
    """The error that ends a rank. at: its time, by the clock that all processes of a machine share; later errors of
    other ranks may be its consequences."""

    kind: type[HeadlessError]
    text: str
    at: float


# --- in the process of a rank -----------------------------------------------------------------------------------------


def _run_rank(number: int, job: _RankRun, channel: Any) -> None:
    """Run one rank, until it is done and released. It ends when the watching process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lock = threading.Lock()

    def tell(message: Any) -> None:
        with lock:
            channel.send(message)

    threading.Thread(target=_beat, args=(tell,), daemon=True).start()
    with cleaned_output(), Path(os.devnull).open("w") as nowhere:
        if number:  # only rank 0 prints
            sys.stderr = nowhere
        try:
            _see_one_gpu(number, job)
            _compute(number, job, tell, channel)
        except BaseException as error:  # noqa: BLE001 - the watching process reports it
            with suppress(OSError):
                tell(_failed(error))
            os._exit(1)  # skips clean-up that could wait for other ranks


def _compute(number: int, job: _RankRun, tell: Callable[[Any], None], channel: Any) -> None:
    from tqdm import tqdm

    from ...pipelines.parallel.group import joined
    from .local import run_local

    tqdm.set_lock(threading.RLock())  # its default is a system semaphore, which a kill would leak
    with joined(number, job.size, job.meeting, cuda=bool(job.gpus)):
        on_progress = no_progress if number else tell
        result = run_local(job.workflow, **job.options, on_progress=on_progress, first=number == 0)
        tell(replace(result, results={}))
        with suppress(EOFError, OSError):
            channel.recv()  # until all are done: the others may still need this rank


def _beat(tell: Callable[[Any], None]) -> None:
    """Send heartbeats; end when the watching process ends."""
    with suppress(OSError):
        while True:
            tell(None)
            time.sleep(BEAT)
    os._exit(1)


def _see_one_gpu(number: int, job: _RankRun) -> None:
    """Let this process see only its own GPU, and communicate only within this machine. PyTorch must not be imported
    yet."""
    if job.gpus:
        variable = next((name for name in _VISIBLE if os.environ.get(name)), _VISIBLE[-1])
        visible = os.environ.get(variable, "")
        os.environ[variable] = visible.split(",")[number].strip() if visible else str(number)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


def _failed(error: BaseException) -> _Failed:
    """Convert an error to a message. WorkflowError and OutputError keep their class; all others become
    RunFailedError."""
    kind = next((kind for kind in (WorkflowError, OutputError) if isinstance(error, kind)), RunFailedError)
    text = str(error) if isinstance(error, HeadlessError) else f"{type(error).__name__}: {error}"
    return _Failed(kind, text, time.monotonic())


# --- in the process that watches them ---------------------------------------------------------------------------------


@dataclass
class _Rank:
    """One of the processes, and its messages."""

    name: str  # for messages
    process: BaseProcess
    channel: Any  # a Connection
    result: RunResult | None = None
    failed: _Failed | None = None
    silent: float = 0.0  # seconds since its last message

    def read(self, on_progress: ProgressCallback) -> None:
        with suppress(EOFError, OSError):
            while self.channel.poll():
                message = self.channel.recv()
                self.silent = 0.0
                match message:
                    case RunResult() as result:
                        self.result = result
                    case _Failed() as failed:
                        self.failed = failed
                    case RunProgress() as progress:
                        on_progress(progress)

    @property
    def gone(self) -> bool:
        """Whether it failed or ended: no rank ends by itself before it is released."""
        return self.failed is not None or self.process.exitcode is not None

    def error(self) -> HeadlessError:
        if self.failed:
            named = self.failed.text if self.failed.kind is WorkflowError else f"{self.name}: {self.failed.text}"
            return self.failed.kind(named)
        code = self.process.exitcode or 0
        if code >= 0:
            return RunFailedError(f"{self.name} ended with exit code {code}, so the run was ended.")
        killed = f"{self.name} was killed by {signal.Signals(-code).name}, so the run was ended."
        if -code == signal.SIGKILL:
            return RunFailedError(
                f"{killed} If you did not stop it, main memory probably ran out: see the system log, or use fewer GPUs."
            )
        return RunFailedError(
            f"{killed} If you did not stop it, a library, a driver or a compiled block crashed: run again with "
            "PYTHONFAULTHANDLER=1 to see where, and try backend 'eager'."
        )


@contextmanager
def _started(job: _RankRun) -> Iterator[list[_Rank]]:
    """Start the ranks. At the end no rank is left, in any case."""
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the ranks: only this process ends them
        try:
            for number in range(job.size):
                here, there = context.Pipe()
                name = f"Rank {number} of {job.size}" + (f" (GPU {number})" if job.gpus else " (on the CPU)")
                process = context.Process(target=_run_rank, args=(number, job, there), name=name, daemon=False)
                ranks.append(_Rank(name, process, here))
                process.start()
                there.close()
        finally:
            signal.signal(signal.SIGINT, before)
        yield ranks
        for each in ranks:
            with suppress(OSError):
                each.channel.send(None)  # releases it
            each.process.join(GRACE)
    finally:
        _end([each for each in ranks if each.process.pid is not None])


def _end(ranks: Sequence[_Rank]) -> None:
    """End the remaining ranks: SIGTERM first, so that they remove half-written files."""
    for each in ranks:
        each.process.terminate()
    until = time.monotonic() + GRACE
    for each in ranks:
        each.process.join(max(0.0, until - time.monotonic()))
        each.process.kill()
        each.process.join()
        each.channel.close()


def _watch(ranks: Sequence[_Rank], timeout: float | None, on_progress: ProgressCallback) -> RunResult:
    """Wait until all ranks are done. Returns rank 0's result.

    Raises HeadlessError, for the rank that caused the failure.
    """
    seen = time.monotonic()
    until = seen + timeout if timeout else float("inf")
    try:
        while not all(each.result for each in ranks):
            wait([each.channel for each in ranks], TICK)
            before, seen = seen, time.monotonic()
            for each in ranks:
                each.silent += min(seen - before, 2 * TICK)  # excludes time in which this process was suspended
                each.read(on_progress)
            if any(each.gone for each in ranks):
                time.sleep(SETTLE)
                for each in ranks:
                    each.read(no_progress)
                raise _to_blame(ranks).error()
            for each in ranks:
                if each.silent > SILENT:
                    raise RunFailedError(f"{each.name} did not respond for {SILENT:g} s, so the run was ended.")
            if seen > until:
                raise RunFailedError(f"Stopped: the run did not finish within {timeout:g} s.")
    except KeyboardInterrupt:
        raise InterruptedRunError("Interrupted: nothing more was written.") from None
    assert ranks[0].result
    return ranks[0].result


def _to_blame(ranks: Sequence[_Rank]) -> _Rank:
    """Return the rank that caused the failure: one that was killed, else the one that failed first."""
    return min((each for each in ranks if each.gone), key=lambda each: each.failed.at if each.failed else float("-inf"))
