"""The one file that knows ComfyUI: folders, progress, interrupt, memory. Elsewhere: plain folders and tqdm.

ComfyUI is looked up among the loaded modules, never imported: a process that happens to have it installed is not
one that it runs in. Its modules stand at the top level in ComfyUI itself and under `comfy.cmd` in its pip package.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trust.text import for_page

if TYPE_CHECKING:
    import torch

    from ..pipelines.placement import Placement
    from ..pipelines.store import ComponentStore

logger = logging.getLogger(__name__)


class Interrupted(Exception):
    """The run was asked to stop. Inside ComfyUI its own exception is raised instead."""


def _comfy(name: str) -> Any:
    """One of ComfyUI's modules, or None where this process is not a ComfyUI."""
    return sys.modules.get(name) or sys.modules.get(f"comfy.cmd.{name}")


def _model_management() -> Any:
    return sys.modules.get("comfy.model_management") if _comfy("folder_paths") else None


# --- folders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainFolders:
    models: tuple[Path, ...] = (Path("models"),)
    input: Path = Path("input")
    output: Path = Path("output")


PROFILES_VARIABLE = "ONEDIFF_GUARD_PROFILES"
COMPILED_VARIABLE = "ONEDIFF_GUARD_COMPILED"
MODEL_KINDS = ("diffusers", "checkpoints", "loras")  # folders of ComfyUI's that are read
_DEFAULT_FOLDERS = PlainFolders()
_folders: ContextVar[PlainFolders] = ContextVar("onediff_guard_folders", default=_DEFAULT_FOLDERS)
_interrupt: ContextVar[threading.Event] = ContextVar("onediff_guard_interrupt", default=threading.Event())  # noqa: B039


@contextmanager
def plain_folders(
    *,
    models: Sequence[Path],
    input: Path,  # noqa: A002
    output: Path,
) -> Generator[Callable[[], None]]:
    """Name the folders for one run in a process without ComfyUI. Yields what interrupts that run, from any thread.

    models: each laid out as ComfyUI's (diffusers, checkpoints, loras), or searched as it is where none is there.
    """
    token = _folders.set(PlainFolders(tuple(models), input, output))
    asked = threading.Event()
    earlier = _interrupt.set(asked)
    try:
        yield asked.set
    finally:
        _interrupt.reset(earlier)
        _folders.reset(token)


def laid_out(models: Sequence[Path], kind: str) -> tuple[Path, ...]:
    """Where models of a kind lie in such roots."""
    return tuple(root / kind if (root / kind).is_dir() else root for root in models)


def model_folders() -> dict[str, Path]:
    """{name: path} of diffusers-format folders in `models/diffusers` and in every extra path."""
    from ..pipelines.folder import list_folders

    return _offered(list_folders(_roots("diffusers")))


def weight_files(kind: str) -> dict[str, Path]:
    """{name: path} of the .safetensors files in `models/<kind>` ("checkpoints", "loras") and in every extra path."""
    if folder_paths := _comfy("folder_paths"):
        names = (name for name in folder_paths.get_filename_list(kind) if name.lower().endswith(".safetensors"))
        paths = {name: folder_paths.get_full_path(kind, name) for name in names}
        return _offered({name: Path(path) for name, path in paths.items() if path})
    found: dict[str, Path] = {}
    for root in _roots(kind):
        for path in sorted(root.rglob("*.safetensors")):
            if not (path.parent / "config.json").is_file():  # else a component of a folder
                found.setdefault(path.relative_to(root).as_posix(), path)
    return _offered(found)


def _offered(found: Mapping[str, Path]) -> dict[str, Path]:
    """Without names that would be markup: pages up to ComfyUI 0.3 take those in a drop-down's list for HTML."""
    return {name: path for name, path in found.items() if "<" not in name}


def roots_text(*kinds: str) -> str:
    """Where models of these kinds are looked for, for messages."""
    return ", ".join(dict.fromkeys(str(root) for kind in kinds for root in _roots(kind))) or "no folder"


def input_directory() -> Path:
    folder_paths = _comfy("folder_paths")
    return Path(folder_paths.get_input_directory()) if folder_paths else _folders.get().input


