"""A simulated card with its own memory for a ComfyUI without a card: memory, streams and allocator only.

Both memories are main memory. A tensor on the card is a plain tensor. A weight on the host is an `OnHost`, whose device
is the host and which is copied when it is moved. ComfyUI's own functions decide what moves when.
Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

CARD, HOST = torch.device("cpu", 0), torch.device("cpu", 1)
MANAGEMENT = import_module("comfy.model_management")
DYNAMIC = hasattr(import_module("comfy.model_patcher"), "ModelPatcherDynamic")  # ComfyUI has dynamic VRAM


class OnHost(torch.nn.Parameter):
    """A weight on the host."""

    device = HOST

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = self.data.to(*args, **kwargs)
        if any(isinstance(given, torch.device) and given != HOST for given in (*args, *kwargs.values())):
            return moved.clone()
        return OnHost(moved, requires_grad=False)

    def detach(self) -> OnHost:
        return super().detach().as_subclass(OnHost)


class Stream(nullcontext):
    """A stream that runs its work at once."""

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...


class Pages:
    """A stand-in for comfy_aimdo's ModelVBAR: memory of the card, in which a weight stays until it is freed.

    Each weight has a version, which changes when the memory is freed.
    """

    room = 1e32  # bytes on the card for one model's weights

    def __init__(self, size: int, _device: int):
        self._memory = torch.zeros(int(size), dtype=torch.uint8)
        self._offset = 0
        self._versions: dict[int, int] = {}  # of the weights on the card, by address
        self._freed = 0

    def alloc(self, size: int) -> tuple[Any, int, int]:
        at = self._memory.data_ptr() + self._offset
        self._offset += -(-size // 512) * 512
        return self, at, size

    def fault(self, at: int, size: int) -> Any:
        if at + size - self._memory.data_ptr() > self.room:
            return None
        return (ctypes.c_uint32 * 1)(self._versions.setdefault(at, self._freed))

    def unpin(self, _at: int, _size: int) -> None: ...

    def free_memory(self, _size: float) -> int:
        freed = self.loaded_size()
        self._freed += 1
        self._versions.clear()
        self.overwrite()
        return freed

    def overwrite(self) -> None:
        """Fill the memory with NaN."""
        ctypes.memset(self._memory.data_ptr(), 0xFF, self._offset)

    def loaded_size(self) -> int:
        return len(self._versions)

    def prioritize(self) -> None: ...


class HostBuffer:
    """A stand-in for comfy_aimdo's HostBuffer: main memory that grows at a fixed address and that the card can read."""

    def __init__(self, *_: Any):
        self._memory = torch.zeros(1 << 26, dtype=torch.uint8)
        self.size = 0

    def get_raw_address(self) -> int:
        return self._memory.data_ptr()

    def extend(self, size: int, **_: Any) -> None:
        self.size += size
        assert self.size <= len(self._memory)

    def truncate(self, size: int, **_: Any) -> None:
        self.size = size

    def overwrite(self) -> None:
        """Fill the memory with NaN."""
        ctypes.memset(self._memory.data_ptr(), 0xFF, self.size)


class CastBuffer:
    """A stand-in for comfy_aimdo's VRAMBuffer: memory of the card for a stream's weights."""

    def __init__(self, *_: Any):
        self._memory = torch.zeros(1 << 26, dtype=torch.uint8)

    def size(self) -> int:
        return len(self._memory)

    def get(self, size: int, offset: int = 0) -> tuple[Any, int, int]:
        assert offset + size <= len(self._memory)
        return self, self._memory.data_ptr() + offset, size


def _bytes_at(address: int, size: int, _device: Any) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def _free_memory(free: Callable[[], float], _device: Any = None, torch_free_too: bool = False) -> Any:
    found = MANAGEMENT.minimum_inference_memory() + free()
    return (found, found) if torch_free_too else found


@contextmanager
def card(
    *, dynamic: bool = False, room: float = 1e32, pinned: bool = True, free: Callable[[], float] | None = None
) -> Iterator[None]:
    """Simulate a card with two streams for weights.

    dynamic: use dynamic VRAM. room: its size in bytes. pinned: keep copies of the weights in pinned memory.
    free: free bytes for weights, without dynamic VRAM; None: no free memory.
    """
    vram = MANAGEMENT.VRAMState.NORMAL_VRAM if free else MANAGEMENT.VRAMState.NO_VRAM
    states = [(MANAGEMENT, "is_device_cpu", lambda device: device == HOST), (MANAGEMENT, "NUM_STREAMS", 2)]
    states += [(MANAGEMENT, "STREAMS", {torch.device("cpu"): [Stream(), Stream()]})]
    states += [(MANAGEMENT, "vram_state", vram)]
    if free:
        states += [(MANAGEMENT, "get_free_memory", partial(_free_memory, free))]
    if dynamic:
        registered = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
        states += [(MANAGEMENT, "MAX_PINNED_MEMORY", 1 << 30), (torch.cuda, "cudart", lambda: registered)]
        states += [(MANAGEMENT.args, "disable_pinned_memory", not pinned)]
        states += [(import_module("comfy.memory_management"), "aimdo_enabled", True)]
        states += [(import_module("comfy_aimdo.model_vbar"), "ModelVBAR", Pages), (Pages, "room", room)]
        states += [(import_module("comfy_aimdo.host_buffer"), "HostBuffer", HostBuffer)]
        states += [(import_module("comfy_aimdo.vram_buffer"), "VRAMBuffer", CastBuffer)]
        states += [(import_module("comfy_aimdo.torch"), "get_tensor_from_raw_ptr", _bytes_at)]
    with ExitStack() as stack:
        for module, name, value in states:
            stack.enter_context(patch.object(module, name, value))
        try:
            yield
        finally:
            MANAGEMENT.free_memory(1e30, CARD)
            if hasattr(MANAGEMENT, "reset_cast_buffers"):  # as ComfyUI does after each node
                MANAGEMENT.reset_cast_buffers()


def on_host(patcher: Any, *, dynamic: bool = False) -> Any:
    """Return a ModelPatcher for the same model with its layers' weights on the host."""
    model = patcher.model
    for layer in model.modules():
        if hasattr(layer, "comfy_cast_weights"):
            for name, weight in layer.named_parameters(recurse=False):
                setattr(layer, name, OnHost(weight.data, requires_grad=False))
    patchers = import_module("comfy.model_patcher")
    return (patchers.ModelPatcherDynamic if dynamic else patchers.ModelPatcher)(model, CARD, HOST)
