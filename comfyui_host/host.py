"""The only file that looks ComfyUI up: version, flags, folders, progress, interrupt, memory. Without ComfyUI: plain
folders and tqdm.

ComfyUI is looked up among the loaded modules, never imported: a process may have it installed and not be a ComfyUI. Its
modules are at the top level in ComfyUI itself, and under `comfy.cmd` in its pip package.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trust.message import for_page, is_whole, joined
from .compat import NotInComfyUI, unless_changed
from .language import translated
from .page_settings import user_directory

if TYPE_CHECKING:
    import torch

    from ..pipelines.insight.diagnosis import Flag
    from ..pipelines.weights.components import ComponentStore
    from ..pipelines.weights.placement import PlainPlacement


class Interrupted(Exception):
    """The run was asked to stop. Inside ComfyUI its own exception is raised instead."""


def _comfy(name: str) -> Any:
    """Return one of ComfyUI's modules; None if this process is not a ComfyUI."""
    return sys.modules.get(name) or sys.modules.get(f"comfy.cmd.{name}")


def _model_management() -> Any:
    return sys.modules.get("comfy.model_management") if _comfy("folder_paths") else None


def in_comfyui() -> bool:
    return _model_management() is not None


# --- version ---------------------------------------------------------------------------------------------------------

TESTED = ("0.0.1", "0.3.64", "0.33.0")  # ComfyUI versions in which this release's tests passed


def version() -> str:
    """Return the version of the running ComfyUI, else of the checkout whose custom_nodes hold the pack, else ""."""
    if not _comfy("folder_paths"):
        return _version_of_checkout(Path(__file__).parents[2])
    return getattr(sys.modules.get("comfyui_version"), "__version__", "") or _installed_version()


@cache
def _installed_version() -> str:
    """Return the version of the package from PyPI."""
    try:
        return metadata.version("comfyui")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def check_absence(name: str, since: tuple[int, ...]) -> None:
    """Raise NotInComfyUI for a missing `name`, if this ComfyUI should have it. since: the first release that has it."""
    if release() >= since:
        raise NotInComfyUI("ComfyUI {} no longer has '{}'. Update this pack.", version(), name)


def release() -> tuple[int, ...]:
    """Return the version as numbers, (0, 33, 0); () if it is unknown."""
    return _numbers(version())


@cache
def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _version_of_checkout(custom_nodes: Path) -> str:
    file = custom_nodes.with_name("comfyui_version.py")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = re.search(r'__version__ = "(.+)"', text) if custom_nodes.name == "custom_nodes" else None
    return found[1] if found else ""


# --- flags -----------------------------------------------------------------------------------------------------------


@unless_changed("reading ComfyUI's start options", ())
def flags() -> tuple[Flag, ...]:
    """Return the flags on memory and precision that this ComfyUI was started with."""
    from .flags import given

    cli = _command_line()
    return given(cli.args, getattr(cli, "parser", None)) if cli else ()  # 0.0.1 keeps no parser


def memory_wish() -> str:
    """Return the offload that ComfyUI's flags ask for: "none", "group" or "sequential"; "" without such a flag."""
    from .flags import wish

    return wish(arguments())


@unless_changed("detecting ComfyUI's memory plans", False)
def plans_memory() -> bool:
    """Return whether Comfy Compiler is on for the compute device (ComfyUI 0.35 and newer, NVIDIA)."""
    enabled = getattr(sys.modules.get("comfy.model_prefetch"), "malloc_graph_enabled", None)
    return bool(enabled and enabled(sys.modules["comfy.model_management"].get_torch_device()))


@unless_changed("following ComfyUI's start options", None)
def arguments() -> Any:
    """Return ComfyUI's parsed command line; None if this process is not a ComfyUI."""
    cli = _command_line()
    return cli.args if cli else None


def _command_line() -> Any:
    return sys.modules["comfy.cli_args"] if _comfy("folder_paths") else None


# --- folders ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainFolders:
    models: tuple[Path, ...] = (Path("models"),)
    input: Path = Path("input")
    output: Path = Path("output")


