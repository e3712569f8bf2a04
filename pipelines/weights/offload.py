"""Offload: which weights are in main memory while a stage runs, the backends that support that, and weights that come
to the device in parts, block by block or layer by layer.

diffusers' ModuleGroup moves the weights: from page-locked memory, on its own stream, the next block's while one
computes. diffusers' hooks are not used. They replace `forward` on the modules, and a shallow copy of such a module
would still call the original's `forward`, without the scaled layers or the compiled blocks of the copy. So the weights
are moved by a shallow copy too, outside compiled code and inside the fp32 rerun.

The parts follow from the module alone: nothing is moved, and the module may be on "meta".
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

import torch

from ...precision.shallow_copy import Make, replace_submodules, with_forward
from ...trust.message import Message
from ..compile.backends import EAGER, BackendChoice, backend_states
from ..errors import BackendUnavailable
from .placement import tensors_of

logger = logging.getLogger(__name__)

_ALIGNED = 64  # bytes; PyTorch's alignment of tensors
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for each device
_HOST = torch.device("cpu")


class Offload(str, Enum):
    """Which weights are in main memory. The values are saved in users' workflow files."""

    AUTO = "auto"  # the fastest of the others that fits the device
    NONE = "none"
    MODEL = "model"  # the weights of components that are not in use
    GROUP = "group"  # the denoiser's and the text encoder's weights, except the current block and the next
    SEQUENTIAL = "sequential"  # the same, layer by layer

    @property
    def stays(self) -> bool:
        """Whether components stay on the device after use, until they are evicted."""
        return self in (Offload.AUTO, Offload.NONE)

    @property
    def in_parts(self) -> bool:
        """Whether a component's weights come to the device in parts."""
        return self in (Offload.GROUP, Offload.SEQUENTIAL)


