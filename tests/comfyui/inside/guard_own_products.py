"""NaN Guard (native) with overflow protection on quantised checkpoints: products use ComfyUI's own kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import lowvram as lowvram_mode
from guard_quantised import AVAILABLE, FORMATS, PRODUCT_MODES, QUANT, WAN
from guard_quantised import quantised_wan as quantised
from guard_streamed import WAYS as CARDS
from guard_streamed import streamed
from in_comfyui import guarded, module, texts
from native_models import distance, sample
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this ComfyUI has no layers with quantised weights")
STEPS = 3  # later steps use the scales that the first step found
ON_CPU = [kind for kind in FORMATS if FORMATS[kind].on_cpu]
HALF_PRECISION_OUTPUT = ("nvfp4", "mxfp8")  # their kernels put out half precision
FEED = "blocks.0.ffn.2"
INPUTS = 64


class Counting(TorchDispatchMode):
    """Count products with quantised weights, dequantised weights, and waits of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.linear.default, torch.ops.aten.mm.default):
            self.counts["products"] += any(isinstance(each, QUANT.QuantizedTensor) for each in args)
        self.counts["waits"] += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@contextmanager
def counting() -> Iterator[Counter[str]]:
    dequantize = QUANT.QuantizedTensor.dequantize
    mode = Counting()

    def counted(tensor: Any) -> torch.Tensor:
        mode.counts["dequantised"] += 1
        return dequantize(tensor)

    with patch.object(QUANT.QuantizedTensor, "dequantize", counted), mode:
        yield mode.counts


def layers_of(patcher: Any) -> int:
    return sum(isinstance(each, QUANT.QuantizedTensor) for each in patcher.model.diffusion_model.parameters())


def run(patcher: Any, precision: str = "fp16", **policy: Any) -> torch.Tensor:
    return sample(guarded(patcher, precision=precision, **policy), steps=STEPS)


@cache
def exact(kind: str, *, hot: bool) -> torch.Tensor:
    """The result in fp32, with the dequantised weights."""
    return sample(quantised(kind, hot=hot)[1], steps=STEPS)


@cache
def own_error(kind: str, *, hot: bool) -> float:
    """The error of ComfyUI's own products if everything else is in fp32."""
    plain = quantised(kind, hot=hot, compute=torch.float32)[0]
    return error(sample(plain, steps=STEPS), kind, hot=hot)


def error(made: torch.Tensor, kind: str, *, hot: bool = True) -> float:
    return distance(WAN, made, exact(kind, hot=hot))


CASES = [(kind, way, hot, "fp16") for kind, way in PRODUCT_MODES for hot in (False, True)]
CASES += [(kind, "own", True, "bf16") for kind in ON_CPU]


@pytest.mark.parametrize(("kind", "way", "hot", "precision"), CASES)
def test_each_step_uses_comfyuis_kernels_or_dequantises(kind: str, way: str, hot: bool, precision: str) -> None:
    """With ComfyUI's kernel, the error is as if all else were fp32. Dequantised, it is that of half precision.

    ComfyUI itself clips rows in fp8, and has a larger error; the guard's rows are scaled.
    """
    patcher, _ = quantised(kind, way, hot=hot)
    with counting() as counts:
        made = run(patcher, precision)
    assert ", all fine." in texts[-1] and "dequantised" not in texts[-1]
    number = layers_of(patcher) * STEPS
    assert (counts["products"], counts["dequantised"]) == ((number, 0) if way == "own" else (0, number))
    assert error(made, kind, hot=hot) <= (1.4 * own_error(kind, hot=hot) if way == "own" else 3e-3)


def products(kind: str, stored: torch.dtype = torch.float16) -> tuple[Callable[..., torch.Tensor], torch.Tensor]:
    """Return a layer's product function, and its weights in fp32. stored: the dtype that the weights were stored in."""
    weight = torch.randn((32, INPUTS), generator=torch.Generator().manual_seed(1)).to(stored) / 8
    return product(kind, weight), held(kind, weight).float().dequantize()


