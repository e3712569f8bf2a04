"""NaN Guard (native) on models with fp8 weights, some of which multiply in fp8: reruns use fp32 products."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, guarded, module, texts
from native_models import make_model
from native_models import sample as sampled

OPS = import_module("comfy.ops")
sample = partial(sampled, steps=2)
FP8 = torch.float8_e4m3fn
HOT = "input_blocks.1.0.in_layers.2"  # a convolution, which ComfyUI keeps in half precision
HIDDEN = "middle_block.1.transformer_blocks.0.ff.net.0.proj"  # feeds a product through a GEGLU, without a norm
KINDS = {"fp8_ops": OPS.fp8_ops}  # ComfyUI's layer classes that multiply in fp8, and one with only fp8 weights
if scaled := getattr(OPS, "scaled_fp8_ops", None):
    KINDS["scaled fp8"] = scaled(fp8_matrix_mult=True, scale_input=True, override_dtype=FP8)
    KINDS["scaled fp8, no input scale"] = scaled(fp8_matrix_mult=True, override_dtype=FP8)
    KINDS["scaled fp8 weights"] = scaled(override_dtype=FP8)


def make(kind: str, *, hot: bool) -> Any:
    patcher = make_model("sd15", FP8, torch.float16, operations=KINDS[kind])
    network = patcher.model.diffusion_model
    if hot:
        layer = network.get_submodule(HOT)
        layer.weight = torch.nn.Parameter(layer.weight.float() * 1e5, requires_grad=False)
    for name, weight in network.named_parameters():
        if name.endswith(("scale_weight", "scale_input")):
            weight.fill_(0.5)
    return patcher


def in_fp32(patcher: Any) -> Any:
    """Return a model in fp32 with the checkpoint's weights, multiplied by their scales."""
    weights = {name: weight.float() for name, weight in patcher.model.diffusion_model.state_dict().items()}
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith(("scale_weight", "scale_input"))}
    for name, scale in scales.items():
        if name.endswith("scale_weight"):
            weights[name.replace("scale_weight", "weight")] *= scale
    twin = make_model("sd15", torch.float32)
    twin.model.diffusion_model.load_state_dict(weights)
    return twin


@contextmanager
def counting() -> Iterator[list[bool]]:
    """Record for each product whether it was computed in fp8."""
    made: list[bool] = []
    original = OPS.fp8_linear

    def fp8_linear(layer: Any, given: Any) -> Any:
        output = original(layer, given)
        made.append(output is not None)
        return output

    OPS.fp8_linear = fp8_linear
    try:
        yield made
        assert OPS.fp8_linear is fp8_linear, "the guard restores the function"
    finally:
        OPS.fp8_linear = original


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_run_is_bit_equal_and_rerun_multiplies_in_fp32(kind: str) -> None:
    healthy, hot = (make(kind, hot=hot) for hot in (False, True))
    plain, made = (sample(each) for each in (healthy, guarded(healthy)))
    assert torch.equal(made, plain)
    assert ", all fine." in texts[-1].splitlines()[0] and "the rerun used" not in texts[-1]
    with counting() as products:
        assert torch.isnan(sample(hot)).all()
        assert any(products) == (kind != "scaled fp8 weights")
        made = sample(guarded(hot))
    assert difference(made, sample(in_fp32(hot))) <= 1e-5
    assert "2 steps, 2 recomputed in fp32" in texts[-1]
    assert "the rerun used the stored float8_e4m3fn weights, and multiplied in fp32" in texts[-1]


def test_overflow_hidden_by_fp8_product_is_recomputed() -> None:
    """The product's input overflows, and ComfyUI clamps it: the plain picture is finite but wrong."""
    patcher = make("fp8_ops", hot=False)
    layer = patcher.model.diffusion_model.get_submodule(HIDDEN)
    hot = torch.ones(layer.weight.shape[0], 1)
    hot[: len(hot) // 2] = 6e4  # only the half before the gate
    layer.weight = torch.nn.Parameter(layer.weight.float() * hot, requires_grad=False)
    plain, made, exact = (sample(each) for each in (patcher, guarded(patcher), in_fp32(patcher)))
    assert plain.isfinite().all() and difference(plain, exact) > 0.01
    assert difference(made, exact) <= 1e-5
    assert "2 steps, 2 recomputed in fp32" in texts[-1]


def test_other_threads_keep_fp8_products() -> None:
    layer = OPS.fp8_ops.Linear(16, 16, dtype=FP8).eval().requires_grad_(False)
    layer.weight.copy_(torch.eye(16))
    layer.bias.zero_()
    in_fp8: list[bool] = []

    def product() -> None:
        with torch.inference_mode():
            in_fp8.append(OPS.fp8_linear(layer, torch.ones((1, 2, 16), dtype=torch.float16)) is not None)

    with module("comfyui_host.rerun_layers").products_in_fp32(layer):
        product()
        other = threading.Thread(target=product)
        other.start()
        other.join()
    product()
    assert in_fp8 == [False, True, True]
