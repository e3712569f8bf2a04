"""NaN Guard (native) with overflow protection, combined with LoRA, quantisation, torch.compile and other features."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import guard_work_units as work_units
import pytest
import torch
from guard_beside import (
    COMPILED,
    compiled_by_comfyui,
    lora_on,
    lowvram,
    with_easycache,
    with_lora,
    with_lora_cast_per_layer,
)
from guard_quantised import AVAILABLE, FORMATS, quantised
from guard_scaled import FEW, PROTECTED, STEPS, WEIGHTS, check_said
from guard_streamed import WAYS, streamed
from in_comfyui import guarded, texts
from native_models import LAYOUTS, RECENT, Layout, distance, make_model, sample, with_fp32_twin

CACHED_STEPS = 6
OUTSIDE_FP16 = 2.0**24  # one layer's weights are divided by this, and the next layer's multiplied
LINEAR_PAIRS = {  # two layers: averages of the first one's output are the second one's input
    "sd15": ("middle_block.1.transformer_blocks.0.attn1.to_v", "middle_block.1.transformer_blocks.0.attn1.to_out.0"),
    "qwen_image": ("transformer_blocks.0.attn.to_v", "transformer_blocks.0.attn.to_out.0"),
    "wan": ("blocks.0.self_attn.v", "blocks.0.self_attn.o"),
}
# error bounds by format, for rounding of a layer's input; guard_own_products.py tests all formats and products
ROUNDED = {"float8_e4m3fn": 0.15, "int8": 0.05}
# a model, or a function that returns the guarded model; and the reference for its runs
ModelAndReference = tuple[Any, Any]
State = Callable[[Layout], ModelAndReference]
Around = Callable[[], AbstractContextManager[Any]]


def protected(patcher: Any) -> Any:
    return guarded(patcher, precision="fp16")


def states(name: str) -> dict[str, tuple[State, Around]]:
    found: dict[str, State] = {
        "LoRA": partial(with_lora, hot=True),
        "fp8": partial(with_fp32_twin, dtype=torch.float8_e4m3fn, compute=torch.float16, hot=True),
        "EasyCache": partial(with_easycache, hot=True),
        "blocks replaced": with_patches,
        "packed weights": packed,
    }
    if name in COMPILED:
        found |= {"torch.compile before": compiled_before, "torch.compile after": compiled_after}
    if name in LINEAR_PAIRS:
        found["bf16 that fp16 does not hold"] = partial(outside_fp16, *LINEAR_PAIRS[name])
    if AVAILABLE:
        found |= {f"quantised to {kind}": partial(with_format, kind) for kind in ROUNDED}
    states_with_context: dict[str, tuple[State, Around]] = {state: (make, nullcontext) for state, make in found.items()}
    for weights, (dtype, compute) in WEIGHTS.items():
        make = partial(with_lora_cast_per_layer, dtype=dtype, compute=compute, hot=True)
        states_with_context[f"LoRA on {weights}, lowvram"] = make, lowvram
    for way, around in WAYS.items():
        states_with_context[way] = partial(on_host, way), around
        states_with_context[f"{way}, with LoRA"] = partial(on_host, way, put=lora_on), around
    return states_with_context


def on_host(way: str, layout: Layout, *, put: Callable[[Any], Any] = lambda patcher: patcher) -> ModelAndReference:
    patcher, exact = with_fp32_twin(layout, hot=True)
    return (lambda: protected(put(streamed(patcher, way)))), put(exact)


def with_format(kind: str, layout: Layout) -> ModelAndReference:
    blocks = f"{layout.block.split('.')[0].replace('input_blocks', 'middle_block')}."
    return quantised(layout, FORMATS[kind], hot=True, only=blocks)


def compiled_before(layout: Layout) -> ModelAndReference:
    patcher, exact = with_fp32_twin(layout, hot=True)
    return compiled_by_comfyui(patcher), exact


def compiled_after(layout: Layout) -> ModelAndReference:
    patcher, exact = with_fp32_twin(layout, hot=True)
    return (lambda: compiled_by_comfyui(protected(patcher))), exact


def with_patches(layout: Layout) -> ModelAndReference:
    """Patches that other nodes add to blocks, and replacements of blocks."""

    def block(given: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
        made = more["original_block"](given)
        return made | {"img": made["img"] * 0.9}

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
        heads = more["n_heads"]
        q, k, v = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (q, k, v))
        return torch.softmax(q @ k.mT / 4, -1).matmul(v).transpose(1, 2).flatten(2)

    models = [model.clone() for model in with_fp32_twin(layout, hot=True)]
    for model in models:
        model.set_model_patch(lambda given: given | {"img": given["img"] * 1.1}, "double_block")
        model.set_model_patch_replace(block, "dit", "double_block", 0)
        model.set_model_attn1_replace(attention, "middle", 0)
        model.set_model_attn2_output_patch(lambda made, _: made * 1.1)
        model.set_model_input_block_patch(lambda hidden, _: hidden * 0.9)
    return models[0], models[1]


def outside_fp16(first: str, second: str, layout: Layout) -> ModelAndReference:
    """Weights in bf16 that become 0 or infinite in fp16; ComfyUI computes them in fp32."""
    patcher, exact = with_fp32_twin(layout, *WEIGHTS["bf16 in fp32"])
    for name, factor in ((first, 1 / OUTSIDE_FP16), (second, OUTSIDE_FP16)):
        for model in (patcher, exact):
            model.model.diffusion_model.get_submodule(name).weight.mul_(factor)
            if name == first and (bias := model.model.diffusion_model.get_submodule(name).bias) is not None:
                bias.mul_(factor)
    return patcher, exact


class Packed(torch.nn.Linear):
    """A layer like the GGUF loader's: int8 values and a scale per row, cast to the input's dtype at each call."""

    @classmethod
    def of(cls, layer: torch.nn.Module) -> tuple[Packed, torch.Tensor]:
        """Return the packed layer, and its weight in fp32."""
        weight: Any = layer.weight
        made = cls(weight.shape[1], weight.shape[0], bias=layer.bias is not None, dtype=weight.dtype)
        scale = (weight.float().abs().amax(1, keepdim=True) / 127).half()
        made.weight = torch.nn.Parameter((weight.float() / scale.float()).round().to(torch.int8), requires_grad=False)
        made.register_buffer("scale", scale)
        made.bias = layer.bias  # pyright: ignore[reportAttributeAccessIssue]
        return made, made.weight.float() * scale.float()

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as PyTorch names it
        weight = self.weight.to(input.dtype) * self.get_buffer("scale").to(input.dtype)
        return torch.nn.functional.linear(input, weight, None if self.bias is None else self.bias.to(input.dtype))


def packed(layout: Layout) -> ModelAndReference:
    patcher, exact = with_fp32_twin(layout, hot=True)
    network, fp32_network = (model.model.diffusion_model for model in (patcher, exact))
    for name, layer in [*network.named_modules()]:
        if isinstance(layer, torch.nn.Linear) and layer.in_features > 1:
            parent, _, own = name.rpartition(".")
            smaller, weight = Packed.of(layer)
            setattr(network.get_submodule(parent), own, smaller)
            fp32_network.get_submodule(name).weight.copy_(weight)
    return patcher, exact


STATES = {(family, state): made for family in FEW for state, made in states(family).items()}
RECENT_STATES = ("LoRA", "quantised to float8_e4m3fn", "quantised to int8", "streams", "dynamic, with LoRA")
STATES |= {(name, state): made for name in RECENT for state, made in states(name).items() if state in RECENT_STATES}


@pytest.mark.parametrize(("family", "state"), STATES)
def test_protected_run_is_near_fp32_with_other_features(family: str, state: str) -> None:
    layout, (make, around) = LAYOUTS[family], STATES[family, state]
    steps = CACHED_STEPS if state == "EasyCache" else STEPS
    model, exact = make(layout)
    reference = sample(exact, steps=steps)
    texts.clear()
    with around():
        made = sample(model() if callable(model) else protected(model), steps=steps)
    torch.compiler.reset()
    check_said(PROTECTED)
    assert 0 < distance(layout, made, reference) <= ROUNDED.get(state.removeprefix("quantised to "), 1e-2)


@pytest.mark.parametrize("way", WAYS)
def test_profile_of_streamed_model_is_used_by_next_guard(way: str) -> None:
    for known in (False, True):
        behind = guarded(streamed(make_model("flux", hot=True), way), scope="learned")
        with WAYS[way]():
            sample(behind, steps=STEPS)
        assert known or f"{STEPS} steps, 1 recomputed in fp32." in texts[-1]
    check_said(PROTECTED, "from a profile: ")


@pytest.mark.skipif(not work_units.AVAILABLE, reason="this ComfyUI computes guidance halves on one GPU (before 0.23)")
@pytest.mark.parametrize("order", ["before", "after", "learned"])
@pytest.mark.parametrize("family", work_units.GUIDED)
def test_each_guidance_half_is_protected(family: str, order: str) -> None:
    """Both halves run on two devices at the same time. The split is before or after the guard."""
    layout = work_units.GUIDED[family]
    make = partial(make_model, layout, hot=True)
    both = work_units.split(make(), make)
    reference = sample(work_units.exact_on_two(both), steps=STEPS)
    if order == "before":
        patcher = work_units.split(protected(make()), make)
    else:
        patcher = protected(both) if order == "after" else guarded(both, scope="learned")
    for _ in range(2 if order == "learned" else 1):
        assert 0 < distance(layout, sample(patcher, steps=STEPS), reference) <= 1e-2
    check_said(PROTECTED, f"{STEPS} steps, all fine.")
