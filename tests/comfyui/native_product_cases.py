"""Models of which layers multiply in fp8, guarded: run in ComfyUI's interpreter, judged in test_native_products.py."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import LAYOUTS, make_model, sample

OPS = import_module("comfy.ops")
SD15 = LAYOUTS["sd15"]
STEPS = 2
FP8 = torch.float8_e4m3fn
HOT = "input_blocks.1.0.in_layers.2.weight"  # of a convolution, which ComfyUI leaves in half precision
HIDDEN = "middle_block.1.transformer_blocks.0.ff.net.0.proj"  # feeds a product through a GEGLU, with no norm between


def operations() -> dict[str, Any]:
    """ComfyUI's layer classes that multiply in fp8, and one that has fp8 weights alone."""
    kinds = {"fp8_ops": OPS.fp8_ops}
    if scaled := getattr(OPS, "scaled_fp8_ops", None):
        kinds["scaled fp8"] = scaled(fp8_matrix_mult=True, scale_input=True, override_dtype=FP8)
        kinds["scaled fp8, no input scale"] = scaled(fp8_matrix_mult=True, override_dtype=FP8)
        kinds["scaled fp8 weights"] = scaled(override_dtype=FP8)
    return kinds


def make(kind: Any, *, hot: bool) -> Any:
    patcher = make_model(SD15, FP8, torch.float16, operations=kind)
    network = patcher.model.diffusion_model
    if hot:
        layer = network.get_submodule(HOT.removesuffix(".weight"))
        layer.weight = torch.nn.Parameter(layer.weight.float() * 1e5, requires_grad=False)
    for name, weight in network.named_parameters():
        if name.endswith(("scale_weight", "scale_input")):
            weight.fill_(0.5)
    return patcher


def in_fp32(patcher: Any) -> Any:
    """A model in fp32 with the weights that the other one's checkpoint holds: scaled where it says so."""
    weights = {name: weight.float() for name, weight in patcher.model.diffusion_model.state_dict().items()}
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith(("scale_weight", "scale_input"))}
    for name, scale in scales.items():
        if name.endswith("scale_weight"):
            weights[name.replace("scale_weight", "weight")] *= scale
    twin = make_model(SD15, torch.float32)
    twin.model.diffusion_model.load_state_dict(weights)
    return twin


@contextmanager
def counting() -> Iterator[list[bool]]:
    """Whether each product was made in fp8."""
    made: list[bool] = []
    original = OPS.fp8_linear

    def fp8_linear(layer: Any, given: Any) -> Any:
        output = original(layer, given)
        made.append(output is not None)
        return output

    OPS.fp8_linear = fp8_linear
    try:
        yield made
        assert OPS.fp8_linear is fp8_linear, "the guard puts back what was there"
    finally:
        OPS.fp8_linear = original


def case_products() -> dict[str, Any]:
    results: dict[str, Any] = {"kinds": list(operations())}
    for name, kind in operations().items():
        healthy, hot = make(kind, hot=False), make(kind, hot=True)
        with counting() as made:
            results[f"{name}, healthy plain"] = sample(healthy, SD15, steps=STEPS)
            results[f"{name}, in fp8"] = any(made)
            said.clear()
            results[f"{name}, healthy guarded"] = sample(node("model", healthy), SD15, steps=STEPS)
            results[f"{name}, healthy said"] = said[-1]
            results[f"{name}, plain"] = sample(hot, SD15, steps=STEPS)
            said.clear()
            results[f"{name}, guarded"] = sample(node("model", hot), SD15, steps=STEPS)
        results[f"{name}, said"] = said[-1]
        results[f"{name}, fp32"] = sample(in_fp32(hot), SD15, steps=STEPS)
    return results


def case_hidden() -> dict[str, Any]:
    """What overflows before a product in fp8, where ComfyUI clamps it: the picture is finite, and wrong."""
    patcher = make(OPS.fp8_ops, hot=False)
    layer = patcher.model.diffusion_model.get_submodule(HIDDEN)
    hot = torch.ones(layer.weight.shape[0], 1)
    hot[: len(hot) // 2] = 6e4  # not the gate
    layer.weight = torch.nn.Parameter(layer.weight.float() * hot, requires_grad=False)
    results: dict[str, Any] = {"plain": sample(patcher, SD15, steps=STEPS)}
    said.clear()
    results["guarded"] = sample(node("model", patcher), SD15, steps=STEPS)
    results["said"] = said[-1]
    results["fp32"] = sample(in_fp32(patcher), SD15, steps=STEPS)
    return results


def case_leaves_nothing() -> dict[str, Any]:
    """After a rerun that failed too, and meanwhile in other threads."""
    broken = make(OPS.fp8_ops, hot=True)
    broken.model.diffusion_model.out[0].weight = torch.nn.Parameter(torch.full((32,), torch.nan), requires_grad=False)
    with counting():
        error = error_of(lambda: sample(node("model", broken), SD15))
    products = sys.modules["custom_nodes_pack.comfyui_host.layers"]
    layer = OPS.fp8_ops.Linear(16, 16, dtype=FP8).eval().requires_grad_(False)
    layer.weight.copy_(torch.eye(16))
    layer.bias.zero_()
    found: list[bool] = []

    def product() -> None:
        with torch.inference_mode():
            found.append(OPS.fp8_linear(layer, torch.ones((1, 2, 16), dtype=torch.float16)) is not None)

    with products.products_in_fp32(layer):
        product()
        other = threading.Thread(target=product)
        other.start()
        other.join()
    product()
    return {"error": error, "in fp8: inside, other thread, afterwards": found}
