"""The processes that compute one run together, called ranks, and this one's place among them.

A process is alone unless it was started as a rank (`headless/hosts/ranks.py`), which no process of ComfyUI's ever is.
What all ranks have to do alike, they decide on what they agreed on here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

T = TypeVar("T")

PATIENCE = timedelta(minutes=20)  # for a late rank: the first one may read an encoder's weights from a slow disk


@dataclass(frozen=True)
class ProcessGroup:
    """rank: this process's number, from 0. size: how many there are. group: theirs, of torch.distributed; None: all."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def alone(self) -> bool:
        """Whether there is no other one."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes outputs and profiles."""
        return self.rank == 0

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return each rank's tensor, of one shape and dtype on all: the same bits on every rank."""
        mine = mine.contiguous()
        every = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(every, mine, self.group)
        return every

    def all_reduce_absmax(self, values: torch.Tensor) -> torch.Tensor:
        """Return max |x| over all ranks of each value, NaN where any is NaN: the same on every rank. Without one that
        is not alone, the values as they are.

        values: float32 [n], with the same n on every rank, on the device that its run computes on.
        """
        if self.alone:
            return values
        return torch.stack(self.all_gather(values)).abs().amax(0)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of what the ranks give: the same on every rank."""
        if self.alone:
            return number
        found = torch.tensor([number])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, self.group)
        return int(found)

    def part(self, size: int) -> ProcessGroup:
        """Return the ranks of the part that this one is in, where all are parted into groups of `size`, those of
        neighbouring numbers together. All ranks ask for the same, one as often as the other."""
        if size in (1, self.size):
            return ALONE if size == 1 else self
        if size not in _parts:
            _parts[size], _ = distributed.new_subgroups(size, timeout=PATIENCE)
        return ProcessGroup(self.rank % size, size, _parts[size])

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Return what the first rank makes; the others make nothing, and wait. An error ends the first rank, and with
        it the job."""
        if self.alone:
            return make()
        handed = [make() if self.first else None]
        distributed.broadcast_object_list(handed, src=0, device=torch.device("cpu"))
        return handed[0]  # pyright: ignore[reportReturnType]


ALONE = ProcessGroup()
_of_this_process = ALONE
_parts: dict[int, Any] = {}  # ranks in a part → this one's part, as long as it is joined


def process_group() -> ProcessGroup:
    """Return the ranks that this process is one of; `ALONE` where it is none."""
    return _of_this_process


@contextmanager
def joined(rank: int, size: int, meeting: Path, *, cuda: bool) -> Generator[ProcessGroup]:
    """Make this process a rank, inside. It waits for the others.

    After an error the group stays, and goes with the process: to leave it ends what the others still compute together,
    so that they might be heard of before this one.

    meeting: a file by which they find each other: not there before, on a disk of this machine, in a folder that is
        this user's alone.
    cuda: they compute on CUDA (or ROCm), each on the one GPU that it sees; else on the CPU.
    """
    global _of_this_process
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=distributed.FileStore(str(meeting), size),
        rank=rank,
        world_size=size,
        timeout=PATIENCE,
    )
    try:
        _of_this_process = ProcessGroup(rank, size)
        yield _of_this_process
        distributed.destroy_process_group()
    finally:
        _of_this_process = ALONE
        _parts.clear()