def held(kind: str, weight: torch.Tensor) -> Any:
    return QUANT.QuantizedTensor.from_float(weight, FORMATS[kind].layout, **FORMATS[kind].options)


def product(kind: str, weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    own, run_in = module("comfyui_host.rerun_layers").OwnProducts(), module("precision.upcast").run_in
    mode = module("precision.scaled_products").ScaledHalfMatmulMode(torch.float16, own.kernel_of)
    quantised_weight = held(kind, weight)
    return lambda x, **more: run_in(mode, F.linear, (x, quantised_weight), more)


def rows(*largest: float) -> torch.Tensor:
    drawn = torch.randn((len(largest), INPUTS), generator=torch.Generator().manual_seed(8))
    return drawn * torch.tensor(largest)[:, None]


def row_error(made: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error of a row, by norm."""
    return ((made.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)).max().item()


ROUNDED = dict.fromkeys(FORMATS, 0.01) | {"float8_e4m3fn": 0.04, "float8_e5m2": 0.04, "convrot_w4a4": 0.2}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("without_gradients", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("kind", ON_CPU)
def test_product_differs_only_by_rounding_of_rows(kind: str, without_gradients: Any, stored: torch.dtype) -> None:
    """The product with the identity gives the rounded rows: each format holds the identity up to a scale."""
    call, weights = products(kind, stored)
    given, bias = rows(1e-6, 1.0, 1e3, 1e6, 1e30), torch.linspace(-1e-7, 1e-7, 32)
    with without_gradients(), counting() as counts:
        made = call(given, bias=bias)
    assert counts == Counter(products=1, dequantised=0, waits=0)
    identity = torch.eye(INPUTS).half()
    rounded = product(kind, identity)(given) / held(kind, identity).float().dequantize().diagonal()
    assert made.dtype is torch.float32
    assert row_error(made, rounded.double() @ weights.double().T + bias) <= 1e-5
    assert 1e-4 < row_error(rounded, given) <= ROUNDED[kind]
    assert torch.equal(call(given[:, None].half()[:3], bias=bias)[:, 0], call(given.half().float()[:3], bias=bias))


@torch.inference_mode()
@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ON_CPU)
def test_non_finite_row_has_no_finite_output(kind: str, broken: float) -> None:
    call, _ = products(kind)
    given = rows(1.0, 1.0, 1.0)
    exact = call(given)
    given[1, 7] = broken
    made = call(given)
    assert not made[1].isfinite().any() and torch.equal(made[::2], exact[::2])


REPORTED = {  # call of the network → the report's words; the second call uses planned scales
    1: f"{STEPS} steps, 1 recomputed in fp32",
    2: "values left the range of earlier steps: recomputed in fp16 with new scales",
}


@pytest.mark.parametrize("call", REPORTED)
@pytest.mark.parametrize("kind", ON_CPU)
def test_guard_detects_infinite_input_of_product(kind: str, call: int) -> None:
    patcher, _ = quantised(kind)
    calls = list[Any]()

    def make_infinite_once(_layer: Any, args: Any) -> Any:
        calls.append(args)
        return (args[0].masked_fill(args[0] == args[0].max(), torch.inf),) if len(calls) == call else None

    with patcher.model.diffusion_model.get_submodule(FEED).register_forward_pre_hook(make_infinite_once):
        made = run(patcher)
    assert REPORTED[call] in texts[-1]
    assert error(made, kind, hot=False) <= 1.4 * own_error(kind, hot=False)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("lowvram", [False, True], ids=["merged", "lowvram"])
def test_lora_is_in_quantised_products(kind: str, lowvram: bool) -> None:
    """The LoRA is quantised into the weights, or added at each call (lowvram); then ComfyUI dequantises them too."""
    patcher, twin = quantised(kind, hot=True)
    name = f"{FEED}.weight"
    lora = torch.randn((96, 128), generator=torch.Generator().manual_seed(4)) * 0.05
    for each in (patcher, twin):
        each.add_patches({f"diffusion_model.{name}": ("diff", (lora,))}, 1.0)
    with lowvram_mode() if lowvram else nullcontext(), counting() as counts:
        made = run(patcher)
    assert counts["products"] == (layers_of(patcher) - lowvram) * STEPS
    assert not lowvram or counts["dequantised"] == STEPS  # merging the LoRA dequantises too
    assert distance(WAN, made, sample(twin, steps=STEPS)) <= min(1.4 * own_error(kind, hot=True), error(made, kind))


@pytest.mark.parametrize("way", CARDS)
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
def test_streamed_weights_stay_quantised(kind: str, way: str) -> None:
    patcher, _ = quantised(kind, hot=True)
    with CARDS[way](), counting() as counts:
        made = run(streamed(patcher, way))
    layers = layers_of(patcher)
    assert counts["products"] == layers * STEPS and counts["dequantised"] <= layers  # once, while the model is loaded
    assert error(made, kind) <= 1.4 * own_error(kind, hot=True)


@pytest.mark.parametrize("kind", ON_CPU)
def test_overflowing_model_uses_scaled_products_in_next_run(kind: str) -> None:
    patcher, _ = quantised(kind, hot=True)
    run(patcher, "inherit", scope="learned")
    assert f"{STEPS} steps, 1 recomputed in fp32." in texts[-1]
    with counting() as counts:
        made = run(patcher, "inherit", scope="learned")
    assert ", all fine." in texts[-1]
    assert (counts["products"], counts["dequantised"]) == (layers_of(patcher) * STEPS, 0)
    assert error(made, kind) <= 1.4 * own_error(kind, hot=True)


@pytest.mark.parametrize("kind", HALF_PRECISION_OUTPUT)
def test_format_without_kernel_is_dequantised_with_reason_in_report(kind: str) -> None:
    patcher, _ = quantised(kind, hot=True)
    with counting() as counts:
        made = run(patcher)
    assert error(made, kind) <= 3e-3
    assert counts["dequantised"] == layers_of(patcher) * STEPS and counts["products"] == 1
    assert (
        f"{FORMATS[kind].layout} weights are dequantised in each step (slower): ValueError: CPU does not" in texts[-1]
    )


def test_unknown_format_is_dequantised_and_reported() -> None:
    patcher, _ = quantised("int8", hot=True)
    with patch.dict(module("comfyui_host.rerun_layers")._ROWS), counting() as counts:
        del module("comfyui_host.rerun_layers")._ROWS["TensorWiseINT8Layout"]
        made = run(patcher)
    assert error(made, "int8") <= 3e-3 and counts["products"] == 0
    assert "TensorWiseINT8Layout weights are dequantised in each step (slower): no kernel is known" in texts[-1]


@pytest.mark.parametrize("kind", HALF_PRECISION_OUTPUT)
def test_kernels_with_half_precision_output_do_not_overflow(kind: str) -> None:
    """Stand-ins replace the kernels that no CPU has."""
    kitchen = import_module("comfy_kitchen")

    def kernel(
        a: torch.Tensor, b: torch.Tensor, bias: Any = None, out_dtype: Any = None, **scales: Any
    ) -> torch.Tensor:
        assert bias is None and out_dtype is torch.bfloat16

        def dequantise(codes: torch.Tensor, of: str) -> torch.Tensor:
            tensor = [scales[f"tensor_scale_{of}"]] if f"tensor_scale_{of}" in scales else []
            return getattr(kitchen, f"dequantize_{kind}")(codes, *tensor, scales[f"block_scale_{of}"], torch.float32)

        return (dequantise(a, "a") @ dequantise(b, "b").T).to(out_dtype)

    patcher, _ = quantised(kind, hot=True)
    with patch.object(kitchen, f"scaled_mm_{kind}", kernel), counting() as counts:
        made = run(patcher)
    assert ", all fine." in texts[-1] and "dequantised" not in texts[-1]
    assert (counts["products"], counts["dequantised"]) == (layers_of(patcher) * STEPS, 0)
    assert error(made, kind) <= {"nvfp4": 0.5, "mxfp8": 0.15}[kind]
