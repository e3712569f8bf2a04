"""Placement of weights, and their memory layout, without a memory manager; `comfyui_host/host.py` uses ComfyUI's.

`OomFallback` has a stage's execution options, the fastest first: it takes the first one that fits, and if memory runs
out nevertheless, the next one.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import gt
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...precision.dtypes import DTYPES, has_float64
from ...precision.machine import default_device, first_line
from ...precision.memory import size
from ...precision.policy import Component
from ...trust.message import Message, Told
from ..parallel.group import ALONE, ProcessGroup

if TYPE_CHECKING:
    from ..run.stage import ComponentStage

_CONTAINER = Path("/sys/fs/cgroup")
_LEFT_FREE = 0.1  # fraction of main memory that offloaded weights leave free
MOVING = threading.RLock()  # held while weights move: ComfyUI's memory manager has no lock for its lists


def tensors_of(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


class DeviceMemory(NamedTuple):
    """A device's memory, in bytes."""

    total: int
    free: int  # including PyTorch's unused cache
    movable: int | None = None  # bytes that a memory manager can move out; None: there is no memory manager


class PlainPlacement:
    """What moves whole components between the device that computes and the host's memory. Here they stay where they are
    put; a host has its memory manager do it."""

    wish = ""  # the offload that the process was started for: "none", "group" or "sequential"; "" where for none
    channels_last = False  # whether the process was started for convolutions with their channels last

    def __init__(self, device: torch.device | None = None):
        self.device = device or default_device()

    def make_room(self, n_bytes: int) -> None:
        """Make room on the device for `n_bytes`, before they are needed."""

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        """Move all of a component's weights to the device. If it raises, all are in main memory.

        beside: bytes to keep free on the device besides them.
        """
        del name, beside
        move_whole(module, self.device)

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        """Move all of a component's weights to main memory."""
        del name
        move(module, torch.device("cpu"))

    def forget(self, name: str) -> None:
        """Note that the component is no longer loaded."""
        del name
        self.give_back()

    def give_back(self) -> None:
        """Release PyTorch's unused cache of the device's memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory | None:
        """Return the device's memory; None if it is main memory."""
        if self.device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return DeviceMemory(total, free + unused)


def main_memory() -> DeviceMemory:
    """Return main memory, within the limit of a container."""
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
    return sum(tensor.nbytes for tensor in {*tensors_of(module)})


def bytes_on(device: torch.device, module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in {*tensors_of(module)} if tensor.device == device)


# tensor on the device → its copy in main memory, an alias of the tensor's data, and its version when it was copied
_HOST_COPIES = WeakTensorKeyDictionary()


def bytes_coming(module: torch.nn.Module) -> int:
    """Return the bytes of weights and buffers on a device that have no copy in main memory."""
    return sum(t.nbytes for t in {*tensors_of(module)} if t.device.type != "cpu" and _host_copy(t) is None)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights, outside of inference mode: inside, they would become inference tensors.

    Weights that go to a card with its own memory keep a copy in main memory until `free_host_copies`. If unchanged,
    they come back as that copy, and nothing is copied.
    """
    with torch.inference_mode(False), torch.no_grad():
        if not has_float64(device):  # CogVideoX's position table, which is rounded at use anyway
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
        before = {name: t.data for name, t in _named(module) if t.device.type == "cpu" and _is_plain(t.data)}
        try:
            module.to(device)
        finally:
            for name, tensor in _named(module):
                if name in before and tensor.device.type != "cpu" and not tensor.is_inference():
                    _HOST_COPIES[tensor] = before[name], tensor.data, tensor._version


def _host_copy(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the copy in main memory of a tensor on the device; None if there is none, or the tensor may have changed.

    The tensor's version shows changes in place, in inference mode too; its address shows others. A change in place
    through `.data` stays hidden: `tests/pipelines/test_host_copies.py` checks that the pack makes none.
    """
    if tensor not in _HOST_COPIES or tensor.is_inference():  # inference tensors have no version
        return None
    values, there, version = _HOST_COPIES[tensor]
    return values if tensor._version == version and _lies(tensor) == _lies(there) else None


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def free_host_copies(module: torch.nn.Module) -> None:
    """Free the copies in main memory of a component on the device."""
    for tensor in tensors_of(module):
        _HOST_COPIES.pop(tensor, None)