def output_directory() -> Path:
    folder_paths = _comfy("folder_paths")
    return Path(folder_paths.get_output_directory()) if folder_paths else _folders.get().output


def profiles_directory() -> Path:
    """Where what runs taught is kept: ONEDIFF_GUARD_PROFILES, else ComfyUI's user folder, else ~/.onediff-guard."""
    return _kept(PROFILES_VARIABLE, "profiles")


def compiled_directory() -> Path:
    """Where compiled code is kept: ONEDIFF_GUARD_COMPILED, else ComfyUI's user folder, else ~/.onediff-guard."""
    return _kept(COMPILED_VARIABLE, "compiled")


def _kept(variable: str, what: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named).expanduser()
    if folder_paths := _comfy("folder_paths"):
        user = getattr(folder_paths, "get_user_directory", None)  # 0.0.1 has none
        root = Path(user()) if user else Path(folder_paths.get_output_directory()).parent / "user"
        return root / "onediff_guard" / what
    return Path.home() / ".onediff-guard" / what


def samplers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of ComfyUI's samplers, and of its schedulers: what KSampler offers."""
    known = getattr(sys.modules.get("comfy.samplers"), "KSampler", None)
    return (tuple(known.SAMPLERS), tuple(known.SCHEDULERS)) if known else (("euler",), ("normal",))


def _roots(kind: str) -> tuple[Path, ...]:
    if folder_paths := _comfy("folder_paths"):
        return tuple(map(Path, folder_paths.get_folder_paths(kind)))
    return laid_out(_folders.get().models, kind)


# --- progress and interrupt -------------------------------------------------------------------------------------------


def interrupt() -> None:
    """Ask this thread's run to stop within one step (for processes without ComfyUI, which has its own way)."""
    _interrupt.get().set()


def say(node_id: str | None, text: str) -> None:
    """Show text on a node, where the host can. The page takes it for HTML, and model folders and prompts are other
    people's."""
    instance = getattr(getattr(_comfy("server"), "PromptServer", None), "instance", None)
    send = getattr(instance, "send_progress_text", None)
    if node_id is not None and send:
        send(for_page(text), node_id)


class Progress:
    """A progress bar with a line of text; raises when the run was asked to stop. total: 0 where not known yet.
    Without ComfyUI it is on standard error: where that is no terminal, as one line at the end."""

    def __init__(self, total: int, node_id: str | None, unit: str = "it"):
        self._total = total
        self._node_id = node_id
        self._unit = unit
        self._done, self._text = 0, ""
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if utils := _model_management() and sys.modules.get("comfy.utils"):
            self._bar = utils.ProgressBar(self._total)
        else:
            from tqdm import tqdm

            known = {"total": self._total or None, "unit": self._unit, "unit_scale": self._unit == "B"}
            self._bar = tqdm(**known, file=sys.stderr, disable=None)  # None: where that is no terminal
        return self

    def update(self, done: int, text: str, total: int = 0) -> None:
        """done: of the total, which may be given later. Raises ComfyUI's interrupt exception, or Interrupted."""
        self._done, self._total, self._text = done, total or self._total, text
        if management := _model_management():
            self._bar.update_absolute(done, max(self._total, 1))
            say(self._node_id, text)
            management.throw_exception_if_processing_interrupted()
            return
        self._bar.total = self._total or None
        self._bar.set_postfix_str(text, refresh=done == self._bar.n)
        self._bar.update(done - self._bar.n)
        if _interrupt.get().is_set():
            raise Interrupted(f"interrupted at {text}")

    def tell(self, text: str) -> None:
        """Another line of text, while as much is done as before. Raises as `update` does."""
        self.update(self._done, text)

    def __exit__(self, *_: object) -> None:
        if hasattr(self._bar, "close"):
            self._bar.close()
            if self._bar.disable and self._text:
                sys.stderr.write(f"{self._text}\n")


# --- memory -----------------------------------------------------------------------------------------------------------


def placement() -> Placement:
    """Where components live: under ComfyUI's memory manager, or simply on this machine's device."""
    management = _model_management()
    if management is None:
        from ..pipelines.placement import PlainPlacement

        return PlainPlacement()
    return ComfyPlacement(management)


