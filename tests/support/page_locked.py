"""CUDA's part in weights that come to the device in parts: streams, events, and main memory that is page-locked.

Nothing of it runs on CUDA. What is copied to the device is a copy in main memory. The device is as slow as it can be:
it has copied and computed nothing before the host waits for it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import slab
from comfyui_onediff_guard.pipelines.weights.offload import in_parts
from diffusers.hooks import group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from torch.utils._python_dispatch import _disable_current_modes

CUDA = torch.device("cuda", 0)
OUT_OF_MEMORY, ALREADY, NOT_REGISTERED = 2, 712, 713
_SAID = {OUT_OF_MEMORY: "out of memory", ALREADY: "already mapped", NOT_REGISTERED: "not registered"}


class Cuda:
    """The runtime's book of registered memory, in its own functions' names, and what the device has."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}  # address → bytes
        self.most_registered = 0
        self.limit = float("inf")  # bytes that the system lets be page-locked
        self.error = 0  # which the next kernel would raise
        self.copying: set[int] = set()  # addresses of registered memory that is copied from
        self.copied_while_unregistered: list[int] = []
        self.staged = 0  # bytes that were page-locked as they came
        self.arrives: Callable[[torch.Tensor], object] = lambda _copy: None
        self.leaves: Callable[[torch.Tensor], object] = lambda _copy: None
        self._launched = 0  # events
        self._here: dict[ModuleGroup, list[torch.Tensor]] = {}
        self._leaving: list[tuple[int, list[torch.Tensor]]] = []  # after which event, what

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's names
        assert flags == 1 and n_bytes > 0
        pages = {*_pages(address, n_bytes)}
        if any(not pages.isdisjoint(_pages(*other)) for other in self.registered.items()):
            return self._fails(ALREADY)
        if self.page_locked + len(pages) * mmap.PAGESIZE > self.limit:
            return self._fails(OUT_OF_MEMORY)
        self.registered[address] = n_bytes
        self.most_registered = max(self.most_registered, self.page_locked)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        if address not in self.registered:
            return self._fails(NOT_REGISTERED)
        if address in self.copying:
            self.copied_while_unregistered.append(address)
        del self.registered[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return _SAID[error]

    def _fails(self, error: int) -> int:
        self.error = error
        return error

    def take_error(self, _stream: object) -> None:
        self.error = 0

    @property
    def page_locked(self) -> int:
        """Bytes, in whole pages."""
        return sum(len(_pages(*each)) for each in self.registered.items()) * mmap.PAGESIZE

    def holds(self, tensor: torch.Tensor) -> bool:
        """As PyTorch asks: of where the tensor's storage begins."""
        begin = tensor.untyped_storage().data_ptr()
        return any(address <= begin < address + n_bytes for address, n_bytes in self.registered.items())

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        self.staged += tensor.nbytes
        return tensor.clone()

    def copy(self, group: ModuleGroup, tensor: torch.Tensor, source: torch.Tensor, _stream: object) -> None:
        if self.holds(source):
            self.copying.add(source.untyped_storage().data_ptr())
        with _disable_current_modes():
            tensor.data = source.clone()
            assert tensor.stride() == source.stride() and tensor.dtype == source.dtype
            copy = torch.empty(source.nbytes, dtype=torch.uint8, device="meta")
        self._here.setdefault(group, []).append(copy)
        self.arrives(copy)

    def send_away(self, group: ModuleGroup) -> None:
        """What was computed with stays until the device is done with it."""
        _SEND_AWAY(group)
        self._leaving.append((self._launched, self._here.pop(group, [])))

    def record(self) -> int:
        self._launched += 1
        return self._launched

    def done(self, event: int) -> None:
        for after, copies in self._leaving:
            for copy in copies if after <= event else ():
                self.leaves(copy)
        self._leaving = [(after, copies) for after, copies in self._leaving if after > event]


_BRING, _SEND_AWAY = ModuleGroup._onload_from_memory, ModuleGroup._offload_to_memory


@contextmanager
def stand_in_for_cuda() -> Generator[Cuda]:
    """Weights that come in parts come as on CUDA."""
    cuda = Cuda()

    class Stream:
        def __init__(self, device: torch.device):
            self.device = device

        def synchronize(self) -> None:
            cuda.copying.clear()

    class Event:
        def record(self, stream: Stream) -> None:
            assert stream.device == CUDA
            self._number = cuda.record()

        def synchronize(self) -> None:
            cuda.done(self._number)

    class Backend:
        def __init__(self, _device: torch.device):
            self.stream = nullcontext

        def current_stream(self) -> None: ...

    def as_on_cuda(component: Any, offload: Any, _device: torch.device, **more: Any) -> Any:
        return in_parts(component, offload, CUDA, **more)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.cuda, "Stream", Stream),
            (torch.cuda, "Event", Event),
            (torch.cuda, "current_stream", Stream),
            (torch.cuda, "cudart", lambda: cuda),
            (slab, "_take_error", cuda.take_error),
            (torch.Tensor, "is_pinned", lambda tensor: cuda.holds(tensor)),
            (torch.Tensor, "pin_memory", lambda tensor: cuda.stage(tensor)),
            (torch.Tensor, "record_stream", lambda *_: None),
            (group_offloading, "TorchDeviceBackend", Backend),
            (ModuleGroup, "_transfer_tensor_to_device", lambda *given: cuda.copy(*given)),
            (ModuleGroup, "_onload_from_memory", _BRING),
            (ModuleGroup, "_offload_to_memory", lambda group: cuda.send_away(group)),
            (stores, "in_parts", as_on_cuda),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield cuda


def _pages(address: int, n_bytes: int) -> range:
    return range(address // mmap.PAGESIZE, (address + n_bytes - 1) // mmap.PAGESIZE + 1)
