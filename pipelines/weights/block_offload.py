"""Weights that come to the device a part at a time: a block, or a layer.

diffusers moves the groups (its ModuleGroup): from page-locked memory, on a stream of its own, the next block's while
one computes. Its hooks are not used. They replace `forward` on the modules, and a shell of such a module would go on
calling the original's, without the wide layers, the compiled blocks or the islands that it is made for. So the groups
come and go in a shell too, around what is compiled and under what runs in fp32.

The parts are told from the module alone: nothing is moved, and its tensors need have no values.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ...precision.shallow_copy import Make, replace_submodules, with_forward
from .offload import Offload
from .pinned_buffer import PinnedBuffer
from .placement import tensors_of

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


class BlockOffload:
    """Weights that are in main memory, but for those in use. At the end of `with` all are there again.

    component: the module, in main memory.
    parts: of the component. Weights in none of them are on the device inside `with`.
    ahead: bring the next part while one computes. CUDA only.
    pinned: keep weights in page-locked memory, from their first use until `release`; else, and where the system does
        not let it, they are put there as they are brought. CUDA only.
    """

    def __init__(
        self,
        component: torch.nn.Module,
        parts: Parts,
        device: torch.device,
        *,
        ahead: bool,
        pinned: bool,
    ):
        self.component = component
        self._place = parts.places
        self._stream = stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ahead = ahead and stream is not None

        def group(tensors: Iterable[Any]) -> Any:
            from diffusers.hooks.group_offloading import ModuleGroup

            with _as_is():
                made = ModuleGroup(
                    modules=[],  # of which it would leave the buffers on the device
                    parameters=[*dict.fromkeys(tensors)],
                    onload_device=device,
                    offload_device=_HOST,
                    offload_leader=component,
                    onload_leader=component,
                    non_blocking=stream is not None,
                    stream=stream,
                    record_stream=stream is not None,
                    low_cpu_mem_usage=True,  # it page-locks what is not so as it comes
                )
                made.offload_()
            return made

        together = [[t for module in modules for t in tensors_of(module)] for modules in parts.together]
        self._pinned_buffers = self._in_pinned_buffers([*together, parts.rest]) if pinned else []
        self._groups = [group(tensors) for tensors in together]
        self._rest = group(parts.rest)
        self._here: set[int] = set()
        self._launched: deque[torch.cuda.Event] = deque()  # what may be computing
        self._lock = threading.RLock()
        self.most_bytes = parts.most_bytes(ahead=self._ahead)

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        names = like if like is not None else module

        def part(name: str, place: int) -> Make:
            called = module.get_submodule(name)
            return lambda _replaced: with_forward(names.get_submodule(name), _Part(self, place, called))

        return replace_submodules(module, {name: part(name, place) for name, place in self._place.items()})

    def __enter__(self) -> BlockOffload:
        self._lock.acquire()  # another run would send away what this one computes with
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
        """Have one part's weights on the device inside, and the next part's on their way."""
        with _as_is():
            self._bring(place)
            self._wait()
        try:
            yield
            with _as_is():
                self._note_launched()
                if self._ahead and place + 1 < len(self._groups):
                    self._bring(place + 1, beside=1)  # while this one computes
        finally:
            with _as_is():
                self._send_away(place)

    def release(self) -> None:
        """Give back page-locked memory until the next use. Where another thread computes with it, it stays: that is
        given back when nobody has these weights any more."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for pinned in self._pinned_buffers:
                pinned.unlock()
            release_page_locked()
        finally:
            self._lock.release()

    def _in_pinned_buffers(self, parts: list[list[torch.Tensor]]) -> list[PinnedBuffer]:
        """Lay each part's weights together, one part after the other: main memory holds one of them twice at a time."""
        if self._stream is None:
            return []
        try:
            with _as_is():
                return [PinnedBuffer(tensors, self._stream) for tensors in parts]
        except (OSError, RuntimeError) as error:  # no main memory
            _say_that_it_is_slower(error)
            return []

    def _page_lock(self) -> None:
        try:
            for pinned in self._pinned_buffers:
                pinned.lock()
        except RuntimeError as error:  # systems allow only so much of it
            self.release()
            self._pinned_buffers = []
            _say_that_it_is_slower(error)

    def _bring(self, place: int, *, beside: int = 0) -> None:
        """Bring a part when those before it are done, but for the one that computes where it is brought ahead."""
        if place in self._here:
            return
        self._until_done(but=beside)
        self._here.add(place)
        self._groups[place].onload_()

    def _until_done(self, but: int = 0) -> None:
        """Wait until the device has computed all but so many of the parts. The host runs far ahead of it, and what is
        sent away stays there until it was computed with."""
        while len(self._launched) > but:
            self._launched.popleft().synchronize()

    def _note_launched(self) -> None:
        """All that was called is on the device's way."""
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


