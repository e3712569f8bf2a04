"""One run over several GPUs: a process for each, none of which is ComfyUI's, and this one that watches them.

The processes are called ranks. The first one writes outputs and tells progress; the others help with what all compute
together. One that ends before its time, or is not heard of any more, ends the run, and is named: the others may wait
for it in a call that nothing interrupts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..errors import HeadlessError, InterruptedRunError, RunFailedError, WorkflowError
from ..scratch import temporary_folder
from ..workflow.graph import Graph
from ..workflow.settings import Setting
from . import rank
from .rank import Beat, Done, Failed, Job, Message
from .result import Progress, ProgressCallback, RunResult, no_progress

TICK = 0.5  # seconds between looks at the ranks
SETTLE = 2.0  # seconds in which others may say why they ended too, after the first one did
GRACE = 5.0  # seconds between the polite signal and the other one
SILENT = 60.0  # seconds without a sign of life. One that computes gives one every second


def gpus_here() -> int:
    """How many GPUs PyTorch sees; 0 on a machine that computes on its CPU."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def chosen_number(asked: str) -> int:
    """How many processes `--gpus` asks for: a number, or 'auto' for one a GPU.

    Raises:
        WorkflowError: there are not as many GPUs, or this system's PyTorch has no `torch.distributed`.
    """
    if asked == "1":
        return 1
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
    models: Sequence[Path],
    input_dir: Path,
    output_dir: Path,
    changes: Sequence[Setting] = (),
    timeout: float | None = None,
    on_progress: ProgressCallback = no_progress,
) -> RunResult:
    """Run a workflow over several GPUs; on a machine without any, in as many processes on its CPU.

    Its results are files alone: `results` is empty, as it is of a server's run. Otherwise the arguments and errors are
    those of `run_local`, and an error names the rank that it is of.
    """
    started = time.perf_counter()
    with temporary_folder("onediff-guard-ranks-") as folder:
        job = Job(
            workflow=workflow,
            options={
                "models": tuple(models),
                "input_dir": input_dir,
                "output_dir": output_dir,
                "changes": tuple(changes),
            },
            size=size,
            gpus=gpus_here(),
            meeting=folder / "meeting",
        )
        with _started(job) as ranks:
            done = _watched(ranks, timeout, on_progress)
    return RunResult(done.outputs, {}, list(done.files), time.perf_counter() - started)


