"""The loaded components of one model, shared by every handle made from it.

A component is loaded when a stage first needs it, in the dtype of the plan, and is there once: asking for it in
another dtype drops the one there was. The text encoder is off the device before the denoiser is read, and stays in main
memory where that has room for all.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...precision.dtypes import DTYPES
from ...precision.loaded_weights import DamagedByCast, make_consistent, mend_narrowed
from ...precision.overrides import PrecisionOverrides
from ...precision.quantised import QuantisedLinears
from ...precision.shared import PROCESS_GATE
from ..compile.backends import CompileOptions
from ..errors import BadFolder
from ..models.folder import fingerprint
from ..models.lora import Lora, LoraKey, keys, with_loras
from ..models.on_disk import StoredModel, hooked, tell_reading
from .block_offload import BlockOffload, in_parts
from .layout import laid_out, lay_out
from .offload import NoOffload, Offload, OffloadPolicy, brings_parts_to
from .oom_fallback import FailedEstimate
from .placement import MOVING, Placement, bytes_coming, bytes_of, bytes_on, has_room, let_go_of_host_copies, move

if TYPE_CHECKING:
    from ..compile.attention import Chosen

logger = logging.getLogger(__name__)

MemoryKey = tuple[str, str, tuple[LoraKey, ...], str]  # denoiser, numerics, LoRAs, a profile that was given
_CompiledKey = tuple[str, tuple[LoraKey, ...], tuple[str, bool], CompileOptions, str, bool, str, tuple[str, ...]]


class _Where(NamedTuple):
    """Where a component is to be."""

    offload: Offload
    place: bool
    beside: int


class ComponentStore:
    """The components of one model by name. `compiled` and `prompts` are memos that live and die with them."""

    def __init__(self, model: StoredModel, placement: Placement):
        self.model = model
        self.placement = placement
        self.prompts: dict[tuple[str, str, bool], torch.Tensor] = {}  # (text, dtype, guarded) → [1, tokens, channels]
        # (denoiser, LoRAs, backend and whether 'auto' chose it, how, numerics, wide stream, half-precision
        # accumulation, layers that are unquantised or accumulate in fp16) → shell
        self.compiled: dict[_CompiledKey, torch.nn.Module] = {}
        self.quantised: dict[tuple[str, tuple[LoraKey, ...], str], QuantisedLinears] = {}  # by denoiser, LoRAs and kind
        self.learned: dict[MemoryKey, PrecisionOverrides] = {}  # what runs taught about a denoiser
        self.recalled: set[MemoryKey] = set()  # of these, a profile on disk was where runs began
        self.attention: dict[tuple[str, tuple[torch.Size, ...]], Chosen] = {}  # by dtype and sizes, measured
        self.lacks: dict[Any, tuple[int, str]] = {}  # of these, bytes that would do with lean kernels, and what lacks
        self.room: dict[Any, int] = {}  # what a call of a component takes beside its weights, by what tells calls apart
        self.decoder_calls: dict[Any, list[Any]] = {}  # signatures of a decode's calls, by what tells decodes apart
        self.failed_estimates: dict[str, list[FailedEstimate]] = {}  # of a component's stages
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # who still uses it
        self.emptied = False
        self.notes: dict[str, tuple[str, ...]] = {}  # component → what was found or mended when it was loaded
        self._modules: dict[str, tuple[str, torch.nn.Module]] = {}
        self._with_loras: dict[str, tuple[tuple[LoraKey, ...], torch.nn.Module]] = {}  # of each component the latest
        # of components that are not on the device whole
        self._onloading: dict[str, tuple[tuple[Offload, tuple[str, ...]], BlockOffload]] = {}
        self._unweighted: dict[str, Any] = {}
        self._laid_out: set[str] = set()  # of which convolutions have lain with their channels last
        self._in_use = threading.RLock()

    @contextmanager
    def turn(self) -> Generator[None]:
        """Hold the store for one stage. Weights are there once, and another thread's stage may want them in another
        dtype or place."""
        with PROCESS_GATE.release():
            self._in_use.acquire()
        try:
            yield
        finally:
            self._in_use.release()

    def drop_unless(self, wanted: Mapping[str, str], user: object) -> None:
        """Let go of components that are not wanted, or not in their wanted dtype, if `user` alone uses the store."""
        if not self._in_use.acquire(blocking=False):
            return
        try:
            for name, dtype in self.loaded().items() if set(self.handles) == {user} else ():
                if wanted.get(name) != dtype:
                    self.drop(name)
        finally:
            self._in_use.release()

    def module(
        self, name: str, dtype: str, offload: Offload = Offload.NONE, *, place: bool = True, beside: int = 0
    ) -> torch.nn.Module:
        """Return the component, loaded in `dtype` ("fp16", "bf16", "fp32") if it is not there already. It is on its
        device, or in main memory where `offload` brings its weights in parts.

        place: False leaves it where it is.
        beside: bytes that are to be free on the device, beside its weights.
        """
        where = _Where(offload, place, beside)
        with MOVING:
            if module := self._here(name, dtype, where):
                return module
        with _loading(), MOVING:
            if module := self._here(name, dtype, where):  # another thread loaded it
                return module
            self.drop(name)
            gc.collect()  # a pipeline that was let go may still wait in a reference cycle
            module = self._load(name, dtype)
            self._modules[name] = (dtype, module)
            try:
                self._place(name, module, where)
                self.notes[name] = tuple(self._checked(name, module, dtype))
            except BaseException:  # the next run would take it for whole
                self.drop(name)
                raise
            return module

    def _here(self, name: str, dtype: str, where: _Where) -> torch.nn.Module | None:
        """Return the component if it is loaded in `dtype`, brought to where it is to be."""
        if self.loaded().get(name) != dtype:
            return None
        module = self._modules[name][1]
        try:
            self._place(name, module, where)
        except BaseException:  # it is in main memory, where what LoRAs added is not
            self.rest(name)
            raise
        return module

    def with_loras(
        self,
        name: str,
        dtype: str,
        loras: tuple[Lora, ...] = (),
        offload: Offload = Offload.NONE,
        *,
        place: bool = True,
        beside: int = 0,
    ) -> torch.nn.Module:
        """Return the component as `module` does, or a shell of it with LoRAs added. Raises BadLora."""
        module = self.module(name, dtype, offload, place=place, beside=beside)
        if not loras or not (key := keys(loras)):
            return module
        known, shell = self._with_loras.get(name, ((), module))
        if known != key:
            with _loading(), MOVING:
                self._forget_loras(name)
                shell = with_loras(module, loras, self.model.family)
                self._with_loras[name] = key, shell
        if place and not self.in_parts(offload):
            try:
                move(shell, self.placement.device)  # what the LoRAs added
                self._keep_host_copies(name, shell)
            except BaseException:
                self.rest(name)
                raise
        return shell

    def lay_out(self, name: str, *, channels_last: bool) -> None:
        """Have the convolutions of a loaded component lie in memory with their channels last, or as they were read."""
        with MOVING:
            module = self._modules[name][1]
            if (channels_last or name in self._laid_out) and not laid_out(module, channels_last=channels_last):
                self._laid_out.add(name)
                self._forget_parts(name)  # which lie together
                lay_out(module, channels_last=channels_last)

    def onloading(
        self, name: str, offload: Offload, loras: tuple[Lora, ...] = (), blocks: tuple[str, ...] = ()
    ) -> OffloadPolicy:
        """Return how the weights of a loaded component, with its LoRAs, come to the device. blocks: of a denoiser."""
        if not self.in_parts(offload):
            return NoOffload()
        with MOVING:
            family, component = self.model.family, self._modules[name][1]
            parts: dict[str, Any] = {"once": name == "text_encoder"}
            if name in family.denoisers:
                parts = {"blocks": blocks}
                component = self._with_loras[name][1] if keys(loras) else component
            known_for, known = self._onloading.get(name, (None, None))
            if known is None or known_for != (offload, blocks) or known.component is not component:
                known = None  # with which its memory goes
                self._forget_parts(name)
                known = in_parts(component, offload, self.placement.device, **parts)
                self._onloading[name] = (offload, blocks), known
            self.placement.make_room(known.most_bytes)
            return known

    def in_parts(self, offload: Offload) -> bool:
        """Return whether weights come to the device in parts."""
        return offload.in_parts and brings_parts_to(self.placement.device)

    def _place(self, name: str, module: torch.nn.Module, where: _Where) -> None:
        if not where.place:
            return
        if self.in_parts(where.offload):
            self.placement.to_host(name, module)
        else:
            self._forget_parts(name)
            if self.placement.memory():
                self.evict_until_free(name, bytes_of(module) - self._bytes_there(module) + where.beside)
            self.placement.to_device(name, module, where.beside)
            self._keep_host_copies(name, module)

    def _keep_host_copies(self, name: str, module: torch.nn.Module) -> None:
        """Keep what main memory has of a component on the device where it goes back there after use, and that has
        room."""
        goes = any(not handle.offload.stays for handle in self.handles) or not self._room_for_all()
        goes |= name == "text_encoder" and not self._stays(name)
        if not goes or not has_room(self._unread()):
            let_go_of_host_copies(module)

    def _room_for_all(self) -> bool:
        """Return whether the device has room for the weights of all components at once, but for the text encoder's,
        and for what any call so far took beside them."""
        memory = self.placement.memory()
        missing = {name: files.n_bytes for name, files in self.model.weights.items()}
        for name, (_, module) in self._modules.items():
            missing[name] = bytes_of(module) - bytes_on(self.placement.device, module)
        missing |= {"text_encoder": 0, "its calls": max(self.room.values(), default=0)}
        return memory is None or memory.free >= sum(missing.values())

    def _forget_parts(self, name: str) -> None:
        if name in self._onloading:
            self._onloading.pop(name)[1].release()

    def _forget_loras(self, name: str) -> None:
        self._with_loras.pop(name, None)
        self._forget_made(name, with_loras=True)

    def _forget_made(self, name: str, *, with_loras: bool = False) -> None:
        """Let go of what was compiled and quantised of a component. with_loras: only where it has LoRAs."""
        kept: Any
        for kept in (self.compiled, self.quantised):
            for key in [key for key in kept if key[0] == name and (key[1] or not with_loras)]:
                del kept[key]

    def unweighted(self, name: str) -> Any:
        """The tokenizer or the scheduler."""
        if name not in self._unweighted:
            with _loading():
                self._unweighted[name] = self.model.unweighted(name)
        return self._unweighted[name]

    def loaded(self) -> dict[str, str]:
        """{component: dtype} of what is in memory."""
        return {name: dtype for name, (dtype, _) in self._modules.items()}

    def bytes_on_device(self) -> int:
        """Return the bytes of weights and buffers on the device: of whole components those that are there now, and of
        those that come in parts the most that is there at once."""
        with MOVING:
            modules = [module for name, (_, module) in self._modules.items() if name not in self._onloading]
            in_parts = sum(weights.most_bytes for _, weights in self._onloading.values())
        return in_parts + sum(map(self._bytes_there, modules))

    def reach(self) -> int | None:
        """Return the bytes that the device has for one component and its calls, if all that can leave does; None where
        that is main memory."""
        memory = self.placement.memory()
        if memory is None:
            return None
        with MOVING:
            there = sum(self._bytes_there(module) for _, module in self._modules.values())
        return memory.free + (there if memory.movable is None else memory.movable)

    def evict_until_free(self, name: str, n_bytes: int) -> None:
        """Where there is no memory manager, move components out until that many bytes are free for another one."""
        with MOVING:
            for other, (_, module) in self._modules.items():
                memory = self.placement.memory()
                if memory is None or memory.movable is not None or memory.free >= n_bytes:
                    return
                if other != name and self._bytes_there(module):
                    self.rest(other)
                    self.placement.give_back()

    def _bytes_there(self, module: torch.nn.Module) -> int:
        return bytes_on(self.placement.device, module)

    def rest(self, name: str) -> None:
        """Move a component to the host's memory until it is needed again. None of that stays page-locked."""
        with MOVING:
            for key in self.quantised:
                if key[0] == name:
                    self.quantised[key].empty()
            if name in self._onloading:
                self._onloading[name][1].release()
            if name in self._modules:
                self.placement.to_host(name, self._modules[name][1])
                if name in self._with_loras:
                    move(self._with_loras[name][1], torch.device("cpu"))  # what the LoRAs added

    def leave_device(self, but: str = "") -> None:
        """Move all components to the host's memory, one excepted, and what else a memory manager can move."""
        for name in self.loaded():
            if name != but:
                self.rest(name)
        self.placement.make_room(sys.maxsize)

    def empty_quantised(self) -> None:
        """Let go of quantised weights, which are there while a run lasts."""
        for layers in self.quantised.values():
            layers.empty()

    def offload_or_unload(self, name: str) -> None:
        """Move a component to main memory until it is needed again, or let go of it, where what else of the model has
        yet to be read needs that room. Where the process was started for models that stay on the device, and that has
        room for all of this one, it stays there."""
        with MOVING:
            if name not in self._modules or self._stays(name):
                return
            if not has_room(bytes_coming(self._modules[name][1]) + self._unread()):
                self.drop(name)
                return
            self.rest(name)
            self._onloading.pop(name, None)

    def _stays(self, name: str) -> bool:
        memory = self.placement.memory()
        if self.placement.wish != Offload.NONE or memory is None or name in self._onloading:
            return False
        return memory.free >= self._unread() and Offload.MODEL not in {handle.offload for handle in self.handles}

    def _unread(self) -> int:
        return sum(files.n_bytes for name, files in self.model.weights.items() if name not in self._modules)

    def drop(self, name: str) -> None:
        """Let go of a component's weights, and of what was compiled from them."""
        with MOVING:
            if self._modules.pop(name, None) is None:
                return
            self._forget_parts(name)
            self._with_loras.pop(name, None)
            self._forget_made(name)
            gc.collect()  # modules hold reference cycles; without this two copies would be there for a while
            self.placement.forget(name)

    def empty(self) -> None:
        """Let go of all weights at once; the store is of no more use, and no module has died. Nothing happens while
        another thread moves weights, which may wait for the one that asks."""
        if not MOVING.acquire(blocking=False):
            return
        try:
            self.emptied = True
            self.prompts.clear()
            self.compiled.clear()
            self.quantised.clear()
            self._with_loras.clear()
            for name in tuple(self._onloading):
                self._forget_parts(name)
            for _, module in self._modules.values():
                move(module, torch.device("meta"))
        finally:
            MOVING.release()

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        logger.info("loading component %s of %s in %s", name, self.model.name, dtype)
        tell_reading(name, self.model.weights[name].n_bytes)
        with torch.inference_mode(False):
            module = self.model.component(name, DTYPES[dtype])
        return hooked(module.eval().requires_grad_(False))

    def _narrows(self, name: str, dtype: str) -> bool:
        return dtype == "fp16" and not {"F16"}.issuperset(self.model.weights[name].dtypes)

    def _checked(self, name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        try:
            with torch.inference_mode(False):
                found = [
                    *(mend_narrowed(module, partial(self.model.stored, name)) if self._narrows(name, dtype) else ()),
                    *make_consistent(module, DTYPES[dtype], self.placement.device),
                ]
        except DamagedByCast as error:
            raise BadFolder("'{}/{}': {}", self.model.name, name, error) from None
        for line in found:
            logger.warning("%s of %s: %s", name, self.model.name, line)
        return [f"{name}: {line}" for line in found]


@contextmanager
def _loading() -> Generator[None]:
    """Libraries change the whole process while they build a module. diffusers leaves its default dtype behind where
    that fails."""
    with PROCESS_GATE.exclusive():
        dtype = torch.get_default_dtype()
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


_FINDING = threading.Lock()
_STORES: weakref.WeakValueDictionary[tuple[str, str], ComponentStore] = weakref.WeakValueDictionary()


def shared_store(model: StoredModel, placement: Placement) -> ComponentStore:
    """The store of a model; the same one for as long as a handle to it lives and its files do not change."""
    key = (str(model.path.resolve()), fingerprint(model.path))
    with _FINDING:
        store = _STORES.get(key)
        if store is None or store.emptied or store.placement.device != placement.device:
            store = ComponentStore(model, placement)
            _STORES[key] = store
        return store