PROFILES_VARIABLE = "ONEDIFF_GUARD_PROFILES"
COMPILED_VARIABLE = "ONEDIFF_GUARD_COMPILED"
SELFTEST_VARIABLE = "ONEDIFF_GUARD_SELFTEST"
MODEL_KINDS = ("diffusers", "checkpoints", "loras")  # ComfyUI's model folders that are read
_DEFAULT_FOLDERS = PlainFolders()
_KNOWN_SAMPLERS = (("euler",), ("normal",))
_folders: ContextVar[PlainFolders] = ContextVar("onediff_guard_folders", default=_DEFAULT_FOLDERS)
_interrupt: ContextVar[threading.Event | None] = ContextVar("onediff_guard_interrupt", default=None)


@contextmanager
def plain_folders(
    *,
    models: Sequence[Path],
    input: Path,  # noqa: A002
    output: Path,
) -> Generator[Callable[[], None]]:
    """Set the folders for one run in a process without ComfyUI. Yields a function that interrupts it, from any thread.

    models: roots with ComfyUI's subfolders (diffusers, checkpoints, loras); one without a subfolder is searched itself.
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
    """Return the folders of a kind of model in such roots."""
    return tuple(root / kind if (root / kind).is_dir() else root for root in models)


def model_folders() -> dict[str, Path]:
    """Return {name: path} of diffusers-format folders in `models/diffusers` and in every extra path."""
    from ..pipelines.models.folder import list_folders

    return _offered(list_folders(_roots("diffusers")))


@unless_changed("ComfyUI's lists of files", {})
def weight_files(kind: str) -> dict[str, Path]:
    """Return {name: path} of the .safetensors files in `models/<kind>` ("checkpoints", "loras") and extra paths."""
    if folder_paths := _comfy("folder_paths"):
        names = (name for name in folder_paths.get_filename_list(kind) if name.lower().endswith(".safetensors"))
        paths = {name: folder_paths.get_full_path(kind, name) for name in names}
        return _offered({name: Path(path) for name, path in paths.items() if path})
    from ..pipelines.models.folder import files_below

    found: dict[str, Path] = {}
    for root in _roots(kind):
        for path in files_below(root, ".safetensors"):
            if not (path.parent / "config.json").is_file():  # else a component of a diffusers folder
                found.setdefault(path.relative_to(root).as_posix(), path)
    return _offered(found)


def _offered(found: Mapping[str, Path]) -> dict[str, Path]:
    """Drop names with "<", since pages up to ComfyUI 0.3 render a drop-down's entries as HTML, and names with a lone
    surrogate, which no page can send back."""
    return {name: path for name, path in found.items() if "<" not in name and is_whole(name)}


def roots_text(*kinds: str) -> str:
    """Return the folders that are searched for models of these kinds, for messages."""
    return ", ".join(dict.fromkeys(str(root) for kind in kinds for root in _roots(kind))) or "no folder"


@unless_changed("ComfyUI's input folder: it is ./input", _DEFAULT_FOLDERS.input)
def input_directory() -> Path:
    folder_paths = _comfy("folder_paths")
    return Path(folder_paths.get_input_directory()) if folder_paths else _folders.get().input


@unless_changed("ComfyUI's output folder: it is ./output", _DEFAULT_FOLDERS.output)
def output_directory() -> Path:
    folder_paths = _comfy("folder_paths")
    return Path(folder_paths.get_output_directory()) if folder_paths else _folders.get().output


def _kept(variable: str, what: str) -> Path:
    """Where something is kept: in the folder that a variable names, else in ComfyUI's user folder, else in
    ~/.onediff-guard."""
    if named := os.environ.get(variable):
        return Path(named).expanduser()
    if user := user_directory():
        return user / "onediff_guard" / what
    if _comfy("folder_paths"):  # 0.0.1
        return output_directory().parent / "user" / "onediff_guard" / what
    return Path.home() / ".onediff-guard" / what


profiles_directory = partial(_kept, PROFILES_VARIABLE, "profiles")  # of precision overrides
compiled_directory = partial(_kept, COMPILED_VARIABLE, "compiled")
selftest_directory = partial(_kept, SELFTEST_VARIABLE, "selftest")


@unless_changed("ComfyUI's list of samplers", _KNOWN_SAMPLERS)
def samplers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of ComfyUI's samplers and schedulers, as KSampler offers them."""
    comfy = sys.modules.get("comfy.samplers")
    return (tuple(comfy.KSampler.SAMPLERS), tuple(comfy.KSampler.SCHEDULERS)) if comfy else _KNOWN_SAMPLERS


@unless_changed("ComfyUI's model folders", ())
def _roots(kind: str) -> tuple[Path, ...]:
    if folder_paths := _comfy("folder_paths"):
        return tuple(map(Path, folder_paths.get_folder_paths(kind)))
    return laid_out(_folders.get().models, kind)


