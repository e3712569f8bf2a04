"""Where weights are while they are not in use, without a memory manager. `comfyui_host/host.py` uses ComfyUI's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

_CONTAINER = Path("/sys/fs/cgroup")
MOVING = threading.RLock()  # held by who moves weights: ComfyUI's memory manager keeps its lists without a lock


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory."""

    total: int
    free: int  # now, what PyTorch keeps for later included
    movable: int | None = None  # of what a memory manager moves out for others; None where there is no such manager


class Placement(Protocol):
    """What moves whole components between the device that computes and the host's memory."""

    device: torch.device
    wish: str  # the offload that the process was started for: "none", "group" or "sequential"; "" where for none
    channels_last: bool  # whether the process was started for convolutions with their channels last

    def make_room(self, n_bytes: int) -> None:
        """Make room on the device, before a component of that many bytes is read."""
        ...

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        """Move all of a component's weights to the device. Where it raises, all are in the host's memory.

        beside: bytes that are to be free there, beside them.
        """
        ...

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        """Move all of a component's weights to the host's memory."""
        ...

    def forget(self, name: str) -> None:
        """Note that the component is no longer loaded."""
        ...

    def give_back(self) -> None:
        """Give the device back what PyTorch keeps of its memory for later."""
        ...

    def memory(self) -> DeviceMemory | None:
        """Return what the device's memory is; None where it is main memory."""
        ...


class PlainPlacement:
    """Components stay where they are put."""

    wish = ""
    channels_last = False

    def __init__(self, device: torch.device | None = None):
        self.device = device or default_device()

    def make_room(self, n_bytes: int) -> None:
        del n_bytes

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        del name, beside
        move_whole(module, self.device)

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        del name
        move(module, torch.device("cpu"))

    def forget(self, name: str) -> None:
        del name
        self.give_back()

    def give_back(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory | None:
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return DeviceMemory(total, free + unused)


def main_memory() -> DeviceMemory:
    """Return what main memory is; in a container, what it may have of it."""
    import psutil

    found = psutil.virtual_memory()
    total, free = found.total, found.available
    try:
        limit, used = (int((_CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such limit
        return DeviceMemory(total, free)
    return DeviceMemory(min(total, limit), max(min(free, limit - used), 0))


def bytes_of(module: torch.nn.Module) -> int:
    """Return those of weights and buffers."""
    return sum(tensor.nbytes for tensor in {*module.parameters(), *module.buffers()})


def bytes_on(device: torch.device, module: torch.nn.Module) -> int:
    """Return those of weights and buffers that are on a device."""
    return sum(tensor.nbytes for tensor in {*module.parameters(), *module.buffers()} if tensor.device == device)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights outside of inference mode: moved inside, they would become inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        module.to(device)


def move_whole(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights to a device that may have no room for all of them. Where it raises, all are in main memory."""
    try:
        move(module, device)
    except BaseException:
        move(module, torch.device("cpu"))
        raise


def default_device() -> torch.device:
    """Return the device to compute on: CUDA's current one, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
