"""Moves that fail under ComfyUI's own memory manager."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

_OURS = "comfyui_onediff_guard"


def import_ours() -> None:
    """The pack by the name that tests know it by, beside the one that ComfyUI has it under."""
    folder = sys.modules["custom_nodes_pack"].__path__[0]
    spec = importlib.util.spec_from_file_location(_OURS, f"{folder}/__init__.py", submodule_search_locations=[folder])
    assert spec and spec.loader
    sys.modules[_OURS] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[_OURS])
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))


def watched_moves() -> Any:
    """The moving.Moves to the card that ComfyUI's manager manages."""
    import_ours()
    import moving

    return moving.Moves()


def case_moves() -> dict[str, Any]:
    moves = watched_moves()
    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from small_families import BUILDERS
    from trained_lora import train_lora

    management = sys.modules["comfy.model_management"]
    found: dict[str, Any] = {"placement": type(host.placement()).__name__}
    with tempfile.TemporaryDirectory() as folder:
        model = BUILDERS["2b"](Path(folder) / "2b")
        lora = train_lora(Path(folder), model)
        for before, offload in moving.CASES:

            def begun(before: str = before, offload: str = offload) -> Any:
                management.unload_all_models()
                handle = moving.opened(model, offload, host.placement())
                moving.BEFORE[before](handle, lora)
                return moving.add_lora(handle, lora) if before == "a LoRA" else handle

            case = f"{before}, {offload}"
            found[case] = moving.what_is_wrong(moves, begun)
            counted = sum(loaded.model_loaded_memory() for loaded in management.current_loaded_models)
            there = sum(moving.there(loaded.model.component) for loaded in management.current_loaded_models)
            found[f"{case}: counted and there"] = [counted, there]
    return found
