"""Weights on the card that are not what the host has: run in ComfyUI's interpreter, judged in test_native_stale.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from native_in_comfyui import error_of, node, said
from native_models import in_fp32, make_model, sample
from native_streamed_cases import KINDS, LINEAR, SD15, with_lora
from simulated_card import CARD, DYNAMIC, HOST, MANAGEMENT, card, on_host

OTHER = "diffusion_model.output_blocks.0.1.transformer_blocks.0.ff.net.2.weight"
Spoil = Callable[[Any], None]  # of a ModelPatcher


def spoiled(patcher: Any, spoil: Spoil, call: int = 3) -> Any:
    """A clone whose weights on the card are made stale before a call of the network, counted from 1."""
    calls: list[int] = []

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            spoil(patcher)
        return executor(*args, **kwargs)

    clone = patcher.clone()
    clone.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "spoil", wrapper)
    return clone


def spoil_patched(patcher: Any) -> None:
    """Those into which a LoRA was patched, of which the host has the originals."""
    assert patcher.backup
    for key in patcher.backup:
        patcher.model.get_parameter(key).data.fill_(torch.nan)


def spoil_pages(patcher: Any) -> None:
    """All that dynamic VRAM holds: the card's pages, and the pinned copies that they are filled from."""
    for pages in patcher.model.dynamic_vbars.values():
        assert pages.loaded_size() > 0
        pages.overwrite()
    for pins in patcher.model.dynamic_pins.values():
        for buffer in (pins["weights"][0], pins["weights-loaded"][0]):
            buffer.overwrite()


@contextmanager
def counting_loads() -> Iterator[list[str]]:
    """Which models ComfyUI loads."""
    loads: list[str] = []
    original = MANAGEMENT.LoadedModel.model_load

    def model_load(loaded: Any, *args: Any, **kwargs: Any) -> Any:
        loads.append(type(loaded.model.model).__name__)
        return original(loaded, *args, **kwargs)

    with patch.object(MANAGEMENT.LoadedModel, "model_load", model_load):
        yield loads


def _run(patcher: Any, layout: Any = SD15, **more: Any) -> dict[str, Any]:
    said.clear()
    with counting_loads() as loads:
        made = sample(node("model", patcher), layout, **more)
    return {"guarded": made, "said": said[-1], "loads": len(loads)}


def _named(name: str, results: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}, {key}": value for key, value in results.items()}


def case_patched() -> dict[str, Any]:
    healthy, hot = with_lora(make_model(SD15)), with_lora(make_model(SD15, hot=True))
    results: dict[str, Any] = {"healthy, expected": sample(healthy, SD15)}
    results["hot, expected"] = sample(node("model", hot), SD15)
    results |= _named("healthy", _run(spoiled(healthy, spoil_patched)))
    results |= _named("hot", _run(spoiled(hot, spoil_patched)))
    return results


def case_single() -> dict[str, Any]:
    """A model that computes in fp32 anyway."""
    single = with_lora(make_model(SD15, torch.float32))
    return {"expected": sample(single, SD15), **_run(spoiled(single, spoil_patched))}


def case_hooks() -> dict[str, Any]:
    """A LoRA of one prompt alone is in the model again, too."""
    hooks = import_module("comfy.hooks")
    down, up = (torch.randn(shape, generator=torch.Generator().manual_seed(8)) for shape in ((4, 256), (64, 4)))
    name = OTHER.removesuffix(".weight")
    file = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
    patcher = with_lora(make_model(SD15))
    patch_of_prompt = hooks.create_hook_lora(lora=file, strength_model=1.0, strength_clip=0.0)
    results: dict[str, Any] = {"without": sample(patcher, SD15)}
    results["expected"] = sample(patcher, SD15, hooks=patch_of_prompt)
    return results | _run(spoiled(patcher, spoil_patched), hooks=patch_of_prompt)


def case_dynamic() -> dict[str, Any]:
    if not DYNAMIC:
        return {"missing": True}
    results: dict[str, Any] = {}
    for name, hot in (("healthy", False), ("hot", True)):
        model = make_model(SD15, hot=hot)
        exact = in_fp32(model, SD15)
        results[f"{name}, expected"] = sample(exact if hot else model, SD15)
        with card(dynamic=True):
            results |= _named(name, _run(spoiled(on_host(model, dynamic=True), spoil_pages)))
    return results


def case_partly_loaded() -> dict[str, Any]:
    """Some layers on the card, others brought to it as they run. Older ComfyUIs load 64 MB and more."""
    model = make_model(SD15).model
    patcher = with_lora(import_module("comfy.model_patcher").ModelPatcher(model, CARD, HOST))
    results: dict[str, Any] = {"of": patcher.model_size(), "loads 64 MB": not DYNAMIC}

    def spoil(patcher: Any) -> None:
        results["before"] = patcher.loaded_size()
        spoil_patched(patcher)

    with card(free=lambda: 0.9 * patcher.model_size() - patcher.loaded_size()):
        results["expected"] = sample(patcher, SD15)
        results |= _run(spoiled(patcher, spoil))
        results["after"] = patcher.loaded_size()
    return results


def case_hopeless() -> dict[str, Any]:
    """What no loading helps, or needs none."""
    broken, stale = make_model(SD15), with_lora(make_model(SD15))
    broken.model.get_parameter(LINEAR)[0, 0] = torch.nan
    nan = torch.full(SD15.latents, torch.nan)
    results: dict[str, Any] = {}
    for name, run in {
        "weight": lambda: sample(node("model", broken), SD15),
        "latents": lambda: sample(node("model", make_model(SD15)), SD15, latents=nan),
        "stop": lambda: sample(node("model", spoiled(stale, spoil_patched), on_failure="stop"), SD15),
    }.items():
        with counting_loads() as loads:
            results[name] = error_of(run)
        results[f"{name}, loads"] = len(loads)
    return results


def case_left_alone() -> dict[str, Any]:
    loaded_anew = sys.modules["custom_nodes_pack.comfyui_host.layers"].loaded_anew
    patcher = make_model(SD15)
    results = [loaded_anew(patcher.model)]
    MANAGEMENT.load_models_gpu([patcher])
    block = patcher.model.diffusion_model.out
    patcher.model.diffusion_model.out = torch.compile(block, backend="eager")
    results.append(loaded_anew(patcher.model))
    patcher.model.diffusion_model.out = block
    results.append(loaded_anew(patcher.model))
    return {"not loaded here, compiled, plain": results}