# --- progress and interrupt -------------------------------------------------------------------------------------------


def interrupt() -> None:
    """Ask the run inside the current `plain_folders` to stop within one step. ComfyUI has its own interrupt."""
    if asked := _interrupt.get():
        asked.set()


@unless_changed("what is shown on the page, and 'Guard every workflow'", None)
def server() -> Any:
    """Return ComfyUI's server; None if this process has none."""
    module = _comfy("folder_paths") and _comfy("server")
    return module.PromptServer.instance if module else None


@unless_changed("a guard's lines in the history", None)
def prompt_id() -> str | None:
    """Return the id of the prompt that ComfyUI executes."""
    return server().last_prompt_id if server() else None


@unless_changed("'Guard every workflow'", {})
def node_classes() -> Mapping[str, Any]:
    """Return the node classes of ComfyUI and of all packs, by name."""
    holder = _comfy("nodes") or (server() and server().nodes)  # the latter in 0.0.1
    return holder.NODE_CLASS_MAPPINGS if holder else {}


@unless_changed("reports on other packs' nodes", (None, ""))
def executing_node() -> tuple[str | None, str]:
    """Return the id and type, as the page knows them, of the node that this thread runs; (None, "") if unknown."""
    context = sys.modules["comfy_execution.utils"].get_executing_context()
    state = sys.modules["comfy_execution.progress"].get_progress_state()
    if context is None or state is None:
        return None, ""
    shown = state.dynprompt.get_display_node_id(context.node_id)
    return shown, state.dynprompt.get_node(shown)["class_type"]


@unless_changed("explaining why a node behind a guard has no input", None)
def blocked(why: str) -> Any:
    """Return an output that stops the nodes that take it, and shows why on them. None if ComfyUI is too old for
    that."""
    return sys.modules["comfy_execution.graph_utils"].ExecutionBlocker(translated(why))


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error means that the user stopped the run."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, Interrupted) or "InterruptProcessingException" in names


@unless_changed("texts on nodes", None)
def say(node_id: str | None, text: str, *, as_it_is: bool = False) -> None:
    """Show text on a node of the page that queued the run, in the page's language: other pages have other nodes by this
    id. It is escaped: the page renders HTML, and folder names and prompts are untrusted. as_it_is: in English."""
    if node_id is not None and (here := server()) and (client := here.client_id) is not None:
        here.send_progress_text(for_page(text if as_it_is else translated(text)), node_id, client)


@unless_changed("a guard's report on the page", None)
def send_report(node_id: str | None, output: dict[str, list[Any]], node_type: str = "") -> None:
    """Send a node's report to the page of the user who queued the run, in the form of the node's output: the node
    itself ended before the report. Without our extension (`web/`) the page ignores it. node_type: of another pack's."""
    here = server()
    if node_id is not None and here and (client := here.client_id) is not None:
        facts = {"node": node_id, "type": node_type, "prompt": prompt_id(), "output": output}
        facts["workflow"] = _workflow_id()
        here.send_sync("onediff_guard.report", facts, client)


SUMMARIES = "onediff_guard_summaries"  # in a prompt's extra_data
MOST_SUMMARIES = 64  # per prompt, the latest


def note_in_history(line: str) -> None:
    """Store a line in ComfyUI's history with the running prompt: in its extra_data, since the history has outputs only
    of nodes that were not cached."""
    for extra in running_extra_data():
        extra[SUMMARIES] = [*extra.get(SUMMARIES, ()), str(line)][-MOST_SUMMARIES:]


def _workflow_id() -> str | None:
    """Return the page's id of the workflow whose prompt runs; None if no page sent the prompt."""
    for extra in running_extra_data():
        pnginfo = extra.get("extra_pnginfo")
        workflow = pnginfo.get("workflow") if isinstance(pnginfo, dict) else None
        return workflow.get("id") if isinstance(workflow, dict) else None
    return None


@unless_changed("a guard's lines in the history, and previews as the page's settings have them", [])
def running_extra_data() -> list[dict[str, Any]]:
    """Return the extra_data of the running prompt, in a list; [] if this process is not a ComfyUI."""
    running = [*server().prompt_queue.currently_running.values()] if server() else []
    items = [getattr(item, "queue_tuple", item) for item in running]  # the former in 0.0.1
    return [item[3] for item in items if item[1] == prompt_id()]