def release_cached_memory(device: torch.device) -> None:
    if management := _model_management():
        management.soft_empty_cache()
    elif device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


class _Lingering:
    """The store that a node used last, and a place among ComfyUI's loaded models, to learn by when it unloads them."""

    def __init__(self, store: ComponentStore, management: Any):
        import torch

        self.store: ComponentStore | None = store
        self._place = Resident(torch.nn.Module(), store.placement.device)
        self._loaded = management.current_loaded_models
        loaded = management.LoadedModel(self._place)
        loaded.model_load()
        self._loaded.append(loaded)

    def end(self) -> None:
        self._loaded[:] = [loaded for loaded in self._loaded if loaded.model is not self._place]

    def unload(self) -> None:
        """Called amid ComfyUI's unloading, where none of its models may die: weights go, modules stay."""
        if self.store and not self.store.handles:
            self.store.empty()
        else:
            self.store = None  # its handles keep it


_lingering: _Lingering | None = None


def linger(store: ComponentStore) -> None:
    """Keep a store although ComfyUI lets go of its handles: it drops a node's old output before it runs the node anew,
    and with it what the new precision would share. Ends when ComfyUI unloads models, for room or because of `/free`."""
    global _lingering
    management = _model_management()
    if management is None:
        return
    from ..pipelines.placement import MOVING

    with MOVING:
        if _lingering and _lingering.store is store:
            return
        if _lingering:
            _lingering.end()
        _lingering = _Lingering(store, management)


class ComfyPlacement:
    """Asks ComfyUI's memory manager for room, and lets it move components away when others need theirs."""

    def __init__(self, management: Any):
        self.device: torch.device = management.get_torch_device()
        self._management = management
        self._residents: dict[str, Resident] = {}

    def make_room(self, n_bytes: int) -> None:
        reserve = self._management.minimum_inference_memory()
        if self.device.type != "cpu":
            self._management.free_memory(n_bytes + reserve, self.device)

    def to_device(self, name: str, module: torch.nn.Module) -> None:
        import torch

        resident = self._residents.get(name)
        if resident is None or resident.component is not module:
            resident = self._residents[name] = Resident(module, self.device)
        with torch.inference_mode(False):
            self._management.load_models_gpu([resident])

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        del module
        self._unload(name)

    def forget(self, name: str) -> None:
        try:
            self._unload(name)
        finally:
            self._residents.pop(name, None)
            self._management.soft_empty_cache()

    def _unload(self, name: str) -> None:
        resident = self._residents.get(name)
        loaded = self._management.current_loaded_models
        for index in reversed(range(len(loaded))):
            if resident is not None and loaded[index].model is resident:
                loaded.pop(index).model_unload()


class Resident:
    """A component as ComfyUI's memory manager wants to see a model: whole on the device, or whole in main memory.

    It has what `LoadedModel` calls on a ModelPatcher, from ComfyUI's pip package 0.0.1 to today. ModelPatcher itself
    will not do: it may leave part of the weights behind, which only ComfyUI's own layers can run with.
    """

    parent = None

    def __init__(self, component: torch.nn.Module, device: torch.device):
        import torch

        self.component = component
        self.model = component
        self.load_device = device
        self.offload_device = torch.device("cpu")
        self.current_device = self.offload_device
        self._size = sum(t.nbytes for t in (*component.parameters(), *component.buffers()))

    def _move(self, device: torch.device) -> torch.nn.Module:
        from ..pipelines.placement import move_whole

        self.current_device = self.offload_device  # also where it raises
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
        import torch

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

    def partially_unload_ram(self, _n_bytes: float) -> int:
        return 0

    def partially_load(self, device: torch.device, _extra_memory: float = 0, **_: Any) -> int:
        before = self.loaded_size()
        self._move(device)
        return self._size - before

    def partially_unload(self, _device: torch.device, _memory_to_free: float = 0, **_: Any) -> int:
        return 0  # never in part; the manager then calls detach

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if not unpatch_all:  # the manager is about to load this very one
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
