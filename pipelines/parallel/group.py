"""The process group: the processes ("ranks") that compute one run together, and this process's rank.

A process is alone unless it was started as a rank (`headless/hosts/ranks.py`); ComfyUI's processes never are. Ranks
that have to decide alike decide by values that are gathered, reduced or broadcast here.
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

PATIENCE = timedelta(minutes=20)  # timeout for a late rank: rank 0 may read weights from a slow disk


@dataclass(frozen=True)
class ProcessGroup:
    """This process's group. rank: its number, from 0. size: number of ranks. group: torch.distributed's; None: all."""

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes outputs and profiles."""
        return self.rank == 0

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors, in order of rank. mine: of the same shape and dtype on all ranks."""
        mine = mine.contiguous()
        every = [torch.empty_like(mine) for _ in range(self.size)]
        distributed.all_gather(every, mine, self.group)
        return every

    def all_reduce_absmax(self, values: torch.Tensor) -> torch.Tensor:
        """Return max |x| of each value over all ranks, NaN if any is NaN; the values unchanged if the process is alone.

        values: float32 [n], with the same n on every rank, on the run's device.
        """
        if self.alone:
            return values
        return torch.stack(self.all_gather(values)).abs().amax(0)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers, on every rank."""
        if self.alone:
            return number
        found = torch.tensor([number])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, self.group)
        return int(found)

    def part(self, size: int) -> ProcessGroup:
        """Return this rank's subgroup, with all ranks split into groups of `size` neighbours. All ranks have to make
        the same calls."""
        if size in (1, self.size):
            return ALONE if size == 1 else self
        if size not in _parts:
            _parts[size], _ = distributed.new_subgroups(size, timeout=PATIENCE)
        return ProcessGroup(self.rank % size, size, _parts[size])

    def broadcast_from_rank0(self, make: Callable[[], T]) -> T:
        """Return rank 0's result of `make` on all ranks; the others wait. An error ends rank 0, and with it the job."""
        if self.alone:
            return make()
        handed = [make() if self.first else None]
        distributed.broadcast_object_list(handed, src=0, device=torch.device("cpu"))
        return handed[0]  # pyright: ignore[reportReturnType]


ALONE = ProcessGroup()
_of_this_process = ALONE
_parts: dict[int, Any] = {}  # size of a subgroup → this process's subgroup, while it is joined


def process_group() -> ProcessGroup:
    """Return this process's group; `ALONE` if it is no rank."""
    return _of_this_process


@contextmanager
def joined(rank: int, size: int, meeting: Path, *, cuda: bool) -> Generator[ProcessGroup]:
    """Make this process a rank inside. It waits for the others.

    After an error the group is not destroyed: that would fail the other ranks, whose errors might be reported before
    this one's.

    meeting: a new file by which the ranks find each other, on a local disk, in a folder that only this user can use.
    cuda: ranks compute on CUDA (or ROCm), each on the one GPU that it sees; else on the CPU.
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
