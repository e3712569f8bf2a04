"""The loaded components of one model, shared by every handle made from it.

A component is loaded when a stage first needs it, in the plan's dtype, and only once: a request for another dtype drops
the loaded one. The text encoder leaves the device before the denoiser is read, and stays in main memory if there is
room for all components.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Generator, Hashable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...precision.dtypes import DTYPES
from ...precision.loaded_weights import DamagedByCast, make_consistent, mend_narrowed
from ...precision.overrides import PrecisionOverrides, Profile
from ...precision.planned_layers import KnownPeaks
from ...precision.process_state import PROCESS_GATE
from ...precision.quantised import QuantisedLinears
from ..compile.backends import CompileOptions
from ..errors import BadFolder
from ..models.folder import fingerprint
from ..models.lora import Lora, LoraKey, keys, with_loras
from ..models.on_disk import StoredModel, hooked, tell_reading
from .offload import BlockOffload, Offload, OffloadPolicy, brings_parts_to
from .placement import (
    MOVING,
    FailedEstimate,
    PlainPlacement,
    bytes_coming,
    bytes_of,
    bytes_on,
    free_host_copies,
    has_room,
    laid_out,
    lay_out,
    move,
)

logger = logging.getLogger(__name__)

MemoryKey = tuple[str, str, tuple[LoraKey, ...], str, str]  # denoiser, numerics, LoRAs, card, the user's profile
_CompiledKey = tuple[str, tuple[LoraKey, ...], tuple[str, bool], CompileOptions, str, str, Hashable]


@dataclass
class LoadedComponent:
    """A component in memory."""

    dtype: str
    module: torch.nn.Module
    loras: tuple[LoraKey, ...] = ()  # the latest
    adapted: torch.nn.Module | None = None  # a shallow copy of the module, with the LoRAs added
    offloaded: BlockOffload | None = None  # moves its weights to the device in parts
    laid_out: bool = False  # its convolutions were made channels last once

    def forget_parts(self) -> None:
        if self.offloaded:
            self.offloaded.release()
            self.offloaded = None


class ComponentStore:
    """The components of one model by name, and caches that live as long as they do."""

    def __init__(self, model: StoredModel, placement: PlainPlacement):
        self.model = model
        self.placement = placement
        self.components: dict[str, LoadedComponent] = {}  # the loaded ones
        # (text, dtype, guarded, tf32) → [1, tokens, channels]
        self.prompts: dict[tuple[str, str, bool, bool], torch.Tensor] = {}
        # (denoiser, LoRAs, backend and whether 'auto' chose it, options, numerics, half-precision accumulation,
        # unquantised layers or the plan of scaled ones) → shallow copy with compiled blocks
        self.compiled: dict[_CompiledKey, torch.nn.Module] = {}
        self.scales: dict[tuple[str, tuple[LoraKey, ...]], KnownPeaks] = {}  # learned scales, by denoiser and LoRAs
        self.quantised: dict[tuple[str, tuple[LoraKey, ...], str], QuantisedLinears] = {}  # by denoiser, LoRAs and kind
        self.learned: dict[MemoryKey, PrecisionOverrides] = {}  # overrides of a denoiser
        self.profiles: dict[tuple[str, str, tuple[LoraKey, ...], str], Profile] = {}  # without overrides
        self.recalled: set[MemoryKey] = set()  # keys whose overrides came from a profile on disk
        # signature of a call → its activation memory in bytes, and why it needs more than with lean kernels
        self.room: dict[Any, tuple[int, str]] = {}
        self.network_calls: dict[Any, list[Any]] = {}  # signatures of a VAE's calls of its network, by plan and dry run
        self.failed_estimates: dict[str, list[FailedEstimate]] = {}  # by component
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # handles that use the store
        self.emptied = False
        self.notes: dict[str, tuple[str, ...]] = {}  # component → findings and repairs of its loading
        self._unweighted: dict[str, Any] = {}
        self._in_use = threading.RLock()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Hold the store for one stage: another thread's stage may need the same weights in another dtype or place."""
        with PROCESS_GATE.release():
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def drop_unless(self, wanted: Mapping[str, str], user: object) -> None:
        """Drop the components that are not in `wanted`, or in another dtype, if `user` is the store's only handle."""
        if not self._in_use.acquire(blocking=False):
            return
        try:
            for name, dtype in self.loaded().items() if set(self.handles) == {user} else ():
                if wanted.get(name) != dtype:
                    self.drop(name)
        finally:
            self._in_use.release()

    def module(
        self,
        name: str,
        dtype: str,
        offload: Offload = Offload.NONE,
        loras: tuple[Lora, ...] = (),
        *,
        place: bool = True,  # False leaves it where it is
        beside: int = 0,  # bytes to keep free on the device besides its weights
    ) -> torch.nn.Module:
        """Return the component, loaded in `dtype` ("fp16", "bf16", "fp32") if it is not there already, or a shell of it
        with LoRAs added. It is on its device, or in main memory where `offload` brings its weights in parts. Raises
        BadFolder, BadLora."""
        key = keys(loras) if loras else ()
        with MOVING:
            if self.loaded().get(name) == dtype and key in ((), self.components[name].loras):
                return self._placed(name, offload, key, place=place, beside=beside)
        with _loading(), MOVING:
            if self.loaded().get(name) != dtype:  # unless another thread has loaded it
                self.drop(name)
                gc.collect()  # an unused pipeline may still be in a reference cycle
                module = self._load(name, dtype)
                self.components[name] = LoadedComponent(dtype, module)
                try:
                    self._placed(name, offload, place=place, beside=beside)
                    self.notes[name] = tuple(self._checked(name, module, dtype))
                except BaseException:  # else the next run would use an incomplete component
                    self.drop(name)
                    raise
            component = self.components[name]
            if key not in ((), component.loras):
                component.loras, component.adapted = (), None
                self._forget_made(name, with_loras=True)
                component.adapted = with_loras(component.module, loras, self.model.family)
                component.loras = key
            return self._placed(name, offload, key, place=place, beside=beside)

    def _placed(
        self, name: str, offload: Offload, loras: tuple[LoraKey, ...] = (), *, place: bool, beside: int
    ) -> torch.nn.Module:
        """Return a loaded component, or its shallow copy with these LoRAs, after placing it."""
        component = self.components[name]
        module, wanted = component.module, component.adapted if loras else component.module
        assert wanted is not None
        if not place:
            return wanted
        try:
            if self.in_parts(offload):
                self.placement.to_host(name, module)
                return wanted
            component.forget_parts()
            if self.placement.memory():
                self.evict_until_free(name, bytes_of(module) - self._bytes_there(module) + beside)
            self.placement.to_device(name, module, beside)
            if wanted is not module:
                move(wanted, self.placement.device)  # the LoRAs' weights
            self._keep_host_copies(name, wanted)
        except BaseException:  # the module is in main memory, but not the LoRAs' weights
            self.offload_to_cpu(name)
            raise
        return wanted

    def lay_out(self, name: str, *, channels_last: bool) -> None:
        """Make a loaded component's convolution weights channels last, or contiguous."""
        with MOVING:
            component = self.components[name]
            module = component.module
            if (channels_last or component.laid_out) and not laid_out(module, channels_last=channels_last):
                component.laid_out = True
                component.forget_parts()  # their buffers have the old layout
                lay_out(module, channels_last=channels_last)

    def onloading(
        self, name: str, offload: Offload, loras: tuple[Lora, ...] = (), blocks: tuple[str, ...] = ()
    ) -> OffloadPolicy:
        """Return the policy that brings a component's weights, with LoRAs, to the device. blocks: the denoiser's."""
        if not self.in_parts(offload):
            return OffloadPolicy()
        with MOVING:
            component = self.components[name]
            module = component.adapted if keys(loras) and component.adapted else component.module
            known = component.offloaded
            if known is None or known.made_for != (module, offload, blocks):
                known = None  # frees its memory
                component.forget_parts()
                how, once = (offload, self.placement.device), name == "text_encoder"
                known = component.offloaded = BlockOffload(module, *how, blocks=blocks, once=once)
            self.placement.make_room(known.most_bytes)
            return known

    def in_parts(self, offload: Offload) -> bool:
        return offload.in_parts and brings_parts_to(self.placement.device)

    def _keep_host_copies(self, name: str, module: torch.nn.Module) -> None:
        """Free a component's copy in main memory, unless it returns there and unread components have room too."""
        goes = any(not handle.offload.stays for handle in self.handles) or not self._room_for_all()
        goes |= name == "text_encoder" and not self._stays(self.components[name])
        if not goes or not has_room(self._unread()):
            free_host_copies(module)

    def _room_for_all(self) -> bool:
        """Return whether the device has room for the weights of all components but the text encoder at once, and for
        the largest activation memory estimated so far."""
        memory = self.placement.memory()
        missing = {name: files.n_bytes for name, files in self.model.weights.items()}
        for name, component in self.components.items():
            missing[name] = bytes_of(component.module) - self._bytes_there(component.module)
        missing |= {"text_encoder": 0, "its calls": max(self.room.values(), default=(0, ""))[0]}
        return memory is None or memory.free >= sum(missing.values())

    def _forget_made(self, name: str, *, with_loras: bool = False) -> None:
        """Drop a component's compiled blocks, quantised layers and scales. with_loras: only those with LoRAs."""
        kept: Any
        for kept in (self.compiled, self.quantised, self.scales):
            for key in [key for key in kept if key[0] == name and (key[1] or not with_loras)]:
                del kept[key]

    def unweighted(self, name: str) -> Any:
        """Return the tokenizer, the image processor or the scheduler."""
        if name not in self._unweighted:
            with _loading():
                self._unweighted[name] = self.model.unweighted(name)
        return self._unweighted[name]

    def loaded(self) -> dict[str, str]:
        """Return {component: dtype} of the components in memory."""
        return {name: component.dtype for name, component in self.components.items()}

    def bytes_on_device(self) -> int:
        """Return the bytes of weights and buffers on the device: the current ones of whole components, and the peak of
        components that come in parts."""
        with MOVING:
            return sum(
                component.offloaded.most_bytes if component.offloaded else self._bytes_there(component.module)
                for component in self.components.values()
            )

    def reach(self) -> int | None:
        """Return the bytes that the device has for one component and its calls, with everything else moved out; None if
        the device is the CPU."""
        memory = self.placement.memory()
        if memory is None:
            return None
        with MOVING:
            there = sum(self._bytes_there(component.module) for component in self.components.values())
        return memory.free + (there if memory.movable is None else memory.movable)

    def evict_until_free(self, name: str, n_bytes: int) -> None:
        """Evict other components until `n_bytes` are free for one, if there is no memory manager."""
        with MOVING:
            for other, component in self.components.items():
                memory = self.placement.memory()
                if memory is None or memory.movable is not None or memory.free >= n_bytes:
                    return
                if other != name and self._bytes_there(component.module):
                    self.offload_to_cpu(other)
                    self.placement.give_back()

    def _bytes_there(self, module: torch.nn.Module) -> int:
        return bytes_on(self.placement.device, module)

    def offload_to_cpu(self, name: str) -> None:
        """Move a component to main memory, which is not page-locked then, until it is needed again."""
        with MOVING:
            for key in self.quantised:
                if key[0] == name:
                    self.quantised[key].empty()
            if component := self.components.get(name):
                if component.offloaded:
                    component.offloaded.release()
                self.placement.to_host(name, component.module)
                if component.adapted:
                    move(component.adapted, torch.device("cpu"))  # the LoRAs' weights

    def leave_device(self, but: str = "") -> None:
        """Move all components except `but` to main memory, and everything else that a memory manager can move."""
        for name in self.loaded():
            if name != but:
                self.offload_to_cpu(name)
        self.placement.make_room(sys.maxsize)

    def offload_or_unload(self, name: str) -> None:
        """Offload a component to main memory, or drop it if the model's unread components need that memory. It stays on
        the device if the process was started with offload 'none' and the device has room for those."""
        with MOVING:
            component = self.components.get(name)
            if component is None or self._stays(component):
                return
            if has_room(bytes_coming(component.module) + self._unread()):
                self.offload_to_cpu(name)
                component.offloaded = None
                return
            del component  # else this reference keeps it
            self.drop(name)

    def _stays(self, component: LoadedComponent) -> bool:
        memory = self.placement.memory()
        if self.placement.wish != Offload.NONE or memory is None or component.offloaded:
            return False
        return memory.free >= self._unread() and Offload.MODEL not in {handle.offload for handle in self.handles}

    def _unread(self) -> int:
        return sum(files.n_bytes for name, files in self.model.weights.items() if name not in self.components)

    def drop(self, name: str) -> None:
        """Free a component's weights, and everything that was made from them."""
        with MOVING:
            if name not in self.components:
                return
            self.components.pop(name).forget_parts()
            self._forget_made(name)
            gc.collect()  # modules are in reference cycles: else two copies would be in memory for a while
            self.placement.forget(name)

    def empty(self) -> None:
        """Free all weights at once, although modules are still referenced; the store cannot be used afterwards. Does
        nothing while another thread moves weights: waiting for it could deadlock."""
        if not MOVING.acquire(blocking=False):
            return
        try:
            self.emptied = True
            self.prompts.clear()
            self.compiled.clear()
            self.quantised.clear()
            for component in self.components.values():
                component.adapted = None
                component.forget_parts()
                move(component.module, torch.device("meta"))
        finally:
            MOVING.release()

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        logger.info("loading component %s of %s in %s", name, self.model.name, dtype)
        tell_reading(name, self.model.weights[name].n_bytes)
        with torch.inference_mode(False):
            module = self.model.component(name, DTYPES[dtype])
        return hooked(module.eval().requires_grad_(False))

    def _checked(self, name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        narrowed = dtype == "fp16" and not {"F16"}.issuperset(self.model.weights[name].dtypes)
        try:
            with torch.inference_mode(False):
                found = [
                    *(mend_narrowed(module, partial(self.model.stored, name)) if narrowed else ()),
                    *make_consistent(module, DTYPES[dtype], self.placement.device),
                ]
        except DamagedByCast as error:
            raise BadFolder("'{}/{}': {}", self.model.name, name, error) from None
        for line in found:
            logger.warning("%s of %s: %s", name, self.model.name, line)
        return [f"{name}: {line}" for line in found]


@contextmanager
def _loading() -> Generator[None]:
    """Hold the process exclusively inside: libraries change its global state while they build a module. Restores the
    default dtype, which diffusers leaves changed after an error."""
    with PROCESS_GATE.exclusive():
        dtype = torch.get_default_dtype()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


_FINDING = threading.Lock()
_STORES: weakref.WeakValueDictionary[tuple[str, str], ComponentStore] = weakref.WeakValueDictionary()


def shared_store(model: StoredModel, placement: PlainPlacement) -> ComponentStore:
    """Return a model's store: the same one while a handle to it lives and its files do not change."""
    key = (str(model.path.resolve()), fingerprint(model.path))
    with _FINDING:
        store = _STORES.get(key)
        if store is None or store.emptied or store.placement.device != placement.device:
            store = ComponentStore(model, placement)
            _STORES[key] = store
        return store