class OffloadPolicy:
    """How a component's weights come to the device inside `with`. Here they are there already."""

    most_bytes = 0  # on the device at once, of weights that come and go

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return a shallow copy of `module` (the component or a copy of it) that brings its weights when needed.

        like: an eager copy of the same component, if `module` has other modules in place of its blocks.
        """
        del like
        return module

    def __enter__(self) -> OffloadPolicy:
        return self

    def __exit__(self, *_: object) -> None: ...


def brings_parts_to(device: torch.device) -> bool:
    """Return whether weights have to be moved from main memory to the device."""
    return device.type != "cpu"


_LASTING = {  # backend → why its compiled code does not support weights that move
    "oneflow": "its graphs are bound to the first address of the weights",
    "nexfort": "its graphs have not been tested with weights that move block by block",
    "inductor": "a compiled block cannot wait for the weights of each layer",
}
_REFUSED = {
    Offload.AUTO: (),
    Offload.NONE: (),
    Offload.MODEL: ("oneflow",),
    Offload.GROUP: ("oneflow", "nexfort"),
    Offload.SEQUENTIAL: ("oneflow", "nexfort", "inductor"),
}


def backend_with(choice: BackendChoice, offload: Offload, device: torch.device) -> BackendChoice:
    """Return the backend, or where 'auto' chose one that does not work with `offload`, the next one that does. Raises
    BackendUnavailable where a backend that does not work was asked for by name."""
    refused = _REFUSED[offload] if brings_parts_to(device) else ()
    if choice.name not in refused:
        return choice
    missing = Message("{} does not work with offload '{}': {}", choice.name, offload.value, _LASTING[choice.name])
    if not choice.automatic:
        others = "', '".join(backend for backend in ("inductor", "eager") if backend not in refused)
        kinds = "', '".join(kind.value for kind, backends in _REFUSED.items() if choice.name not in backends)
        raise BackendUnavailable("{}. Choose backend '{}', or offload '{}'.", missing, others, kinds)
    found = "inductor" not in refused and not backend_states(device)["inductor"]
    return BackendChoice("inductor" if found else EAGER, f"auto: {missing}", automatic=True)


class BlockOffload(OffloadPolicy):
    """Weights that are in main memory, but for those in use. At the end of `with` all are there again.

    Weights in none of its parts are on the device inside `with`. On CUDA, with GROUP, the next part comes while one
    computes, and weights are page-locked from their first use until `release`; else, and where the system does not let
    it, they are page-locked as they are brought.
    """

    def __init__(
        self,
        component: torch.nn.Module,  # in main memory
        offload: Offload,  # GROUP (block by block) or SEQUENTIAL (layer by layer)
        device: torch.device,
        *,
        blocks: tuple[str, ...] = (),  # names of the component's blocks, or of lists of blocks; (): its outermost lists
        once: bool = False,  # it is dropped after use, so page-locking all of it would take longer than it saves
    ):
        parts, grouped = Parts.of(component, offload, blocks), offload is Offload.GROUP
        self.made_for = component, offload, blocks
        self._place = parts.places
        self._stream = stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = grouped and stream is not None

        def group(tensors: Iterable[Any]) -> Any:
            from diffusers.hooks.group_offloading import ModuleGroup

            with _as_is():
                made = ModuleGroup(
                    modules=[],  # it would leave modules' buffers on the device
                    parameters=[*dict.fromkeys(tensors)],
                    onload_device=device,
                    offload_device=_HOST,
                    offload_leader=component,
                    onload_leader=component,
                    non_blocking=stream is not None,
                    stream=stream,
                    record_stream=stream is not None,
                    low_cpu_mem_usage=True,  # page-locks weights only while it copies them
                )
                made.offload_()
            return made

        together = [[t for module in modules for t in tensors_of(module)] for modules in parts.together]
        self._pinned_buffers = self._in_pinned_buffers([*together, parts.rest]) if grouped and not once else []
        self._groups = [group(tensors) for tensors in together]
        self._rest = group(parts.rest)
        self._here: set[int] = set()
        self._launched: deque[torch.cuda.Event] = deque()  # parts that may still compute
        self._lock = threading.RLock()
        self.most_bytes = parts.most_bytes(ahead=self._ahead)

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        names = like if like is not None else module

        def part(name: str, place: int) -> Make:
            called = module.get_submodule(name)

            def call(*args: Any, **kwargs: Any) -> Any:
                with self.onloaded(place):
                    return called(*args, **kwargs)

            return lambda _replaced: with_forward(names.get_submodule(name), call)

        return replace_submodules(module, {name: part(name, place) for name, place in self._place.items()})

    def __enter__(self) -> BlockOffload:
        self._lock.acquire()  # another run would evict this run's weights
        try:
            with _as_is():
                self._page_lock()
                self._until_done()
                self._rest.onload_()
                self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with _as_is():
                self._wait()
                self._note_launched()
                self._rest.offload_()
                for place in tuple(self._here):
                    self._send_away(place)
        finally:
            self._lock.release()

    @contextmanager
    def onloaded(self, place: int) -> Generator[None]:
        """Have one part's weights on the device inside; afterwards start to copy the next part's."""
        with _as_is():
            self._bring(place)
            self._wait()
        try:
            yield
            with _as_is():
                self._note_launched()
                if self._ahead and place + 1 < len(self._groups):
                    self._bring(place + 1, beside=1)  # while the device computes this one
        finally:
            with _as_is():
                self._send_away(place)

    def release(self) -> None:
        """Release page-locked memory until the next use, and PyTorch's unused cache of it. Does nothing while another
        thread computes with these weights; their memory is then released with the weights."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for pinned in self._pinned_buffers:
                pinned.unlock()
            release = getattr(torch.accelerator, "empty_host_cache", None)  # PyTorch 2.9's
            if release and torch.cuda.is_available():
                release()
        finally:
            self._lock.release()

    def _in_pinned_buffers(self, parts: list[list[torch.Tensor]]) -> list[PinnedBuffer]:
        """Move each part's weights into a buffer, part by part: main memory holds only one part twice at a time."""
        if self._stream is None:
            return []
        try:
            with _as_is():
                return [PinnedBuffer(tensors, self._stream) for tensors in parts]
        except (OSError, RuntimeError) as error:  # main memory is too small
            _say_that_it_is_slower(error)
            return []

    def _page_lock(self) -> None:
        try:
            for pinned in self._pinned_buffers:
                pinned.lock()
        except RuntimeError as error:  # systems limit page-locked memory
            self.release()
            self._pinned_buffers = []
            _say_that_it_is_slower(error)

    def _bring(self, place: int, *, beside: int = 0) -> None:
        """Copy a part to the device, once all but the last `beside` launched parts are done."""
        if place in self._here:
            return
        self._until_done(but=beside)
        self._here.add(place)
        self._groups[place].onload_()

    def _until_done(self, but: int = 0) -> None:
        """Wait until the device has computed all but the last `but` launched parts. The host runs far ahead, and
        evicted weights stay on the device until they were used."""
        while len(self._launched) > but:
            self._launched.popleft().synchronize()

    def _note_launched(self) -> None:
        """Record an event after all launched work."""
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._stream.device))
            self._launched.append(event)

    def _send_away(self, place: int) -> None:
        self._groups[place].offload_()
        self._here.discard(place)

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _say_that_it_is_slower(error: Exception) -> None:
    why = str(error).strip().split("\n", 1)[0]
    logger.warning("main memory cannot be page-locked for all blocks (%s): one block at a time, slower", why)


