"""Where a component's weights are while it is in use, and weights that come to the device a group at a time.

diffusers moves the groups (its ModuleGroup): from page-locked memory, on a stream of its own, the next block's while
one computes. Its hooks are not used. They replace `forward` on the modules, and a shell of such a module would go on
calling the original's, without the wide layers, the compiled blocks or the islands that it is made for. So the groups
come and go in a shell too, around what is compiled and under what runs in fp32.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...precision.shallow_copy import Make, replace_submodules, with_forward
from ...trust.message import Message
from ..compile.backends import BackendChoice, choose_backend
from ..errors import BackendUnavailable
from .parts import Offload, Parts, tensors_of
from .pinned_buffer import PinnedBuffer

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")


class OffloadPolicy(Protocol):
    """A component's weights, which come to the device as they are needed inside `with`.

    most_bytes: on the device at once, of weights that come and go.
    """

    most_bytes: int

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return a shell of `module` (the component, or a shell of it) that brings its weights when they are needed.

        like: an eager shell of the same component, where `module` has something else in place of blocks.
        """
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class NoOffload:
    """Weights that are on the device already."""

    most_bytes = 0

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        del like
        return module

    def __enter__(self) -> NoOffload:
        return self

    def __exit__(self, *_: object) -> None: ...


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


def brings_parts_to(device: torch.device) -> bool:
    """Return whether weights that rest in main memory have to be brought to the device."""
    return device.type != "cpu"


def release_page_locked() -> None:
    """Give the system back what PyTorch keeps of page-locked memory that nobody uses."""
    release = getattr(torch.accelerator, "empty_host_cache", None)  # PyTorch 2.9's
    if release and torch.cuda.is_available():
        release()


_LASTING = {  # backend → why what it compiled cannot follow weights that move
    "oneflow": "its graphs keep the memory in which the weights were first",
    "nexfort": "whether its graphs follow weights that move block by block has not been seen",
    "inductor": "a compiled block is one piece, and cannot wait for each layer's weights",
}
_REFUSED = {
    Offload.AUTO: (),
    Offload.NONE: (),
    Offload.MODEL: ("oneflow",),
    Offload.GROUP: ("oneflow", "nexfort"),
    Offload.SEQUENTIAL: ("oneflow", "nexfort", "inductor"),
}


def backend_with(choice: BackendChoice, offload: Offload, device: torch.device) -> BackendChoice:
    """Return the backend, or where 'auto' chose one that does not work with `offload`, the next one that does.

    Raises BackendUnavailable where a backend that does not work was asked for by name.
    """
    refused = _REFUSED[offload] if brings_parts_to(device) else ()
    if choice.name not in refused:
        return choice
    missing = Message("{} does not work with offload '{}': {}", choice.name, offload.value, _LASTING[choice.name])
    if not choice.automatic:
        others = "', '".join(backend for backend in ("inductor", "eager") if backend not in refused)
        kinds = "', '".join(kind.value for kind, backends in _REFUSED.items() if choice.name not in backends)
        raise BackendUnavailable("{}. Choose backend '{}', or offload '{}'.", missing, others, kinds)
    for name in ("inductor", "eager"):
        try:
            following = choose_backend(name, device)
        except BackendUnavailable:
            continue
        if name not in refused:
            return BackendChoice(following.name, f"auto: {missing}", automatic=True)
    raise AssertionError("eager works everywhere")


@contextmanager
def _as_is() -> Generator[None]:
    """Keep weights that are moved inside as they are: they become no inference tensors, and no rerun upcasts them."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunction():
        yield
