"""The most memory in use while something ran. PyTorch's peak counters are the process's: all who read one share it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peak:
    """The most memory in use of PyTorch's allocator on a device, in bytes."""

    used: int
    reserved: int  # what the allocator keeps for later included

    def or_more(self, other: Peak) -> Peak:
        """Return the larger of both."""
        return Peak(max(self.used, other.used), max(self.reserved, other.reserved))


@dataclass(frozen=True)
class Memory:
    """What a stage took of its device's memory, in bytes."""

    device: str
    peak: Peak
    weights: int  # of the model's components that were there at once

    def __str__(self) -> str:
        return (
            f"{size(self.peak.used)} at its peak on {self.device}, {size(self.weights)} of it weights; "
            f"{size(self.peak.reserved)} with what PyTorch keeps for later"
        )


def size(n_bytes: float) -> str:
    """Write a number of bytes for people: '11.3 GB', '120 MB'."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


class _Watch:
    def __init__(self, device: torch.device):
        self.device = device
        self.peak = _peak(device)


_watches: list[_Watch] = []
_lock = threading.Lock()


@contextmanager
def peak_memory(device: torch.device) -> Generator[Callable[[], Peak | None]]:
    """Yield a function that returns the peak since then; None where nobody counts: on all but CUDA devices.

    The device's counter starts anew. Whoever measures around this one is told what it showed before.
    """
    if device.type != "cuda":
        yield lambda: None
        return
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with _lock:
        _note(device)
        torch.cuda.reset_peak_memory_stats(device)
        mine = _Watch(device)
        _watches.append(mine)

    def peak() -> Peak:
        with _lock:
            if mine in _watches:
                _note(device)
            return mine.peak

    try:
        yield peak
    finally:
        with _lock:
            _note(device)
            _watches.remove(mine)


def _note(device: torch.device) -> None:
    """Have all who watch a device know what its counter shows now."""
    for watch in _watches:
        if watch.device == device:
            watch.peak = watch.peak.or_more(_peak(device))


def _peak(device: torch.device) -> Peak:
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
