"""One of several processes that compute a run together: what it does, and what it tells who watches it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..errors import HeadlessError, OutputError, RunFailedError, WorkflowError
from ..terminal import cleaned_output
from .result import Progress, no_progress

BEAT = 1.0  # seconds between signs of life
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Job:
    """A run, as every rank is given it.

    options: of `run_local`. gpus: that PyTorch sees; 0: it runs on the CPU. meeting: a file by which ranks find each
    other.
    """

    workflow: Any
    options: Mapping[str, Any]
    size: int
    gpus: int
    meeting: Path

    def name(self, number: int) -> str:
        return f"Rank {number} of {self.size}" + (f" (GPU {number})" if self.gpus else " (on the CPU)")


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


@dataclass(frozen=True)
class Done:
    """What a rank made: outputs of nodes, and files."""

    outputs: dict[str, dict[str, Any]]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Failed:
    """Why a rank ends. waiting: it failed in a call that it makes together with others, who may be why."""

    kind: type[HeadlessError]
    text: str
    waiting: bool


Message = Beat | Done | Failed | Progress


def main(number: int, job: Job, channel: Connection) -> None:
    """Run one rank, until it is done and let go. It ends with whoever watches it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    teller = _Teller(channel)
    try:
        with cleaned_output(), ExitStack() as stack:
            if number:  # the first one's lines are those of all
                sys.stderr = stack.enter_context(Path(os.devnull).open("w"))
            _see_one_gpu(number, job)
            tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system's, which a kill would leave
            _run(number, job, teller, channel)
    except BaseException as error:  # noqa: BLE001 - whatever it is, who watches is told
        teller.tell(_failed(error))
        os._exit(1)  # not by way of what may still wait for other ranks


def _run(number: int, job: Job, teller: _Teller, channel: Connection) -> None:
    from ...pipelines.parallel.group import joined
    from .local import run_local

    with joined(number, job.size, job.meeting, cuda=bool(job.gpus)):
        tell = teller.tell if number == 0 else no_progress
        result = run_local(job.workflow, **job.options, on_progress=tell, first=number == 0)
        teller.tell(Done(result.outputs, tuple(result.files)))
        with suppress(EOFError, OSError):
            channel.recv()  # until all are done: the others may still need what this one has


class _Teller:
    """Tells who watches, from any thread, and gives signs of life. Where nobody watches any more, the rank ends."""

    def __init__(self, channel: Connection):
        self._channel = channel
        self._lock = threading.Lock()
        threading.Thread(target=self._beat, daemon=True).start()

    def tell(self, message: Message) -> None:
        try:
            with self._lock:
                self._channel.send(message)
        except OSError:
            os._exit(1)

    def _beat(self) -> None:
        while True:
            self.tell(Beat())
            time.sleep(BEAT)


def _see_one_gpu(number: int, job: Job) -> None:
    """Have this process see its own GPU alone, and speak to the others by way of this machine alone. PyTorch has not
    been imported yet."""
    signal.signal(signal.SIGTERM, _ended)
    if job.gpus:
        variable = next((name for name in _VISIBLE if os.environ.get(name)), _VISIBLE[-1])
        visible = os.environ.get(variable, "")
        os.environ[variable] = visible.split(",")[number].strip() if visible else str(number)
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback


def _ended(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _failed(error: BaseException) -> Failed:
    """What to tell of an error. Of ours, those that say that nothing ran, and that a file could not be written, keep
    their kind."""
    kinds = (WorkflowError, OutputError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), RunFailedError)
    text = str(error) if isinstance(error, HeadlessError) else f"{type(error).__name__}: {error}"
    return Failed(kind, text, _waits(error))


def _waits(error: BaseException) -> bool:
    """Whether an error came up in a call of torch.distributed."""
    seen: BaseException | None = error
    while seen is not None:
        trace = seen.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed"):
                return True
            trace = trace.tb_next
        seen = seen.__cause__ or seen.__context__
    return False
