"""ComfyUI's own models under the pack's guard. Run by ComfyUI's interpreter.

    python native_in_comfyui.py CHECKOUT PACK RESULTS MODULE [OPTION …]

PACK is the pack's folder, imported by its path as ComfyUI does. Every function of MODULE named `case_…` runs, and
gives tensors and facts; RESULTS is a folder for them: `tensors.safetensors` and `facts.json`, by "case/name". On the
CPU, unless an option names a card: `--cuda-device 0`, or `--second-device`, the one of tests/support, which adds to the
facts what nothing orders on it, and how much is left there.
"""

from __future__ import annotations

import gc
import html
import importlib.util
import json
import logging
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

NODE_ID = "7"
SECOND_DEVICE, OPTION = "second_device", "--second-device"
said: list[str] = []  # progress texts that were sent to the guard's node, as a page shows them
_pack: Any = None


class Instance:
    """A stand-in for ComfyUI's server: what the pack shows on a node."""

    @staticmethod
    def send_progress_text(text: str, node_id: str) -> None:
        assert node_id == NODE_ID
        said.append(html.unescape(text))


def import_pack(folder: Path) -> None:
    global _pack
    spec = importlib.util.spec_from_file_location(
        "custom_nodes_pack", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    _pack = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(_pack)


def node(
    kind: str,
    wired: Any,
    *,
    on_failure: str = "rerun",
    strict: bool = False,
    scope: str = "step",
    inserted: bool = False,
    **further: Any,
) -> Any:
    """The guarded 'model' or 'vae'. inserted: as by 'Guard every workflow'."""
    node_id = "onediff_guard_1_0" if inserted else NODE_ID
    policy = {"on_failure": on_failure, "strict": strict, "scope": scope}
    made = pack_node("NaNGuardNative", **{kind: wired}, **policy, node_id=node_id, **further)
    return made[kind == "vae"]


def pack_node(name: str, *args: Any, **kwargs: Any) -> Any:
    """What one of the pack's nodes returns."""
    cls = _pack.NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]
    with torch.inference_mode():
        return getattr(cls(), cls.FUNCTION)(*args, **kwargs)


def pack_classes() -> dict[str, Any]:
    """The pack's nodes, by the names that graphs have them by."""
    return _pack.NODE_CLASS_MAPPINGS


@contextmanager
def on(card: str) -> Iterator[None]:
    """As if ComfyUI computed on it, where the guard and the probe ask."""
    row = import_module(f"{_pack.__name__}.precision.arch").ARCHITECTURES[card]
    networks = import_module(f"{_pack.__name__}.comfyui_host.networks")
    with patch.object(networks, "verified_architecture", lambda *_: row):
        yield


def error_of(call: Callable[[], Any]) -> str:
    """What it raises, "" where it does not."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test says which it has to be
        return f"{type(error).__name__}: {error}"
    return ""


def _left_on_the_card() -> dict[str, Any]:
    second_device = import_module(SECOND_DEVICE)
    management = import_module("comfy.model_management")
    management.unload_all_models()
    if hasattr(management, "reset_cast_buffers"):  # ComfyUI does so after each node
        management.reset_cast_buffers()
    gc.collect()
    return {"card/hazards": second_device.hazards(), "card/left": second_device.card.used()}


def main(pack: Path, results: Path, module: str) -> None:
    for name in ("folder_paths", "comfy.sample", "comfy.utils"):  # ComfyUI itself has them loaded
        import_module(name)
    import_pack(pack)
    sys.modules["server"] = types.ModuleType("server")
    sys.modules["server"].PromptServer = types.SimpleNamespace(instance=Instance)  # pyright: ignore[reportAttributeAccessIssue]
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {}
    for name, case in vars(import_module(module)).items():
        if name.startswith("case_"):
            said.clear()
            os.environ["ONEDIFF_GUARD_PROFILES"] = str(results / "profiles" / name)
            for key, value in case().items():
                kept = tensors if isinstance(value, torch.Tensor) else facts
                kept[f"{name.removeprefix('case_')}/{key}"] = value
    if torch.cuda.is_available() and SECOND_DEVICE in sys.modules:
        facts |= _left_on_the_card()
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    import_module("safetensors.torch").save_file(tensors, results / "tensors.safetensors")
    (results / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    folders = [Path(name) for name in sys.argv[2:4]]
    cases, options = sys.argv[4], sys.argv[5:]
    if OPTION in options:
        options.remove(OPTION)
        sys.path.append(str(Path(__file__).parents[1] / "support"))
        import_module(SECOND_DEVICE).install()
    elif "--cuda-device" not in options:
        options.insert(0, "--cpu")
    sys.argv[1:] = options
    import_module("comfy.options").enable_args_parsing()
    logging.basicConfig(level=logging.INFO)
    sys.modules["native_in_comfyui"] = sys.modules["__main__"]
    main(folders[0], folders[1], cases)
