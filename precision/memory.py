"""The most memory in use while something ran, and what a rerun adds to it.

Peak counters are the process's, so all who read one share it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .observe import floating

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """The most memory in use, in bytes: of PyTorch's allocator on a CUDA device, of the whole process (resident) on a
    CPU."""

    used: int
    reserved: int | None = None  # what the allocator keeps for later included; None on a CPU

    def or_more(self, other: Peak) -> Peak:
        """Return the larger of both; reserved is None where either is."""
        reserved = None if self.reserved is None or other.reserved is None else max(self.reserved, other.reserved)
        return Peak(max(self.used, other.used), reserved)


@dataclass(frozen=True)
class Memory:
    """What a stage took of its device's memory, in bytes."""

    device: str
    peak: Peak
    weights: int  # of the model's components that were there at once

    def __str__(self) -> str:
        whose = " of the process" if self.peak.reserved is None else ""
        kept = "" if self.peak.reserved is None else f"; {size(self.peak.reserved)} with what PyTorch keeps for later"
        return f"{size(self.peak.used)} at its peak{whose} on {self.device}, {size(self.weights)} of it weights{kept}"


@contextmanager
def peak_memory(device: torch.device) -> Generator[Callable[[], Peak | None]]:
    """Yield a function that returns the peak since then; None where nobody counts (Apple's GPUs, a CPU that is not
    Linux's).

    The device's counter starts anew. Whoever measures around this one is told what it showed before.
    """
    counter = _counter(device)
    if counter is None:
        yield lambda: None
        return
    with counter.lock:
        counter.note()
        counter.reset()
        mine = _Watch(counter.read())
        counter.watches.append(mine)

    def peak() -> Peak:
        with counter.lock:
            if mine in counter.watches:
                counter.note()
            return mine.peak

    try:
        yield peak
    finally:
        with counter.lock:
            counter.note()
            counter.watches.remove(mine)


def size(n_bytes: float) -> str:
    """Write a number of bytes for people: '11.3 GB', '120 MB'."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


class _Watch:
    def __init__(self, peak: Peak):
        self.peak = peak


class _Counter:
    """A peak counter that starts anew for each watch, and the watches that need to know what it showed."""

    def __init__(self, read: Callable[[], Peak], reset: Callable[[], None]):
        self.read = read
        self.reset = reset
        self.watches: list[_Watch] = []
        self.lock = threading.Lock()

    def note(self) -> None:
        if self.watches:
            now = self.read()
            for watch in self.watches:
                watch.peak = watch.peak.or_more(now)


_COUNTERS: dict[str, _Counter] = {}


def _counter(device: torch.device) -> _Counter | None:
    if device.type == "cuda":
        on = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        return _COUNTERS.setdefault(str(on), _Counter(lambda: _allocated(on), lambda: _start_anew(on)))
    if device.type == "cpu" and ("cpu" in _COUNTERS or _process_counts()):
        return _COUNTERS.setdefault("cpu", _Counter(_resident, _start_process_anew))
    return None


def _allocated(device: torch.device) -> Peak:
    return Peak(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))


def _start_anew(device: torch.device) -> None:
    torch.cuda.reset_peak_memory_stats(device)


def _process_counts() -> bool:
    try:
        _start_process_anew()
        return _resident().used > 0
    except OSError:
        return False


def _resident() -> Peak:
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return Peak(int(found[1]) * 1024 if found else 0)


def _start_process_anew() -> None:
    _CLEAR.write_text("5", encoding="ascii")  # Linux: VmHWM, and nothing else


@contextmanager
def extra_peak(owner: object, given: Any = ()) -> Generator[Callable[[], int | None]]:
    """Yield a function that returns, afterwards, how many bytes more were allocated at the peak than before.

    They are measured on CUDA. Elsewhere they are those of the largest layer's weights in float32, which is what a rerun
    adds to its activations; None where `owner` is no module.

    given: a nest of the tensors that are computed with; the owner's weights may be elsewhere until they are needed.
    """
    module = owner if isinstance(owner, torch.nn.Module) else None
    tensors = [*floating(given), *(module.parameters() if module else ())]
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    extra = None if devices or module is None else largest_layer(module)
    with ExitStack() as stack:
        peaks = {device: stack.enter_context(peak_memory(device)) for device in devices}
        yield lambda: extra
        if devices:
            found = {device: peak() for device, peak in peaks.items()}
            extra = sum(peak.used - before[device] for device, peak in found.items() if peak)


def largest_layer(module: torch.nn.Module) -> int:
    """Return how many bytes the largest layer's own weights take in float32."""
    return 4 * max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules())
