"""Every family beside what people put next to the guard: run in ComfyUI's interpreter, judged in
test_native_families.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from native_family_cases import Figures, case_about, healthy, overflowing, tried, with_its_twin
from native_models import LAYOUTS, Layout, in_fp32, make_model

ARGS = import_module("comfy.cli_args").args
MANAGEMENT = import_module("comfy.model_management")
CACHED_STEPS = 6
__all__ = ["case_about", "case_families"]
COMPILED = ("sd15", "flux", "qwen_image", "wan")  # the others would take minutes
Made = tuple[Any, Any]  # a model, and what its guarded runs have to come to


def case_families() -> Figures:
    """By "family, state" and "family, state, overflowing"."""
    found: Figures = {}
    for name, layout in LAYOUTS.items():
        for suffix, measure in {"": healthy, ", overflowing": overflowing}.items():

            def figures(make: Callable[..., Made], measure: Any = measure, hot: bool = bool(suffix)) -> Figures:
                return tried(measure, layout, partial(make, layout, hot=hot))  # noqa: B023 - called at once

            found[f"{name}, LoRA{suffix}"] = figures(with_lora)
            with lowvram():
                found[f"{name}, lowvram and LoRA{suffix}"] = figures(with_lora_as_it_goes)
            found[f"{name}, EasyCache{suffix}"] = figures(with_easycache, partial(measure, steps=CACHED_STEPS))
            if name in COMPILED:
                found[f"{name}, torch.compile{suffix}"] = figures(compiled)
                torch.compiler.reset()
            if hasattr(ARGS, "fp16_intermediates"):
                with fp16_intermediates():
                    found[f"{name}, fp16 intermediates{suffix}"] = figures(with_its_twin)
    return found


def with_lora(layout: Layout, *, hot: bool) -> Made:
    """The twin has the weights that ComfyUI makes of both, which it rounds to fp16."""
    patcher = lora_on(make_model(layout, hot=hot))
    MANAGEMENT.load_models_gpu([patcher])
    return patcher, in_fp32(patcher, layout)


def with_lora_as_it_goes(layout: Layout, *, hot: bool) -> Made:
    """Weights and LoRA are brought together at each layer: not rounded, where that is fp32."""
    patcher, twin = with_its_twin(layout, hot=hot)
    return lora_on(patcher), lora_on(twin)


def lora_on(patcher: Any) -> Any:
    """As the node for models alone loads one, of every layer that has a matrix."""
    generator = torch.Generator().manual_seed(8)
    lora: dict[str, torch.Tensor] = {}
    for name, weight in patcher.model.state_dict().items():
        if name.endswith(".weight") and weight.ndim == 2:
            layer, (rows, columns) = name.removesuffix(".weight"), weight.shape
            lora[f"{layer}.lora_up.weight"] = 0.3 * torch.randn((rows, 2), generator=generator)
            lora[f"{layer}.lora_down.weight"] = torch.randn((2, columns), generator=generator) * columns**-0.5
    return import_module("comfy.sd").load_lora_for_models(patcher, None, lora, 1.0, 0.0)[0]


@contextmanager
def fp16_intermediates() -> Iterator[None]:
    """As by --fp16-intermediates: what nodes hand on is fp16."""
    ARGS.fp16_intermediates = True
    try:
        yield
    finally:
        ARGS.fp16_intermediates = False


@contextmanager
def lowvram() -> Iterator[None]:
    """Models are loaded as on a card without memory for them: each layer casts its weights when it is called."""
    loaded = MANAGEMENT.LoadedModel
    original = loaded.model_load
    loaded.model_load = lambda model, _memory=0, **more: original(model, 0.1, **more)
    try:
        yield
    finally:
        loaded.model_load = original


def compiled(layout: Layout, *, hot: bool) -> Made:
    """By ComfyUI's own torch.compile, the block that overflows; a UNet's last part, since it calls no block as a whole.
    The backend compiles nothing, so that it is quick and exact."""
    patcher, twin = with_its_twin(layout, hot=hot)
    compile_model: Callable[..., None] = import_module("comfy_api.torch_helpers").set_torch_compile_wrapper
    patcher = patcher.clone()
    part = "out" if layout.block.startswith("input_blocks") else layout.block
    compile_model(patcher, backend="eager", keys=[f"diffusion_model.{part}"])
    return patcher, twin


def with_easycache(layout: Layout, *, hot: bool) -> Made:
    """In place of the model it adds to what the model is given: see native_neighbour_cases.py on the copy."""
    patcher, twin = with_its_twin(layout, hot=hot)
    kinds = import_module("comfy.patcher_extension").WrappersMP

    def copied(run: Any, x: Any, *more: Any, **named: Any) -> Any:
        return run([stream.clone() for stream in x] if isinstance(x, list) else x.clone(), *more, **named)

    twin.add_wrapper_with_key(kinds.DIFFUSION_MODEL, "copy", copied)
    node = import_module("comfy_extras.nodes_easycache").EasyCacheNode
    patcher, twin = (node.execute(model, 0.3, 0.15, 0.95, False).args[0] for model in (patcher, twin))
    return patcher, twin