class _Part:
    """A block's or a layer's call, with its weights on the device."""

    def __init__(self, weights: BlockOffload, place: int, called: torch.nn.Module):
        self._weights = weights
        self._place = place
        self._called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._weights.onloaded(self._place):
            return self._called(*args, **kwargs)


def in_parts(
    component: torch.nn.Module,
    offload: Offload,
    device: torch.device,
    *,
    blocks: Iterable[str] = (),
    once: bool = False,
) -> BlockOffload:
    """Make a component's weights come and go as `offload` (GROUP or SEQUENTIAL) asks for.

    blocks: names of the component's blocks, or of lists of blocks. Defaults to its outermost lists.
    once: the component is let go after use, so page-locking all of it would take longer than it saves.
    """
    parts = Parts.of(component, offload, tuple(blocks))
    group = offload is Offload.GROUP
    return BlockOffload(component, parts, device, ahead=group, pinned=group and not once)


def _say_that_it_is_slower(error: Exception) -> None:
    why = str(error).strip().split("\n", 1)[0]
    logger.warning("main memory cannot be page-locked for all blocks (%s): slower, one at a time", why)


def release_page_locked() -> None:
    """Give the system back what PyTorch keeps of page-locked memory that nobody uses."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # PyTorch 2.9's
    if release and torch.cuda.is_available():
        release()


@contextmanager
def _as_is() -> Generator[None]:
    """Keep weights that are moved inside as they are: they become no inference tensors, and no rerun upcasts them."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield


def most_on_device(component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> int:
    """Return the bytes of a component's weights that are on the device at once while it computes, on CUDA. It may be on
    the "meta" device.

    blocks: names of its blocks, or of lists of blocks. Defaults to its outermost lists.
    """
    if not offload.in_parts:
        return sum(tensor.nbytes for tensor in {*tensors_of(component)})
    return Parts.of(component, offload, blocks).most_bytes(ahead=offload is Offload.GROUP)


@dataclass(frozen=True)
class Parts:
    """A component's weights, parted as they come to the device.

    places: {name of a block or of a layer: the number of its part}. Those that share a weight are one part.
    together: the modules of each part, in the order in which they run.
    n_bytes: of each part.
    rest: tensors that are in no part.
    """

    places: dict[str, int]
    together: list[list[torch.nn.Module]]
    n_bytes: list[int]
    rest: list[torch.Tensor]

    @classmethod
    def of(cls, component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> Parts:
        """Part the component by blocks (GROUP) or by layers (SEQUENTIAL)."""
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
        """Return the bytes that are on the device at once: the rest, and the largest part, or where the next part comes
        ahead, while one computes, the two largest neighbours."""
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
    """Yield the outermost modules that have weights of their own, by name. An adapted layer (peft's LoRA) is one."""
    for name, child in _children(module):
        own = any(True for _ in tensors_of(child, recurse=False)) or hasattr(child, "base_layer")
        if own:
            yield f"{path}{name}", child
        else:
            yield from _layers(child, f"{path}{name}.")


def _children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's children by name. One that has two names comes twice."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)
