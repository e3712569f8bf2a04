"""A pipeline's stage: a component with its plan, guard and report, loaded at its first use; and the progress messages
of its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from ...precision.guard import Stage
from ...precision.layer_peaks import block_names
from ...precision.policy import Component
from ...precision.process_state import PROCESS_GATE
from ...trust.message import Message
from ..compile.backends import uses_torch_kernels
from ..errors import BackendUnavailable
from ..models.lora import Lora
from ..weights.offload import Offload, OffloadPolicy, Parts
from ..weights.placement import bytes_of, of_layout
from ..weights.quantising import quantised_bytes

if TYPE_CHECKING:
    from ..weights.components import MemoryKey
    from .handle import PipelineHandle

CallTold = Callable[[int, int, str], None]  # calls done, number of calls, a line of text; may raise, to interrupt

_IN_PARTS = (Component.TEXT_ENCODER, Component.DENOISER)  # the large components, for offloads in parts
_T = TypeVar("_T")


class lazy_property(Generic[_T]):  # noqa: N801 - a decorator, as cached_property is
    """A property that is computed at its first use. `functools.cached_property` of Python 3.10 and 3.11 has one lock
    for all stages, so that a stage that loads, and one that waits for its store, would deadlock."""

    def __init__(self, compute: Callable[[Any], _T]):
        self._compute = compute

    def __get__(self, stage: Any, _owner: type) -> _T:
        value = stage.__dict__[self._compute.__name__] = self._compute(stage)
        return value


@dataclass(frozen=True, eq=False, kw_only=True)
class ComponentStage(Stage):
    handle: PipelineHandle
    name: str  # of its folder
    weights_in: str  # the dtype that its weights are loaded in
    # makes a shell of its module that computes in another way, with other processes for instance
    adapt: Callable[[torch.nn.Module], torch.nn.Module] | None = None
    shared_by: int = 1  # so many processes compute a call together

    @property
    def loras(self) -> tuple[Lora, ...]:
        return self.handle.loras_of(self.name) if self.plan.component is Component.DENOISER else ()

    @lazy_property
    def memory_key(self) -> MemoryKey:
        """The store's key of its overrides, with the LoRA files' state at the first use."""
        return self.handle.memory_key(self.name, self.plan.numerics)

    @lazy_property
    def module(self) -> torch.nn.Module:
        """The unchanged component with the pipeline's LoRAs, after `adapt`. Raises BadFolder, BadLora."""
        module = self._loaded(place=False)
        for note in self.handle.store.notes[self.name]:
            self.report.note(note)  # once, although `cheaper` stages share the report
        if self.channels_last:
            self.report.note(Message("channels last: {} of its 2D convolutions", len(of_layout(module))))
        elif self.handle.compile_options.channels_last and self._convolves:
            self.report.note(Message("channels last: not used, {} chooses the layout itself", self.handle.backend.name))
        return self.adapt(module) if self.adapt else module

    def place(self, room: Callable[[], int] = lambda: 0) -> None:
        """Bring the component to the device right before it computes: placing another one later may evict it. Raises
        OutOfMemoryError.

        room: returns the activation memory of its next calls in bytes. Not called if the device is the CPU.
        """
        store = self.handle.store
        beside = room() + quantised_bytes(self) if store.placement.memory() else 0
        self._loaded(place=True, beside=beside)
        if beside and self.weights.most_bytes:
            store.evict_until_free(self.name, self.weights.most_bytes + beside)
            store.placement.make_room(self.weights.most_bytes + beside)

    def room(self) -> int | None:
        """Return the device's bytes for the component, with everything else moved out; None unless offload is 'auto'
        and the device has its own memory."""
        return self.handle.store.reach() if self.handle.offload is Offload.AUTO else None

    def weights_at_once(self) -> int:
        """Return the peak bytes of its weights on the device, under its offload, including quantised copies."""
        if not self.handle.store.in_parts(self._offload):
            return bytes_of(self.module) + quantised_bytes(self)
        parts = Parts.of(self.module, self._offload, self._parts)
        return parts.most_bytes(ahead=self._offload is Offload.GROUP)

    def _loaded(self, *, place: bool, beside: int = 0) -> torch.nn.Module:
        store = self.handle.store
        module = store.module(self.name, self.weights_in, self._offload, self.loras, place=place, beside=beside)
        store.lay_out(self.name, channels_last=self.channels_last)
        return module

    @property
    def channels_last(self) -> bool:
        handle = self.handle
        return handle.compile_options.channels_last and uses_torch_kernels(handle.backend.name) and self._convolves

    @property
    def _convolves(self) -> bool:
        return self.plan.component not in (Component.TEXT_ENCODER, Component.IMAGE_ENCODER)

    @lazy_property
    def weights(self) -> OffloadPolicy:
        """The policy that brings the weights to the device."""
        _ = self.module
        return self.handle.store.onloading(self.name, self._offload, self.loras, self._parts)

    @property
    def numerics(self) -> dict[str, Any]:
        """Options of `build_half_precision_forward`."""
        return {"all_layers_scaled": self.plan.overflow_protection, "tf32": self.tf32, "agree": self.agree}

    def ways(self) -> Iterator[tuple[str, ComponentStage]]:
        """Yield the possible offloads by name, with the stage under each, the fastest first: its own, then those that
        take less memory. 'auto' begins with the offload that the process was started for, if it is possible."""
        automatic = self._offload is Offload.AUTO
        kinds = {Offload.NONE.value if automatic else self._offload.value: self}
        kinds |= {each.value: cheaper for each in Offload if each.in_parts and (cheaper := self.cheaper(each))}
        names, wish = [*kinds], self.handle.store.placement.wish
        for name in names[names.index(wish) if automatic and wish in names else 0 :]:
            yield name, kinds[name]

    def cheaper(self, offload: Offload) -> ComponentStage | None:
        """Return the stage with an offload in parts, not quantised. None if it has that offload or a cheaper one
        already, or cannot use it."""
        kinds, handle = [*Offload], self.handle
        less = kinds.index(self._offload) < kinds.index(offload) and handle.store.in_parts(offload)
        if self.plan.component not in _IN_PARTS or not less:
            return None
        try:
            other = replace(handle, offload=offload)
        except BackendUnavailable:
            return None
        handle.store.handles.discard(other)  # an option of this handle, and no further user
        return replace(self, handle=other, plan=self.plan.unquantised)

    @lazy_property
    def blocks(self) -> tuple[str, ...]:
        return block_names(self.module, self._parts)

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.handle.family.blocks if self.plan.component is Component.DENOISER else ()

    @property
    def _offload(self) -> Offload:
        return self.handle.offload if self.plan.component in _IN_PARTS else Offload.NONE


@dataclass
class Calls:
    """Reports a stage's calls: each before it runs, and the last one's end. So an interrupt, and other threads that
    want to load, wait for at most one call."""

    what: str  # a Message's template for a call's number and the total: "decoding part {} of {}"
    told: CallTold
    total: int = 0  # set before the first call; 0: unknown
    done: int = 0

    def telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            self._tell(self.done + 1)
            PROCESS_GATE.yield_()
            made = call(*args, **kwargs)
            self.done += 1
            if self.done >= self.total:
                self._tell(self.done)
            return made

        return told

    def tell(self, text: str) -> None:
        """Report a slow task within a call."""
        self.told(self.done, self.total, text)

    def _tell(self, at: int) -> None:
        total = max(self.total, at)
        self.told(self.done, total, Message(self.what, at, total))