# of signals by which a process ends itself; on Windows, of an access violation and a broken stack
_CRASHES = {-getattr(signal, name, 0) for name in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")} - {0}
_CRASHES |= {0xC0000005, 0xC0000409}


@dataclass
class _Rank:
    """One of the processes, and what is known of it."""

    number: int
    name: str  # for messages
    process: BaseProcess
    channel: Any  # a Connection; on Windows a class of its own
    done: Done | None = None
    failed: Failed | None = None
    silent: float = 0.0  # seconds
    open: bool = True  # its channel
    told: list[Progress] = field(default_factory=list)

    def read(self) -> None:
        """Take in what it said."""
        while self.open:
            try:
                if not self.channel.poll():
                    return
                message: Message = self.channel.recv()
            except (EOFError, OSError):
                self.open = False
                return
            self.silent = 0.0
            match message:
                case Done():
                    self.done = message
                case Failed():
                    self.failed = self.failed or message
                case Progress():
                    self.told.append(message)
                case Beat():
                    pass

    @property
    def gone(self) -> bool:
        """Whether it failed, or ended: none does before it is let go."""
        return self.failed is not None or self.process.exitcode is not None

    @property
    def blame(self) -> int:
        """How likely the others failed because of it: what was killed is the cause, and what failed while it waited
        for others is none."""
        if self.failed is None:
            return 3 if self.process.exitcode is not None else 0
        return 1 if self.failed.waiting else 2

    def end(self) -> str:
        """How it ended, in words."""
        code = self.process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def advice(self) -> str:
        """What may be behind that, in a sentence after a space."""
        code = self.process.exitcode or 0
        if code in (-9, 128 + 9):
            return (
                " A kill that nobody asked for is the system's, where main memory ran out: see its log, or use fewer "
                "GPUs."
            )
        if code in _CRASHES:
            return (
                " Code of a library, a driver or a compiled block crashed in it, which is not for want of memory: run "
                "again with PYTHONFAULTHANDLER=1 to see where, and try backend 'eager', or another version of it."
            )
        return ""


@contextmanager
def _started(job: Job) -> Iterator[list[_Rank]]:
    """Start the ranks. At the end none is left, however that came."""
    context = multiprocessing.get_context("spawn")
    ranks: list[_Rank] = []
    try:
        with _deaf_to_interrupts():  # which a terminal sends them as well: this process ends them
            for number in range(job.size):
                here, there = context.Pipe()
                process = context.Process(
                    target=rank.main, args=(number, job, there), name=f"rank {number}", daemon=False
                )
                ranks.append(_Rank(number, job.name(number), process, here))
                process.start()
                there.close()
        yield ranks
        for each in ranks:
            with suppress(OSError):
                each.channel.send(None)  # it may go
            each.process.join(GRACE)
    finally:
        _end(ranks)


def _end(ranks: Sequence[_Rank]) -> None:
    """End those that are left: politely first, so that files of theirs that are half-written go."""
    left = [each for each in ranks if each.process.pid is not None and each.process.is_alive()]
    for each in left:
        each.process.terminate()
    until = time.monotonic() + GRACE
    for each in left:
        each.process.join(max(0.0, until - time.monotonic()))
        if each.process.is_alive():
            each.process.kill()
            each.process.join()
    for each in ranks:
        each.channel.close()


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # signals are the main thread's
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _watched(ranks: Sequence[_Rank], timeout: float | None, on_progress: ProgressCallback) -> Done:
    """Wait until all are done. Returns what the first one made.

    Raises HeadlessError, for the rank that is to blame.
    """
    began = seen = time.monotonic()
    try:
        while not all(each.done for each in ranks):
            wait([each.channel for each in ranks if each.open], TICK)
            now = time.monotonic()
            _take_in(ranks, min(now - seen, 2 * TICK), on_progress)  # not what this process was stopped for itself
            seen = now
            if any(each.gone for each in ranks):
                raise _why(_settled(ranks))
            for each in ranks:
                if each.silent > SILENT:
                    raise RunFailedError(f"{each.name} gave no sign of life for {SILENT:g} s, so the run was ended.")
            if timeout and now - began > timeout:
                raise RunFailedError(f"Stopped: the run was not done after {timeout:g} s.")
    except KeyboardInterrupt:
        raise InterruptedRunError("Interrupted: nothing more was written.") from None
    first = ranks[0].done
    assert first
    return first


def _take_in(ranks: Sequence[_Rank], passed: float, on_progress: ProgressCallback) -> None:
    for each in ranks:
        each.silent += passed
        each.read()
        for progress in each.told:
            on_progress(progress)
        each.told.clear()


def _settled(ranks: Sequence[_Rank]) -> _Rank:
    """Return the rank because of which the others end too, once they had time to say why they do."""
    until = time.monotonic() + SETTLE
    while time.monotonic() < until and not all(each.gone for each in ranks):
        wait([each.process.sentinel for each in ranks if each.process.exitcode is None], TICK / 2)
        _take_in(ranks, 0.0, no_progress)
    return max(ranks, key=lambda each: each.blame)


def _why(culprit: _Rank) -> HeadlessError:
    if culprit.failed is None:
        return RunFailedError(f"{culprit.name} {culprit.end()}, so the run was ended.{culprit.advice()}")
    failed = culprit.failed
    named = failed.text if failed.kind is WorkflowError else f"{culprit.name}: {failed.text}"
    return failed.kind(named)
