"""Components and stores under ComfyUI's memory manager, which makes room for them and evicts them for other models.

The manager's module is an argument: only `host` looks it up.
"""

from __future__ import annotations

from typing import Any

import torch

from ..pipelines.weights.components import ComponentStore
from ..pipelines.weights.placement import MOVING, DeviceMemory, PlainPlacement, move_whole
from .compat import unless_changed

_OFF = "ComfyUI's memory manager for pipelines"


class ComfyPlacement(PlainPlacement):
    """Asks ComfyUI's memory manager for room, and lets it evict components if other models need the room."""

    def __init__(self, management: Any, wish: str = "", *, channels_last: bool = False):
        super().__init__(management.get_torch_device())
        self.wish = wish
        self.channels_last = channels_last
        self._management = management
        self._residents: dict[str, Resident] = {}

    @unless_changed(_OFF, None)
    def make_room(self, n_bytes: int) -> None:
        reserve = self._management.minimum_inference_memory()
        if self.device != torch.device("cpu"):
            self._management.free_memory(n_bytes + reserve, self.device)

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        if not self._load(name, module, beside):
            super().to_device(name, module)

    @unless_changed(_OFF, False, kinds=(AttributeError, TypeError))
    def _load(self, name: str, module: torch.nn.Module, beside: int) -> bool:
        resident = self._residents.get(name)
        if resident is None or resident.component is not module:
            resident = self._residents[name] = Resident(module, self.device)
        with torch.inference_mode(False):
            self._management.load_models_gpu([resident], memory_required=beside)
        return True

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        if not self._unload(name):
            super().to_host(name, module)

    def forget(self, name: str) -> None:
        try:
            self._unload(name)
        finally:
            self._residents.pop(name, None)
            self.give_back()

    @unless_changed(_OFF, None)
    def give_back(self) -> None:
        self._management.soft_empty_cache()

    def memory(self) -> DeviceMemory | None:
        return self._memory() or super().memory()

    @unless_changed(_OFF, None)
    def _memory(self) -> DeviceMemory | None:
        if self.device == torch.device("cpu"):
            return None
        management = self._management
        reserved = getattr(management, "extra_reserved_memory", int)()  # 0.0.1 has none
        here = [loaded for loaded in management.current_loaded_models if loaded.device == self.device]
        free = int(management.get_free_memory(self.device) - reserved)
        return DeviceMemory(int(management.get_total_memory(self.device)), max(free, 0), sum(map(_bytes_there, here)))

    @unless_changed(_OFF, False, kinds=(AttributeError, TypeError))
    def _unload(self, name: str) -> bool:
        resident = self._residents.get(name)
        loaded = self._management.current_loaded_models
        found = False
        for index in reversed(range(len(loaded))):
            if resident is not None and loaded[index].model is resident:
                loaded.pop(index).model_unload()
                found = True
        return found


def _bytes_there(loaded: Any) -> int:
    """Return the bytes of one of ComfyUI's loaded models that are on the device."""
    return int(getattr(loaded, "model_loaded_memory", loaded.model_memory)())


class Resident:
    """A component as a model of ComfyUI's memory manager: whole on the device, or whole in main memory.

    It has the methods that `LoadedModel` calls on a ModelPatcher, from ComfyUI's pip package 0.0.1 to today.
    ModelPatcher itself may leave part of the weights in main memory, and only ComfyUI's own layers can run so.
    """

    parent = None

    def __init__(self, component: torch.nn.Module, device: torch.device):
        self.component = component
        self.model = component
        self.load_device = device
        self.offload_device = torch.device("cpu")
        self.current_device = self.offload_device
        self._size = sum(t.nbytes for t in (*component.parameters(), *component.buffers()))

    def _move(self, device: torch.device) -> torch.nn.Module:
        self.current_device = self.offload_device  # also if it raises
        if not any(parameter.is_meta for parameter in self.component.parameters()):
            move_whole(self.component, device)
        self.current_device = device
        return self.component

    def model_size(self) -> int:
        return self._size

    def loaded_size(self) -> int:
        return self._size if self.current_device == self.load_device else 0

    def current_loaded_device(self) -> torch.device:
        return self.current_device

    def model_dtype(self) -> torch.dtype:
        return next((parameter.dtype for parameter in self.component.parameters()), torch.float32)

    def model_patches_to(self, _device_or_dtype: Any) -> None: ...

    def model_patches_models(self) -> list[Any]:
        return []

    def is_clone(self, other: Any) -> bool:
        return other is self

    def clone_has_same_weights(self, other: Any) -> bool:
        return other is self

    def lowvram_patch_counter(self) -> int:
        return 0

    def is_dynamic(self) -> bool:
        return False

    def partially_unload_ram(self, _n_bytes: float, *_: Any, **_more: Any) -> int:
        return 0

    def partially_load(self, device: torch.device, _extra_memory: float = 0, **_: Any) -> int:
        before = self.loaded_size()
        self._move(device)
        return self._size - before

    def partially_unload(self, _device: torch.device, _memory_to_free: float = 0, **_: Any) -> int:
        return 0  # never in part; the manager then calls detach

    def detach(self, unpatch_all: bool = True, **_: Any) -> torch.nn.Module:
        if not unpatch_all:  # the manager is about to load this model
            return self.component
        if _lingering:
            _lingering.unload()
        return self._move(self.offload_device)

    def patch_model(self, device_to: torch.device | None = None, **_: Any) -> torch.nn.Module:
        return self._move(device_to) if device_to else self.component

    def patch_model_lowvram(self, device_to: torch.device, **_: Any) -> torch.nn.Module:
        return self._move(device_to)

    def unpatch_model(self, device_to: torch.device | None = None, **_: Any) -> None:
        if _lingering:
            _lingering.unload()
        if device_to:
            self._move(device_to)


class _Lingering:
    """The store that a node used last, and an empty model in ComfyUI's list, to notice when it unloads models."""

    def __init__(self, store: ComponentStore, management: Any):
        self.store: ComponentStore | None = store
        self._place = Resident(torch.nn.Module(), store.placement.device)
        self._loaded = management.current_loaded_models
        loaded = management.LoadedModel(self._place)
        loaded.model_load()
        self._loaded.append(loaded)

    def end(self) -> None:
        self._loaded[:] = [loaded for loaded in self._loaded if loaded.model is not self._place]

    def unload(self) -> None:
        """Free the weights of an unused store. Its modules stay: none may be destroyed while ComfyUI unloads."""
        if self.store and not self.store.handles:
            self.store.empty()
        else:
            self.store = None  # its handles keep it


_lingering: _Lingering | None = None


def linger(store: ComponentStore, management: Any) -> None:
    """Keep a store until ComfyUI unloads models."""
    global _lingering
    with MOVING:
        if _lingering and _lingering.store is store:
            return
        if _lingering:
            _lingering.end()
        _lingering = _Lingering(store, management)
