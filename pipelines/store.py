"""The loaded components of one model folder, shared by every handle made from it.

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

from ..precision.consistency import DamagedByCast, make_consistent
from ..precision.dtypes import DTYPES
from .errors import BadFolder
from .folder import ModelFolder, fingerprint, unknown_fields
from .placement import Placement, move

logger = logging.getLogger(__name__)


class ComponentStore:
    """Components by name; `compiled` and `prompts` are memos that live and die with them."""

    def __init__(self, folder: ModelFolder, placement: Placement):
        self.folder = folder
        self.placement = placement
        self.prompts: dict[tuple[str, str, bool], torch.Tensor] = {}  # (text, dtype, guarded) → [1, tokens, channels]
        # (backend, dtype, fold bits, half-precision accumulation) → shell
        self.compiled: dict[tuple[str, str, int, str], torch.nn.Module] = {}
        self.stream_peak: float | None = None  # of the denoiser, once it was measured
        self.handles: weakref.WeakSet[Any] = weakref.WeakSet()  # who still uses it
        self.emptied = False
        self.notes: dict[str, tuple[str, ...]] = {}  # component → what was found or mended when it was loaded
        self._modules: dict[str, tuple[str, torch.nn.Module]] = {}
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
            self.notes[name] = (*unknown_fields(self.folder, name), *self._checked(name, module, dtype))
            return module

    def unweighted(self, name: str) -> Any:
        """The tokenizer or the scheduler."""
        with self._lock:
            if name not in self._unweighted:
                self._unweighted[name] = self._from_pretrained(name)
            return self._unweighted[name]

    def loaded(self) -> dict[str, str]:
        """{component: dtype} of what is in memory."""
        return {name: dtype for name, (dtype, _) in self._modules.items()}

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
            if name == self.folder.family.denoiser:
                self.compiled.clear()
            gc.collect()  # modules hold reference cycles; without this two copies would be there for a while
            self.placement.forget(name)

    def empty(self) -> None:
        """Let go of all weights at once; the store is of no more use, and no module has died."""
        with self._lock:
            self.emptied = True
            self.prompts.clear()
            self.compiled.clear()
            for _, module in self._modules.values():
                move(module, torch.device("meta"))

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        weights = self.folder.weights[name]
        logger.info("loading component %s of %s in %s", name, self.folder.path.name, dtype)
        gc.collect()  # a pipeline that was let go may still wait in a reference cycle
        self.placement.make_room(weights.bytes_in(dtype))
        library = self.folder.family.components[name].library
        dtype_option = "dtype" if library == "transformers" else "torch_dtype"
        with torch.inference_mode(False):
            module = self._from_pretrained(name, use_safetensors=True, **{dtype_option: DTYPES[dtype]})
        return module.eval().requires_grad_(False)

    def _checked(self, name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        """On the device, where fused norms are what will run."""
        try:
            with torch.inference_mode(False):
                found = make_consistent(module, DTYPES[dtype])
        except DamagedByCast as error:
            self.drop(name)
            raise BadFolder(f"'{self.folder.path.name}/{name}': {error}") from None
        for line in found:
            logger.warning("%s of %s: %s", name, self.folder.path.name, line)
        return [f"{name}: {line}" for line in found]

    def _from_pretrained(self, name: str, **options: Any) -> Any:
        import diffusers
        import transformers

        spec = self.folder.family.components[name]
        library = {"diffusers": diffusers, "transformers": transformers}[spec.library]
        # a folder saved by another transformers may name a class that this one calls otherwise
        loader = getattr(library, self.folder.classes[name], None) or getattr(library, spec.classes[0])
        try:
            return loader.from_pretrained(self.folder.path / name, local_files_only=True, **options)
        except torch.OutOfMemoryError:
            raise
        except ImportError as error:
            raise BadFolder(
                f"'{self.folder.path.name}/{name}' needs a Python package that is not installed: "
                f"{str(error).strip().splitlines()[0]} Install the pack's requirements.txt (sentencepiece and protobuf "
                "are in it) and start again."
            ) from error
        except Exception as error:
            raise BadFolder(
                f"'{self.folder.path.name}/{name}' could not be loaded as {self.folder.classes[name]}: "
                f"{type(error).__name__}: {error}. Download that folder again."
            ) from error


_STORES: weakref.WeakValueDictionary[tuple[str, str], ComponentStore] = weakref.WeakValueDictionary()


def shared_store(folder: ModelFolder, placement: Placement) -> ComponentStore:
    """The store of a folder; the same one for as long as a handle to it lives and its files do not change."""
    key = (str(folder.path.resolve()), fingerprint(folder.path))
    store = _STORES.get(key)
    if store is None or store.emptied or store.placement.device != placement.device:
        store = ComponentStore(folder, placement)
        _STORES[key] = store
    return store
