"""Runs a test file inside ComfyUI's own process, and has shared helpers: the pack's nodes and their texts.

    python in_comfyui.py CHECKOUT PACK FILE [OPTION …]

Runs with ComfyUI's interpreter. PACK is the pack's folder, imported by path as ComfyUI does. FILE is for pytest. The
options are ComfyUI's. It runs on the CPU, unless an option names a card: `--cuda-device 0`, or `--second-device` of
tests/support. At the end, the second device must have no unordered accesses and no weights.
"""

from __future__ import annotations

import gc
import html
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
import torch

NODE_ID = "7"
SUPPORT = Path(__file__).resolve().parents[2] / "support"
PACK, OURS = "custom_nodes_pack", "comfyui_onediff_guard"
texts: list[str] = []  # texts sent to the guard's node, as a page shows them


class Server:
    """A stand-in for ComfyUI's server: records the texts for a node."""

    client_id = "page"

    @staticmethod
    def send_progress_text(text: str, node_id: str, _client: str) -> None:
        assert node_id == NODE_ID
        texts.append(html.unescape(text))


@pytest.fixture(autouse=True)
def _clean_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start without texts and without profiles."""
    texts.clear()
    monkeypatch.setenv("ONEDIFF_GUARD_PROFILES", str(tmp_path / "profiles"))


def node(
    kind: str,
    wired: Any,
    *,
    on_failure: str = "rerun",
    exact_fp32: bool = False,
    scope: str = "step",
    inserted: bool = False,
    **further: Any,
) -> Any:
    """Return the guarded 'model' or 'vae', and clear the texts. inserted: as by 'Guard every workflow'."""
    node_id = "onediff_guard_1_0" if inserted else NODE_ID
    policy = {"on_failure": on_failure, "exact_fp32": exact_fp32, "scope": scope}
    made = pack_node("NaNGuardNative", **{kind: wired}, **policy, node_id=node_id, **further)
    texts.clear()
    return made[kind == "vae"]


def guarded(patcher: Any, **policy: Any) -> Any:
    """Return the MODEL with NaN Guard (native)."""
    return node("model", patcher, **policy)


def pack_node(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run one of the pack's nodes, and return its outputs."""
    cls = sys.modules[PACK].NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]
    with torch.inference_mode():
        return getattr(cls(), cls.FUNCTION)(*args, **kwargs)


def module(name: str) -> Any:
    """Return one of the pack's modules."""
    return import_module(f"{PACK}.{name}")


F = TypeVar("F", bound=Callable[..., Any])


def as_comfyui_code(function: F) -> F:
    """Mark a function as ComfyUI's own: its state is not restored before a rerun."""
    function.__module__ = "comfy.utils"
    return function


def wrapped(patcher: Any, wrapper: Callable[..., Any], kind: str = "diffusion_model") -> Any:
    """Return a MODEL with one more wrapper, as from another pack. kind: of comfy.patcher_extension.WrappersMP."""
    clone = patcher.clone()
    clone.add_wrapper_with_key(kind, "test", wrapper)
    return clone


def import_ours() -> None:
    """Import the pack by the name that tests/support uses, in addition to ComfyUI's name for it."""
    if OURS not in sys.modules:
        _import(OURS, Path(sys.modules[PACK].__path__[0]))
        sys.path.append(str(SUPPORT))


def _import(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


@contextmanager
def on(card: str) -> Iterator[None]:
    """Make guard and probe treat ComfyUI's device as this card."""
    row = module("precision.arch").ARCHITECTURES[card]
    with patch.object(module("comfyui_host.native_network"), "verified_architecture", lambda *_: row):
        yield


@contextmanager
def counting_loads() -> Iterator[list[str]]:
    """Record which models ComfyUI loads."""
    loads: list[str] = []
    loaded_model = import_module("comfy.model_management").LoadedModel
    original = loaded_model.model_load

    def model_load(loaded: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(type(loaded.model.model).__name__)
        return original(loaded, *args, **kwargs)

    with patch.object(loaded_model, "model_load", model_load):
        yield loads


def error_of(call: Callable[[], Any]) -> str:
    """Return the error that the call raises; "" if it raises none."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test checks which one
        return f"{type(error).__name__}: {error}"
    return ""


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bit-equal; NaN equals NaN."""
    return one.dtype is other.dtype and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


def _leftovers(second_device: Any) -> str:
    """Return what is left on the second device; "" if only a few constants of ComfyUI."""
    management = import_module("comfy.model_management")
    management.unload_all_models()
    if hasattr(management, "reset_cast_buffers"):  # ComfyUI does so after each node
        management.reset_cast_buffers()
    gc.collect()
    hazards, left = second_device.hazards(), second_device.card.used()
    return f"unordered: {hazards}; {left} bytes left on the card" if hazards or left > 4096 else ""


def main(checkout: str, pack: str, file: str, *options: str) -> str | int:
    sys.path.insert(0, checkout)
    second_device = None
    if "--second-device" in options:
        sys.path.append(str(SUPPORT))
        second_device = import_module("second_device")
        second_device.install()
    card = second_device is not None or "--cuda-device" in options
    sys.argv[1:] = [*([] if card else ["--cpu"]), *(option for option in options if option != "--second-device")]
    import_module("comfy.options").enable_args_parsing()
    logging.basicConfig(level=logging.INFO)
    for name in ("folder_paths", "comfy.sample", "comfy.utils"):  # a running ComfyUI has imported them
        import_module(name)
    _import(PACK, Path(pack))
    server: Any = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=Server)
    sys.modules["server"] = server
    isolated = ["-c", os.devnull, "--rootdir", str(Path(file).parent), "--noconftest", "-p", "no:cacheprovider"]
    shown = ["-v", "-rfEs", "--tb", "short", "--disable-warnings", "--show-capture", "no"]
    mode = ["--import-mode", "importlib"]  # otherwise pytest finds the pack's `nodes` before ComfyUI's
    failed = pytest.main([*shown, *isolated, *mode, file], plugins=[sys.modules[__name__]])
    if failed or second_device is None:
        return int(failed)
    return _leftovers(second_device) or 0


if __name__ == "__main__":
    sys.modules["in_comfyui"] = sys.modules["__main__"]
    sys.exit(main(*sys.argv[1:]))
