"""One run over several GPUs: a process for each, none of which is ComfyUI's, and this one that watches them.

The processes are called ranks. The first one writes outputs and tells progress; the others help with what all compute
together. One that ends before its time, or is not heard of any more, ends the run, and is named: the others may wait
for it in a call that nothing interrupts.
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

TICK = 0.5  # seconds between looks at the ranks
SETTLE = 1.0  # seconds in which others may say why they ended too, after the first one did
GRACE = 5.0  # seconds between the polite signal and the other one
BEAT = 1.0  # seconds between a rank's signs of life, from a thread that also runs while it computes, loads or compiles
SILENT = 60.0  # seconds without any
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def gpus_here() -> int:
    """How many GPUs PyTorch sees; 0 on a machine that computes on its CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_number(asked: str) -> int:
    """How many processes `--gpus` asks for: a number, or 'auto' for one a GPU.

    Raises WorkflowError where there are not as many GPUs, or this system's PyTorch has no `torch.distributed`.
    """
    from torch import distributed

    have = gpus_here()
    number = max(have, 1) if asked == "auto" else int(asked)
    if number > 1 and (os.name != "posix" or not distributed.is_available()):
        raise WorkflowError("--gpus needs Linux, and a PyTorch with torch.distributed. Leave it out, for one GPU.")
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
    """Run a workflow over several GPUs; on a machine without any, in as many processes on its CPU.

    Its results are files alone: `results` is empty, as it is of a server's run. Otherwise the arguments and errors are
    those of `run_local`, and an error names the rank that it is of.
    """
    started = time.perf_counter()
    with temporary_folder("onediff-guard-ranks-") as folder:
        job = _RankRun(workflow, options, size, gpus_here(), folder / "meeting")
        with _started(job) as ranks:
            result = _watch(ranks, timeout, on_progress)
    return replace(result, seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class _RankRun:
    """A run, as every rank is given it.

    options: of `run_local`. gpus: that PyTorch sees; 0: it runs on the CPU. meeting: a file by which ranks find each
    other.
    """

    workflow: Any
    options: Mapping[str, Any]
    size: int
    gpus: int
    meeting: Path


@dataclass(frozen=True)
class _Failed:
    """Why a rank ends. at: when, by the clock that all processes of a machine share; the others may fail because it
    did."""

    kind: type[HeadlessError]
    text: str
    at: float


# --- in the process of a rank -----------------------------------------------------------------------------------------


def _run_rank(number: int, job: _RankRun, channel: Any) -> None:
    """Run one rank, until it is done and is told to end. It ends with whoever watches it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    lock = threading.Lock()

    def tell(message: Any) -> None:
        with lock:
            channel.send(message)

    threading.Thread(target=_beat, args=(tell,), daemon=True).start()
    with cleaned_output(), Path(os.devnull).open("w") as nowhere:
        if number:  # the first one's lines are those of all
            sys.stderr = nowhere
        try:
            _see_one_gpu(number, job)
            _compute(number, job, tell, channel)
        except BaseException as error:  # noqa: BLE001 - whatever it is, who watches is told
            with suppress(OSError):
                tell(_failed(error))
            os._exit(1)  # not by way of what may still wait for other ranks


def _compute(number: int, job: _RankRun, tell: Callable[[Any], None], channel: Any) -> None:
    from tqdm import tqdm

    from ...pipelines.parallel.group import joined
    from .local import run_local

    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system's, which a kill would leave
    with joined(number, job.size, job.meeting, cuda=bool(job.gpus)):
        on_progress = no_progress if number else tell
        result = run_local(job.workflow, **job.options, on_progress=on_progress, first=number == 0)
        tell(replace(result, results={}))
        with suppress(EOFError, OSError):
            channel.recv()  # until all are done: the others may still need what this one has


def _beat(tell: Callable[[Any], None]) -> None:
    """Give signs of life, and end with whoever watches."""
    with suppress(OSError):
        while True:
            tell(None)
            time.sleep(BEAT)
    os._exit(1)


def _see_one_gpu(number: int, job: _RankRun) -> None:
    """Have this process see its own GPU alone, and speak to the others by way of this machine alone. PyTorch has not
    been imported yet."""
    if job.gpus:
        variable = next((name for name in _VISIBLE if os.environ.get(name)), _VISIBLE[-1])
        visible = os.environ.get(variable, "")
        os.environ[variable] = visible.split(",")[number].strip() if visible else str(number)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


def _failed(error: BaseException) -> _Failed:
    """What to tell of an error. Of ours, those that say that nothing ran, and that a file could not be written, keep
    their kind."""
    kind = next((kind for kind in (WorkflowError, OutputError) if isinstance(error, kind)), RunFailedError)
    text = str(error) if isinstance(error, HeadlessError) else f"{type(error).__name__}: {error}"
    return _Failed(kind, text, time.monotonic())


# --- in the process that watches them ---------------------------------------------------------------------------------


@dataclass
class _Rank:
    """One of the processes, and what it said."""

    name: str  # for messages
    process: BaseProcess
    channel: Any  # a Connection
    result: RunResult | None = None
    failed: _Failed | None = None
    silent: float = 0.0  # seconds

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
        """Whether it failed, or ended: none does before it is let go."""
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
                f"{killed} If you did not stop it, the system did, where main memory ran out: see its log, or use "
                "fewer GPUs."
            )
        return RunFailedError(
            f"{killed} If you did not, a library, a driver or a compiled block crashed: run again with "
            "PYTHONFAULTHANDLER=1 to see where, and try backend 'eager'."
        )


@contextmanager
def _started(job: _RankRun) -> Iterator[list[_Rank]]:
    """Start the ranks. At the end none is left, however that came."""
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends them too: this process ends them
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
                each.channel.send(None)  # it may go
            each.process.join(GRACE)
    finally:
        _end([each for each in ranks if each.process.pid is not None])


def _end(ranks: Sequence[_Rank]) -> None:
    """End those that are left: politely first, so that files of theirs that are half-written go."""
    for each in ranks:
        each.process.terminate()
    until = time.monotonic() + GRACE
    for each in ranks:
        each.process.join(max(0.0, until - time.monotonic()))
        each.process.kill()
        each.process.join()
        each.channel.close()


def _watch(ranks: Sequence[_Rank], timeout: float | None, on_progress: ProgressCallback) -> RunResult:
    """Wait until all are done. Returns what the first one made.

    Raises HeadlessError, for the rank that is to blame.
    """
    seen = time.monotonic()
    until = seen + timeout if timeout else float("inf")
    try:
        while not all(each.result for each in ranks):
            wait([each.channel for each in ranks], TICK)
            before, seen = seen, time.monotonic()
            for each in ranks:
                each.silent += min(seen - before, 2 * TICK)  # not what this process was stopped for itself
                each.read(on_progress)
            if any(each.gone for each in ranks):
                time.sleep(SETTLE)
                for each in ranks:
                    each.read(no_progress)
                raise _to_blame(ranks).error()
            for each in ranks:
                if each.silent > SILENT:
                    raise RunFailedError(f"{each.name} gave no sign of life for {SILENT:g} s, so the run was ended.")
            if seen > until:
                raise RunFailedError(f"Stopped: the run was not done after {timeout:g} s.")
    except KeyboardInterrupt:
        raise InterruptedRunError("Interrupted: nothing more was written.") from None
    assert ranks[0].result
    return ranks[0].result


def _to_blame(ranks: Sequence[_Rank]) -> _Rank:
    """Return the rank because of which the others end too: one that was killed, else the one that failed first."""
    return min((each for each in ranks if each.gone), key=lambda each: each.failed.at if each.failed else float("-inf"))
