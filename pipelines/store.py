"""The loaded components of one model, shared by every handle made from it.

A component is loaded when a stage first needs it, in the dtype of the plan, and is there once: asking for it in
another dtype drops the one there was. So the text encoder is gone before the denoiser is read.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import torch

from ..precision.attention import Choice
from ..precision.consistency import DamagedByCast, make_consistent
from ..precision.dtypes import DTYPES
from ..precision.learned import Learned
from .compile import CompileOptions
from .errors import BadFolder
from .folder import fingerprint
from .lora import Lora, LoraKey, keys, with_loras
from .placement import Placement, move
from .stored import StoredModel

logger = logging.getLogger(__name__)

MemoryKey = tuple[str, tuple[LoraKey, ...], str]  # dtype, LoRAs, a profile that was given


class ComponentStore:
    """Components by name; `compiled` and `prompts` are memos that live and die with them."""

    def __init__(self, model: StoredModel, placement: Placement):
        self.model = model
        self.placement = placement
        self.prompts: dict[tuple[str, str, bool], torch.Tensor] = {}  # (text, dtype, guarded) → [1, tokens, channels]
        # (backend, how, dtype, fold bits, half-precision accumulation, LoRAs) → shell
        self.compiled: dict[tuple[str, CompileOptions, str, int, str, tuple[LoraKey, ...]], torch.nn.Module] = {}
        self.learned: dict[MemoryKey, Learned] = {}  # what runs taught about the denoiser
        self.attention: dict[tuple[str, tuple[torch.Size, ...]], Choice] = {}  # by dtype and sizes, measured
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # who still uses it
        self.emptied = False
        self.notes: dict[str, tuple[str, ...]] = {}  # component → what was found or mended when it was loaded
        self._modules: dict[str, tuple[str, torch.nn.Module]] = {}
        self._with_loras: tuple[tuple[LoraKey, ...], torch.nn.Module] | None = None  # the latest
        self._unweighted: dict[str, Any] = {}
        self._lock = threading.RLock()

    def module(self, name: str, dtype: str) -> torch.nn.Module:
        """The component on its device, loaded in `dtype` ("fp16", "bf16", "fp32") if it is not there already."""
        with self._lock:
            loaded_dtype, module = self._modules.get(name, (None, None))
            if module is not None and loaded_dtype == dtype:
                self.placement.to_device(name, module)
                return module
            self.drop(name)
            module = self._load(name, dtype)
            self._modules[name] = (dtype, module)
            self.placement.to_device(name, module)
            self.notes[name] = (*self.model.unknown_fields(name), *self._checked(name, module, dtype))
            return module

    def denoiser(self, dtype: str, loras: tuple[Lora, ...] = ()) -> torch.nn.Module:
        """The denoiser in `dtype`, or a shell of it with LoRAs added. Raises BadLora."""
        with self._lock:
            module, key = self.module(self.model.family.denoiser, dtype), keys(loras)
            if not key:
                return module
            if self._with_loras is None or self._with_loras[0] != key:
                self._forget_loras()
                self._with_loras = key, with_loras(module, loras, self.model.family)
            return self._with_loras[1]

    def _forget_loras(self) -> None:
        self._with_loras = None
        self.compiled = {compiled: shell for compiled, shell in self.compiled.items() if not compiled[-1]}

    def unweighted(self, name: str) -> Any:
        """The tokenizer or the scheduler."""
        with self._lock:
            if name not in self._unweighted:
                self._unweighted[name] = self.model.unweighted(name)
            return self._unweighted[name]

    def loaded(self) -> dict[str, str]:
        """{component: dtype} of what is in memory."""
        return {name: dtype for name, (dtype, _) in self._modules.items()}

    def bytes_on_device(self) -> int:
        """Of the components' weights and buffers, that are on the device now."""
        with self._lock:
            modules = [module for _, module in self._modules.values()]
            tensors = {t for module in modules for t in (*module.parameters(), *module.buffers())}
        return sum(t.nbytes for t in tensors if t.device == self.placement.device)

    def rest(self, name: str) -> None:
        """Move a component to the host's memory until it is needed again."""
        with self._lock:
            if name in self._modules:
                self.placement.to_host(name, self._modules[name][1])

    def drop(self, name: str) -> None:
        """Let go of a component's weights, and of what was compiled from them."""
        with self._lock:
            if self._modules.pop(name, None) is None:
                return
            if name == self.model.family.denoiser:
                self.compiled.clear()
                self._with_loras = None
            gc.collect()  # modules hold reference cycles; without this two copies would be there for a while
            self.placement.forget(name)

    def empty(self) -> None:
        """Let go of all weights at once; the store is of no more use, and no module has died."""
        with self._lock:
            self.emptied = True
            self.prompts.clear()
            self.compiled.clear()
            self._with_loras = None
            for _, module in self._modules.values():
                move(module, torch.device("meta"))

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        weights = self.model.weights[name]
        logger.info("loading component %s of %s in %s", name, self.model.name, dtype)
        gc.collect()  # a pipeline that was let go may still wait in a reference cycle
        self.placement.make_room(weights.bytes_in(dtype))
        with torch.inference_mode(False):
            module = self.model.component(name, DTYPES[dtype])
        return module.eval().requires_grad_(False)

    def _checked(self, name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        """On the device, where fused norms are what will run."""
        try:
            with torch.inference_mode(False):
                found = make_consistent(module, DTYPES[dtype])
        except DamagedByCast as error:
            self.drop(name)
            raise BadFolder(f"'{self.model.name}/{name}': {error}") from None
        for line in found:
            logger.warning("%s of %s: %s", name, self.model.name, line)
        return [f"{name}: {line}" for line in found]


_STORES: weakref.WeakValueDictionary[tuple[str, str], ComponentStore] = weakref.WeakValueDictionary()


def shared_store(model: StoredModel, placement: Placement) -> ComponentStore:
    """The store of a model; the same one for as long as a handle to it lives and its files do not change."""
    key = (str(model.path.resolve()), fingerprint(model.path))
    store = _STORES.get(key)
    if store is None or store.emptied or store.placement.device != placement.device:
        store = ComponentStore(model, placement)
        _STORES[key] = store
    return store
