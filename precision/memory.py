"""Peak memory of a stage, and the extra memory of a rerun.

Peak counters are process-wide, so concurrent readers share them.
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

from .layer_peaks import floating

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class PeakMemory:
    """Peak memory in bytes: of PyTorch's allocator on a CUDA device, of the whole process (resident) on a CPU."""

    used: int
    reserved: int | None = None  # with the allocator's unused cache; None on a CPU


@dataclass(frozen=True)
class Memory:
    """A stage's use of its device's memory, in bytes."""

    device: str
    peak: PeakMemory
    weights: int  # of the components that were loaded at the same time

    def __str__(self) -> str:
        whose = " of the process" if self.peak.reserved is None else ""
        kept = "" if self.peak.reserved is None else f"; {size(self.peak.reserved)} with what PyTorch keeps for later"
        return f"{size(self.peak.used)} at its peak{whose} on {self.device}, {size(self.weights)} of it weights{kept}"


def size(n_bytes: float) -> str:
    """Format a number of bytes: '11.3 GB', '120 MB'."""
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.3g} MB"


@dataclass(eq=False)
class _PeakWatch:
    device: torch.device
    peak: PeakMemory


_watches: list[_PeakWatch] = []
_lock = threading.Lock()


@contextmanager
def peak_memory(device: torch.device) -> Generator[Callable[[], PeakMemory | None]]:
    """Yield a function that returns the peak since then; None if there is no counter (Apple's GPUs, CPUs without
    Linux).

    It resets the device's counter. Measurements around this one are told its earlier value.
    """
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with _lock:
        _note(device)
        mine = _PeakWatch(device, _peak(device)) if _start_anew(device) else None
        if mine:
            _watches.append(mine)
    if mine is None:
        yield lambda: None
        return

    def peak() -> PeakMemory:
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
    """Tell all running measurements of a device its counter's value."""
    for watch in _watches:
        if watch.device == device:
            now = _peak(device)
            reserved = None if now.reserved is None else max(now.reserved, watch.peak.reserved or 0)
            watch.peak = PeakMemory(max(now.used, watch.peak.used), reserved)


def _peak(device: torch.device) -> PeakMemory:
    if device.type == "cuda":
        return PeakMemory(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
    found = re.search(r"^VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    return PeakMemory(int(found[1]) * 1024 if found else 0)


def _start_anew(device: torch.device) -> bool:
    """Reset a device's counter to the memory in use. Returns False if there is no counter."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu":
        return False
    try:
        _CLEAR.write_text("5", encoding="ascii")  # Linux: resets only VmHWM
        return _peak(device).used > 0
    except OSError:
        return False


@contextmanager
def extra_peak(owner: object, given: Any = ()) -> Generator[Callable[[], int | None]]:
    """Yield a function that returns, afterwards, the peak of allocated bytes minus those at the start.

    Measured on CUDA. Elsewhere it returns the bytes of the largest layer's weights in float32, which a rerun needs
    besides activations; None if `owner` is no module.

    given: a nest of the call's tensors, which give the device: the owner's weights may be elsewhere between calls.
    """
    module = owner if isinstance(owner, torch.nn.Module) else None
    tensors = [*floating(given), *(() if module is None else module.parameters())]
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
    """Return the bytes of the largest layer's own weights in float32."""
    return 4 * max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules())