@contextmanager
def _as_is() -> Generator[None]:
    """Move weights unchanged inside: they do not become inference tensors, and a rerun does not upcast them."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


@dataclass(frozen=True)
class Parts:
    """A component's weights, parted as they come to the device."""

    places: dict[str, int]  # name of a block or of a layer → number of its part; those that share a weight are one part
    together: list[list[torch.nn.Module]]  # the modules of each part, in the order in which they run
    n_bytes: list[int]  # of each part
    rest: list[torch.Tensor]  # in no part

    @classmethod
    def of(cls, component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> Parts:
        """Split the component by blocks (GROUP) or by layers (SEQUENTIAL). It may be on the "meta" device.

        blocks: names of its blocks, or of lists of blocks. Defaults to its outermost lists.
        """
        places: dict[str, int] = {}
        together: list[list[torch.nn.Module]] = []
        place_of: dict[torch.Tensor, int] = {}
        for name, part in _blocks(component, blocks) if offload is Offload.GROUP else _layers(component):
            tensors = list(tensors_of(part))
            place = next((place_of[t] for t in tensors if t in place_of), len(together))
            places[name] = place
            if place == len(together):
                together.append([part])
            elif not place_of.keys() >= {*tensors}:
                together[place].append(part)
            place_of |= dict.fromkeys(tensors, place)
        n_bytes = [0] * len(together)
        for tensor, place in place_of.items():
            n_bytes[place] += tensor.nbytes
        rest = [tensor for tensor in tensors_of(component) if tensor not in place_of]
        return cls(places, together, n_bytes, rest)

    def most_bytes(self, *, ahead: bool) -> int:
        """Return the peak bytes on the device: the rest and the largest part; with `ahead`, the two largest neighbours.

        ahead: the next part is loaded while one computes.
        """
        neighbours = map(sum, pairwise(self.n_bytes)) if ahead else ()
        return sum(tensor.nbytes for tensor in self.rest) + max((*self.n_bytes, *neighbours), default=0)


def _blocks(component: torch.nn.Module, parts: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
    for part in parts or tuple(_outermost_lists(component)):
        module = component.get_submodule(part)
        if isinstance(module, torch.nn.ModuleList):
            yield from ((f"{part}.{name}", block) for name, block in _children(module))
        else:
            yield part, module


def _outermost_lists(module: torch.nn.Module, path: str = "") -> Iterator[str]:
    for name, child in _children(module):
        if isinstance(child, torch.nn.ModuleList):
            yield f"{path}{name}"
        else:
            yield from _outermost_lists(child, f"{path}{name}.")


def _layers(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules with own weights, by name. A layer adapted by peft (LoRA) counts as one."""
    for name, child in _children(module):
        own = any(True for _ in tensors_of(child, recurse=False)) or hasattr(child, "base_layer")
        if own:
            yield f"{path}{name}", child
        else:
            yield from _layers(child, f"{path}{name}.")


def _children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's children by name. A child with two names comes twice."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)


class PinnedBuffer:
    """Tensors that lie together in a buffer of main memory. They stay the objects that they are, with their shapes,
    strides and values. Tensors of other classes and views with gaps are left where they are.

    PyTorch's `pin_memory` rounds up to a power of two: 1.78 times the weights of CogVideoX-5B. Here the buffer is
    registered with CUDA as it is. A copy from registered memory is asynchronous too, but PyTorch notes such a copy only
    for memory of its allocator. So the buffer stays registered until the copies' stream is done.

    The buffer has pages of its own, since CUDA registers a page once; and it is the storage of its tensors from the
    first byte on, since that is the byte of which `is_pinned` asks CUDA. While it is made, main memory holds at most
    its bytes beside all weights.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream):
        self.tensors = [tensor for tensor in dict.fromkeys(tensors) if _is_plain(tensor)]
        self._stream = stream  # of all copies from it
        self._unlock: weakref.finalize[..., PinnedBuffer] | None = None
        begins, n_bytes = laid_out(self.tensors)
        if not self.tensors:
            return
        self._buffer = torch.frombuffer(_pages(n_bytes), dtype=torch.uint8)
        for tensor, begin in zip(self.tensors, begins, strict=True):
            data = tensor.data
            here = self._buffer[begin : begin + data.nbytes].view(data.dtype).as_strided(data.shape, data.stride())
            tensor.data = here.copy_(data)

    def lock(self) -> None:
        """Page-lock the buffer, if it is not already. Raises RuntimeError if the system refuses."""
        if self.tensors and not (self._unlock and self._unlock.alive):
            _register(self._buffer, self._stream)
            self._unlock = weakref.finalize(self, _unregister, self._buffer, self._stream)
            self._unlock.atexit = False

    def unlock(self) -> None:
        """Unlock the buffer's pages, after all copies from it. The tensors stay in it."""
        if self._unlock:
            self._unlock()


def laid_out(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Return each tensor's offset in a buffer, and the buffer's size, in bytes."""
    begins, n_bytes = [], 0
    for tensor in tensors:
        begins.append(-(-n_bytes // _ALIGNED) * _ALIGNED)
        n_bytes = begins[-1] + tensor.nbytes
    return begins, n_bytes


def _is_plain(tensor: torch.Tensor) -> bool:
    data = tensor.data
    if type(data) is not torch.Tensor or data.layout is not torch.strided or data.is_quantized:
        return False
    if data.device.type != "cpu" or data.numel() == 0:
        return False
    return torch.empty_like(data, device="meta").stride() == data.stride()  # dense, in any order of dimensions


def _pages(n_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _register(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)
    if int(error):
        _take_error(stream)
        raise RuntimeError(f"CUDA error: {cudart.cudaGetErrorString(error)}")


def _unregister(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    cudart: Any = torch.cuda.cudart()
    try:
        stream.synchronize()
    finally:
        error = cudart.cudaHostUnregister(buffer.data_ptr())
        if int(error):
            _take_error(stream)
            logger.warning("page-locked memory cannot be released: %s", cudart.cudaGetErrorString(error))


def _take_error(stream: torch.cuda.Stream) -> None:
    """Clear CUDA's last error by a kernel that raises it; else the next kernel would."""
    try:
        torch.ones(1, device=stream.device).add_(1)
    except RuntimeError as error:
        logger.debug("CUDA's latest error was %s", error)