def has_own_memory(device: torch.device) -> bool:
    """Return whether a device is known to have its own memory: a CUDA or ROCm card that is not integrated."""
    return device.type == "cuda" and not torch.cuda.get_device_properties(device).is_integrated


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided


def move_whole(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights to a device that may be too small for them. If it raises, all are in main memory."""
    try:
        move(module, device)
    except BaseException:
        move(module, torch.device("cpu"))
        raise


# Memory formats of convolution weights: contiguous, as they were read, or channels last. Tensor cores compute
# convolutions in channels last: with other weights, cuDNN converts each call's input and output. diffusers measured
# 3.30 s instead of 3.61 s for an image of Stable Diffusion in fp16, on a TITAN RTX
# (https://huggingface.co/docs/diffusers/v0.12.0/optimization/fp16).
#
# 3D convolutions stay contiguous. In channels last, PyTorch uses cuDNN even in versions that otherwise avoid it for its
# wrong results (`precision/kernels.py`), and Wan's pictures were garbled
# (https://github.com/sgl-project/sglang/pull/25985).
_FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


def of_layout(module: torch.nn.Module) -> list[torch.nn.Conv2d]:
    """Return the convolutions whose layout matters: 2D ones with overlapping windows. Others are matrix products."""
    found = [part for part in module.modules() if isinstance(part, torch.nn.Conv2d)]
    return [part for part in found if any(map(gt, part.kernel_size, part.stride))]


def laid_out(module: torch.nn.Module, *, channels_last: bool) -> bool:
    return all(part.weight.is_contiguous(memory_format=_FORMATS[channels_last]) for part in of_layout(module))


def lay_out(module: torch.nn.Module, *, channels_last: bool) -> None:
    """Make the weights of `of_layout`'s convolutions channels last, or contiguous. Parameters stay the same objects."""
    for part in of_layout(module):
        with torch.inference_mode(False):
            _HOST_COPIES.pop(part.weight, None)
            part.weight.data = part.weight.data.contiguous(memory_format=_FORMATS[channels_last])


Result = TypeVar("Result")

_MARGIN = 1.15  # factor on the estimated activation memory: cuDNN's and cuBLAS's workspaces, and gaps, are extra


class NoRoom(Told, torch.OutOfMemoryError):
    """A stage is out of memory in all its execution options."""


class ExecutionOption(NamedTuple):
    """A way to run a stage."""

    said: str  # its name in the report
    weights: int  # most bytes of weights that are on the device at once
    beside: int  # most bytes of everything else
    take: Callable[[], object] = lambda: None  # switches later calls to it

    @property
    def takes(self) -> int:
        return self.weights + self.beside

    @property
    def advised(self) -> float:
        return self.weights + self.beside * _MARGIN

    def in_words(self) -> str:
        return Message("{} of weights and {} of activations", size(self.weights), size(self.beside))


class FailedEstimate(NamedTuple):
    """An option that fit by its estimate, but ran out of memory."""

    takes: int  # bytes by the estimate
    has: int  # bytes that were available


def first_that_fits(
    ways: Iterable[ExecutionOption], has: int, failed_estimates: Sequence[FailedEstimate] = ()
) -> tuple[ExecutionOption, ExecutionOption, bool]:
    """Return the first option that fits in `has` bytes, the very first option, and True; if none fits, the option that
    takes least, the very first one, and whether `has` covers its bytes without the margin.

    ways: at least one, the fastest first. Options after the one that fits are not made.
    """
    met: list[ExecutionOption] = []
    for way in ways:
        met.append(way)
        if way.advised <= has and not any(way.takes >= each.takes and has <= each.has for each in failed_estimates):
            return way, met[0], True
    least = min(met, key=lambda way: way.takes)
    return least, met[0], least.takes <= has


class OomFallback:
    """Runs a stage's calls, and falls back to cheaper options if memory runs out. A fallback stays for later calls.

    stage: with offload 'auto', the first option that fits is taken before its first call.
    ranks: processes that make its calls together. They choose alike, and repeat no call: the others would not join in.
    """

    def __init__(self, stage: ComponentStage, ranks: ProcessGroup = ALONE):
        self._stage = stage
        self._words = stage.plan.component.value.replace("_", " ")
        self._ranks = ranks
        self._store, self._placement = stage.handle.store, stage.handle.store.placement
        self._failed_estimates = self._store.failed_estimates.setdefault(stage.name, [])
        self._chosen = False
        self._foreseen: FailedEstimate | None = None  # recorded if memory runs out
        self._taken: list[str] = []

    def run(self, call: Callable[[], Result], ways: Callable[[], Iterable[ExecutionOption]] | None = None) -> Result:
        """Make a call, and repeat it with a fallback if memory runs out. Raises NoRoom if all fallbacks failed.

        ways: returns the current option, then those that take less memory; None: there is only one.
        """
        if ways and not self._chosen and (room := self._stage.room()):
            self._choose(ways(), -self._ranks.all_reduce_max(-room))
        self._chosen = True
        if not self._ranks.alone:
            return call()
        while True:
            try:
                return call()
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                failed = error
                traceback.clear_frames(failed.__traceback__)  # the frames hold the call's tensors
            self._go_on(failed, ways)

    def _choose(self, ways: Iterable[ExecutionOption], has: int) -> None:
        """Take the first option that fits, and note why. Raises NoRoom if none fits, before anything is computed.

        has: bytes that the device has for the stage.
        """
        way, first, fits = first_that_fits(ways, has, self._failed_estimates)
        where = Message("{} available on {}", size(has), self._placement.device)
        if not fits:
            raise NoRoom(
                "{}: not enough memory, even for the cheapest option: {} needs {}, of {}. {}",
                *(self._words, way.said, way.in_words(), where, self._what_would_fit(way, has)),
            )
        instead = "" if way is first else Message("; {} would need {}", first.said, first.in_words())
        self._stage.report.note(
            Message("{}: offload auto chose {}: {}, of {}{}", self._words, way.said, way.in_words(), where, instead)
        )
        way.take()
        self._foreseen = FailedEstimate(way.takes, has)

    def _what_would_fit(self, way: ExecutionOption, has: int) -> str:
        other = "Close other programs that use the card, or use a card with more memory."
        part = (has - way.weights) / (way.beside * _MARGIN) if way.beside else 0
        if self._stage.plan.component in (Component.TEXT_ENCODER, Component.IMAGE_ENCODER):
            return other
        if part < 0.01:
            return f"No size would fit. {other}"
        return f"About {part:.0%} of this size (width × height × frames) would fit: choose less. {other}"

    def _go_on(self, failed: RuntimeError, ways: Callable[[], Iterable[ExecutionOption]] | None) -> None:
        before = self._placement.memory()
        gc.collect()  # earlier calls' tensors may still be in a reference cycle
        self._placement.give_back()
        if self._foreseen:
            self._failed_estimates.append(self._foreseen)
            self._foreseen = None
        following = next(islice(ways(), 1, None), None) if ways and self._taken else None
        if not self._taken:
            leave_alone = partial(self._store.leave_device, but=self._stage.name)
            following = ExecutionOption("nothing else on the device", 0, 0, leave_alone)
        if following:
            following.take()
            self._taken.append(following.said)
            self._stage.report.note(Message("{}: out of memory, fell back to {}", self._words, following.said))
            return
        has = f" {self._placement.device} has {size(before.total)}, {size(before.free)} of it free." if before else ""
        raise NoRoom(
            "{}: out of memory, all fallbacks failed.{}{}{} Choose a smaller size, fewer frames or a smaller batch, "
            "close other programs that use the card, or use a card with more memory. PyTorch said: {}",
            *(self._words, f" Tried: {'; '.join(self._taken)}.", has, self._needs(), first_line(failed)),
        ) from failed

    def _needs(self) -> str:
        store, name = self._store, self._stage.name
        found = [size(bytes_of(store.model.bare(name, DTYPES[self._stage.weights_in]))) + " of weights"]
        found += [f"{size(beside)} of activations" for key, (beside, _) in store.room.items() if key[0] == name][-1:]
        return f" A call needs {' and '.join(found)}."


def ran_out(error: BaseException) -> bool:
    """Return whether an error of PyTorch means out of memory, on any device or for page-locked memory; False for
    NoRoom, which has no fallback left."""
    said = isinstance(error, torch.OutOfMemoryError) or "out of memory" in first_line(error).lower()
    return said and not isinstance(error, NoRoom)
