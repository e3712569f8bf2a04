"""Where weights are while they are not in use, without a memory manager. `comfyui_host/host.py` uses ComfyUI's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from ...precision.dtypes import has_float64
from ...precision.machine import default_device

_CONTAINER = Path("/sys/fs/cgroup")
_LEFT_FREE = 0.1  # of main memory, by what is kept there for its next use
MOVING = threading.RLock()  # held by who moves weights: ComfyUI's memory manager keeps its lists without a lock


def tensors_of(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers."""
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


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


def has_room(n_bytes: int) -> bool:
    """Return whether main memory has room for that many bytes, with a tenth of it left free."""
    memory = main_memory()
    return memory.free - n_bytes >= memory.total * _LEFT_FREE


def bytes_of(module: torch.nn.Module) -> int:
    """Return those of weights and buffers."""
    return sum(tensor.nbytes for tensor in {*tensors_of(module)})


def bytes_on(device: torch.device, module: torch.nn.Module) -> int:
    """Return those of weights and buffers that are on a device."""
    return sum(tensor.nbytes for tensor in {*tensors_of(module)} if tensor.device == device)


class _HostCopy(NamedTuple):
    """What main memory has of a tensor that was copied to the device."""

    values: torch.Tensor
    state: tuple[object, ...]  # of the tensor when it was copied
    storage: StorageWeakRef  # on the device: as long as it is held, no other storage is known by the same number


_HOST_COPIES = WeakTensorKeyDictionary()  # tensor on the device → _HostCopy


def bytes_coming(module: torch.nn.Module) -> int:
    """Return those of weights and buffers that main memory has no copy of."""
    return sum(t.nbytes for t in {*tensors_of(module)} if t.device.type != "cpu" and _host_copy(t) is None)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights outside of inference mode: moved inside, they would become inference tensors.

    Of what goes to a card with memory of its own, main memory keeps the values until `let_go_of_host_copies`. What did
    not change there comes back as these, and nothing is copied.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not has_float64(device):  # as CogVideoX's table of positions is, which is rounded wherever it is used
            for tensor in [each for each in tensors_of(module) if each.dtype == torch.float64]:
                tensor.data = tensor.data.float()
        if not has_own_memory(device):
            for tensor in tensors_of(module):
                copy = _host_copy(tensor)
                _HOST_COPIES.pop(tensor, None)
                if copy is not None and device.type == "cpu":
                    tensor.data = copy
            module.to(device)
            return
        before = {name: tensor.data for name, tensor in _named(module) if _is_plain(tensor)}
        try:
            module.to(device)
        finally:
            for name, tensor in _named(module):
                values = before.get(name)
                if values is not None and values.device.type == "cpu" and _storage(values) != _storage(tensor):
                    _HOST_COPIES[tensor] = _HostCopy(values, _state(tensor), StorageWeakRef(tensor.untyped_storage()))


def _host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what main memory has of a tensor on the device; None where it has nothing, or that may have changed.

    A change in place is seen by the tensor's version, in inference mode too, and any other by its storage. One in place
    through `.data` is not seen: nothing here makes one, which `tests/pipelines/test_host_copies.py` checks.
    """
    copy: _HostCopy | None = _HOST_COPIES.get(tensor)
    return copy.values if copy and copy.state == _state(tensor) else None


def let_go_of_host_copies(module: torch.nn.Module) -> None:
    """Give back what main memory has of a component on the device."""
    for tensor in tensors_of(module):
        _HOST_COPIES.pop(tensor, None)


def has_own_memory(device: torch.device) -> bool:
    """Return whether a device is known to compute in other memory than the host's: a card that is not integrated."""
    return device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor.data) is torch.Tensor and tensor.layout is torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what is another one after a tensor changed; that of an inference tensor, which counts no versions, equals
    no other."""
    version = object() if tensor.is_inference() else tensor._version
    return _storage(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride(), version


def move_whole(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights to a device that may have no room for all of them. Where it raises, all are in main memory."""
    try:
        move(module, device)
    except BaseException:
        move(module, torch.device("cpu"))
        raise