class Progress:
    """A progress bar with a line of text. total: 0 if not known yet. Without ComfyUI it is on standard error: as one
    line at the end if that is no terminal."""

    def __init__(self, total: int, node_id: str | None, unit: str = "it"):
        from ..pipelines.models.on_disk import listening
        from ..pipelines.time_left import Pace

        self._pace = Pace()
        self._picture: Any = None
        self._total = total
        self._node_id = node_id
        self._unit = unit
        self._done, self._text = 0, ""
        self._bar: Any = None
        self._reads = listening(self.tell)

    def __enter__(self) -> Progress:
        self._reads.__enter__()
        if in_comfyui():
            self._bar = _bar(self._total)
        else:
            from tqdm import tqdm

            known = {"total": self._total or None, "unit": self._unit, "unit_scale": self._unit == "B"}
            self._bar = tqdm(**known, file=sys.stderr, disable=None)  # None: off if that is no terminal
        return self

    def update(self, done: int, text: str, total: int = 0, more: str = "", *, paced: bool = True) -> None:
        """Show the progress, and an estimate of the time that is left.

        done: in units of `total`, which may be given later. text: a line. more: another line, on the node only.
        paced: False if the text itself says how long it will take.
        Raises ComfyUI's interrupt exception, or Interrupted.
        """
        self._done, self._total, self._text = done, total or self._total, text
        if in_comfyui():
            picture, self._picture = self._picture, None
            shown = [("JPEG", picture, getattr(arguments(), "preview_size", 512))] if picture else []
            _advance(self._bar, done, max(self._total, 1), *shown)
            left = self._pace.left(done, self._total) if paced else ""
            line = joined(" · ", filter(None, (text, left)))
            say(self._node_id, joined("\n", filter(None, (line, more))))
            _end_if_interrupted()
            return
        self._bar.total = self._total or None
        self._bar.set_postfix_str(text, refresh=done == self._bar.n)
        self._bar.update(done - self._bar.n)
        if (asked := _interrupt.get()) and asked.is_set():
            raise Interrupted(f"interrupted at {text}")

    def show(self, picture: Any) -> None:
        """Show a PIL image on the node, with the next line of text."""
        self._picture = picture

    def tell(self, text: str) -> None:
        """Show another line of text, with the progress as it is. Raises as `update` does."""
        self.update(self._done, text, paced=False)

    def __exit__(self, *_: object) -> None:
        self._reads.__exit__(None, None, None)
        if hasattr(self._bar, "close"):
            self._bar.close()
            if self._bar.disable and self._text:
                sys.stderr.write(f"{self._text}\n")


@unless_changed("progress bars on the page", None)
def _bar(total: int) -> Any:
    return sys.modules["comfy.utils"].ProgressBar(total)


@unless_changed("progress bars on the page", None)
def _advance(bar: Any, *how_far: Any) -> None:
    if bar is not None:
        bar.update_absolute(*how_far)


@unless_changed("interrupts within a node of this pack", None)
def _end_if_interrupted() -> None:
    _model_management().throw_exception_if_processing_interrupted()


# --- memory -----------------------------------------------------------------------------------------------------------


def placement() -> PlainPlacement:
    """Return the placement of components: by ComfyUI's memory manager, or directly on this machine's device."""
    from ..pipelines.weights.placement import PlainPlacement

    return _comfy_placement() or PlainPlacement()


@unless_changed("ComfyUI's memory manager for pipelines", None)
def _comfy_placement() -> PlainPlacement | None:
    management = _model_management()
    if management is None:
        return None
    from .placement import ComfyPlacement

    channels_last = bool(getattr(arguments(), "force_channels_last", False))  # None in 0.0.1 if not given
    return ComfyPlacement(management, memory_wish(), channels_last=channels_last)


@unless_changed("giving memory back where a run failed", None)
def release_cached_memory(device: torch.device) -> None:
    if management := _model_management():
        management.soft_empty_cache()
    elif device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


@unless_changed("keeping weights for a loader that was changed", None)
def linger(store: ComponentStore) -> None:
    """Keep a store after ComfyUI has dropped its handles: ComfyUI drops a node's old output before it reruns the node,
    and with it weights that the rerun shares. Ends when ComfyUI unloads models, for memory or because of `/free`."""
    if management := _model_management():
        from .placement import linger

        linger(store, management)
