"""Runs tests inside ComfyUI's own process, and has what they share: the pack's nodes and what these say.

    python in_comfyui.py CHECKOUT PACK FILE [OPTION …]

Run by ComfyUI's interpreter. PACK is the pack's folder, imported by its path as ComfyUI does. FILE is for pytest. The
options are ComfyUI's: on the CPU, unless one names a card: `--cuda-device 0`, or `--second-device`, the one of
tests/support, on which in the end nothing may be unordered, and no weights may be left.
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
said: list[str] = []  # progress texts that were sent to the guard's node, as a page shows them


class Server:
    """A stand-in for ComfyUI's: what the pack shows on a node."""

    @staticmethod
    def send_progress_text(text: str, node_id: str) -> None:
        assert node_id == NODE_ID
        said.append(html.unescape(text))


@pytest.fixture(autouse=True)
def _from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said, and nothing learned."""
    said.clear()
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
    """The guarded 'model' or 'vae'. Nothing has been said since. inserted: as by 'Guard every workflow'."""
    node_id = "onediff_guard_1_0" if inserted else NODE_ID
    policy = {"on_failure": on_failure, "exact_fp32": exact_fp32, "scope": scope}
    made = pack_node("NaNGuardNative", **{kind: wired}, **policy, node_id=node_id, **further)
    said.clear()
    return made[kind == "vae"]


def guarded(patcher: Any, **policy: Any) -> Any:
    """A MODEL behind NaN Guard (native)."""
    return node("model", patcher, **policy)


def pack_node(name: str, *args: Any, **kwargs: Any) -> Any:
    """What one of the pack's nodes returns."""
    cls = sys.modules[PACK].NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]
    with torch.inference_mode():
        return getattr(cls(), cls.FUNCTION)(*args, **kwargs)


def module(name: str) -> Any:
    """One of the pack's modules."""
    return import_module(f"{PACK}.{name}")


F = TypeVar("F", bound=Callable[..., Any])


def witness(function: F) -> F:
    """A function that is taken for ComfyUI's own: what it keeps is not put back where a call is made again."""
    function.__module__ = "comfy.utils"
    return function


def wrapped(patcher: Any, wrapper: Callable[..., Any], kind: str = "diffusion_model") -> Any:
    """A MODEL with one wrapper more, as another pack puts it in. kind: of comfy.patcher_extension.WrappersMP."""
    clone = patcher.clone()
    clone.add_wrapper_with_key(kind, "test", wrapper)
    return clone


def import_ours() -> None:
    """The pack by the name that tests/support knows it by, beside the one that ComfyUI has it under."""
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
    """As if ComfyUI computed on it, where the guard and the probe ask."""
    row = module("precision.arch").ARCHITECTURES[card]
    with patch.object(module("comfyui_host.networks"), "verified_architecture", lambda *_: row):
        yield


@contextmanager
def counting_loads() -> Iterator[list[str]]:
    """Which models ComfyUI loads."""
    loads: list[str] = []
    loaded_model = import_module("comfy.model_management").LoadedModel
    original = loaded_model.model_load

    def model_load(loaded: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(type(loaded.model.model).__name__)
        return original(loaded, *args, **kwargs)

    with patch.object(loaded_model, "model_load", model_load):
        yield loads


def error_of(call: Callable[[], Any]) -> str:
    """What it raises, "" where it does not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which it has to be
        return f"{type(error).__name__}: {error}"
    return ""


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest, as a share of the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit; one NaN is as another."""
    return one.dtype is other.dtype and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


def _what_is_left(second_device: Any) -> str:
    """On the second device; "" where that is nothing but a constant or two that ComfyUI keeps."""
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
    for name in ("folder_paths", "comfy.sample", "comfy.utils"):  # ComfyUI itself has them loaded
        import_module(name)
    _import(PACK, Path(pack))
    server: Any = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(instance=Server)
    sys.modules["server"] = server
    apart = ["-c", os.devnull, "--rootdir", str(Path(file).parent), "--noconftest", "-p", "no:cacheprovider"]
    shown = ["-v", "-rfEs", "--tb", "short", "--disable-warnings", "--show-capture", "no"]
    mode = ["--import-mode", "importlib"]  # else pytest finds the pack's `nodes` before ComfyUI's
    failed = pytest.main([*shown, *apart, *mode, file], plugins=[sys.modules[__name__]])
    if failed or second_device is None:
        return int(failed)
    return _what_is_left(second_device) or 0


if __name__ == "__main__":
    sys.modules["in_comfyui"] = sys.modules["__main__"]
    sys.exit(main(*sys.argv[1:]))
