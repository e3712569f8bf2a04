"""NaN Guard (native) on quantised checkpoints in every format of ComfyUI: reruns use fp32 products.

ComfyUI's own layouts quantise and dequantise the weights (in comfy.quant_ops since late 2025).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import difference, error_of, guarded, module, texts
from native_models import CPU, LAYOUTS, RECENT, Layout, make_model, sample

OPS = import_module("comfy.ops")
QUANT: Any = import_module("comfy.quant_ops") if hasattr(OPS, "mixed_precision_ops") else None
AVAILABLE = hasattr(QUANT, "QUANT_ALGOS")
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this ComfyUI has no layers with quantised weights")
WAN, SD15 = LAYOUTS["wan"], LAYOUTS["sd15"]  # WAN's feed-forward fuses activation and product
sampled = partial(sample, steps=2)
HIDDEN = "middle_block.1.transformer_blocks.0.ff.net.0.proj"  # feeds a product through a GEGLU, without a norm
ROTATED = {"convrot_groupsize": 16}


@dataclass(frozen=True)
class Format:
    name: str  # in ComfyUI's table
    layout: str
    options: Mapping[str, Any] = field(default_factory=dict)  # for the layout
    checkpoint_options: Mapping[str, Any] = field(default_factory=dict)  # stored in the checkpoint for each layer
    group: int = 1  # the number of a layer's inputs is a multiple of this
    on_cpu: bool = True  # a CPU has its products; otherwise they are emulated


FORMATS = {
    "float8_e4m3fn": Format("float8_e4m3fn", "TensorCoreFP8E4M3Layout", {"scale": "recalculate"}),
    "float8_e5m2": Format("float8_e5m2", "TensorCoreFP8E5M2Layout", {"scale": "recalculate"}),
    "int8": Format("int8_tensorwise", "TensorWiseINT8Layout"),
    "int8, rotated": Format(
        "int8_tensorwise",
        "TensorWiseINT8Layout",
        {"per_channel": True, "convrot": True, **ROTATED},
        {"convrot": True, **ROTATED},
    ),
    "nvfp4": Format("nvfp4", "TensorCoreNVFP4Layout", on_cpu=False),
    "mxfp8": Format("mxfp8", "TensorCoreMXFP8Layout", on_cpu=False),
    "convrot_w4a4": Format("convrot_w4a4", "TensorCoreConvRotW4A4Layout", ROTATED, ROTATED, group=64),
    "asym_w4a8_int8": Format("asym_w4a8_int8", "AsymW4A8Int8Layout", ROTATED, ROTATED),
}
PRODUCT_MODES = [  # "own": its products; "emulated": as on a card without them; "whole": in full precision
    (kind, way) for kind in FORMATS for way in ("own", "emulated", "whole") if way != "own" or FORMATS[kind].on_cpu
]


def test_every_comfyui_format_is_tested() -> None:
    assert set(QUANT.QUANT_ALGOS) == {kind.name for kind in FORMATS.values()}


def quantised_wan(kind: str, way: str = "own", **options: Any) -> tuple[Any, Any]:
    """Return a quantised Wan and its fp32 twin. way: as in PRODUCT_MODES."""
    ways: dict[str, dict[str, Any]] = {
        "own": {},
        "emulated": {"disabled": {FORMATS[kind].name}},
        "whole": {"more": {"full_precision_matrix_mult": True}},
    }
    return quantised(WAN, FORMATS[kind], **ways[way], **options)


@pytest.mark.parametrize(("kind", "way"), PRODUCT_MODES)
def test_healthy_run_is_bit_equal_and_rerun_multiplies_in_fp32(kind: str, way: str) -> None:
    healthy, _ = quantised_wan(kind, way)
    plain, made = (sampled(each) for each in (healthy, guarded(healthy)))
    assert plain.isfinite().all() and torch.equal(made, plain)
    assert ", all fine." in texts[-1].splitlines()[0] and "the rerun used" not in texts[-1]
    hot, exact = quantised_wan(kind, way, hot=True)
    assert not sampled(hot).isfinite().all()
    before = switches(hot)
    made = sampled(guarded(hot))
    assert difference(made, sampled(exact)) <= 1e-5
    assert "2 steps, 2 recomputed in fp32" in texts[-1]
    stored = f"the rerun used the stored {FORMATS[kind].name} weights, and multiplied in fp32"
    assert stored in texts[-1]
    assert before == switches(hot)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("family", RECENT)
def test_each_family_is_recomputed_from_stored_weights(family: str, kind: str) -> None:
    layout = LAYOUTS[family]
    blocks = f"{layout.block.rpartition('.')[0]}."
    healthy, _ = quantised(layout, FORMATS[kind], only=blocks)
    plain, made = (sampled(each) for each in (healthy, guarded(healthy)))
    assert plain.isfinite().all() and torch.equal(made, plain)
    hot, exact = quantised(layout, FORMATS[kind], hot=True, only=blocks)
    plain, made, expected = (sampled(each) for each in (hot, guarded(hot), exact))
    assert not difference(plain, expected) <= 2e-2
    assert difference(made, expected) <= layout.rounds
    assert "2 steps, 2 recomputed in fp32" in texts[-1]


def newer_linear_input_act(
    linear: Any, x: Any, input_act: Any, *, residual: Any = None, residual_scale: Any = 1
) -> Any:
    """ComfyUI's function with the arguments of 0.35 and newer."""
    made = _LINEAR_INPUT_ACT(linear, x, input_act)
    return made if residual is None else residual + residual_scale * made


_LINEAR_INPUT_ACT: Any = getattr(OPS, "linear_input_act", None)


@pytest.mark.parametrize("kind", FORMATS)
def test_fp32_products_apply_to_one_thread_only(kind: str) -> None:
    """This includes the function that fuses activation and product. Products that no CPU has raise an error."""
    in_fp32 = module("precision.upcast").run_in_fp32
    with patch.object(OPS, "linear_input_act", _LINEAR_INPUT_ACT and newer_linear_input_act, create=True):
        layer, calls = one_layer(FORMATS[kind])
        assert calls.keys() >= {"plain", "gelu_tanh", "swiglu"}
        for name, (half, single) in calls.items():
            seen: list[Any] = []
            with module("comfyui_host.rerun_layers").products_in_fp32(layer):
                seen.append(product(partial(in_fp32, half)))
                other = threading.Thread(target=lambda seen=seen, half=half: seen.append(product(half)))
                other.start()
                other.join()
            seen.append(product(half))
            exact: Any = product(single)
            inside, other_thread, afterwards = (None if each is None else difference(each, exact) for each in seen)
            assert inside is not None and inside <= 1e-6, name
            assert other_thread == afterwards, name
            assert (other_thread or 0) > 1e-3 if FORMATS[kind].on_cpu else other_thread is None, name


Products = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]  # in half precision, and exact


def one_layer(kind: Format) -> tuple[Any, dict[str, Products]]:
    """Return a layer with 64 inputs and 32 outputs, and calls of it."""
    weight = torch.randn((32, 64), generator=torch.Generator().manual_seed(1)).half() / 8
    tensors, whole = written(kind, weight, {})
    layer = OPS.mixed_precision_ops({}, torch.float16).Linear(64, 32, bias=False)
    layer.load_state_dict(tensors)
    given = torch.randn((2, 3, 64), generator=torch.Generator().manual_seed(8)).half().float()
    calls: dict[str, Products] = {
        "plain": (partial(layer.eval(), given.half()), partial(torch.nn.functional.linear, given, whole))
    }
    for act, eager in getattr(OPS, "INPUT_ACT_EAGER", {}).items():
        x = torch.cat([given, given], -1) if act == "swiglu" else given
        single = partial(lambda act, x: torch.nn.functional.linear(act(x), whole), eager, x)
        named = {"linear": layer, "x": x.half(), "input_act": act}
        calls[act] = partial(lambda act, x: OPS.linear_input_act(layer, x, act), act, x.half()), single
        calls[f"{act}, by name"] = partial(lambda named: OPS.linear_input_act(**named), named), single
        calls[f"{act}, newer"] = (
            partial(lambda named: OPS.linear_input_act(**named, residual=1, residual_scale=2), named),
            partial(lambda single: 1 + 2 * single(), single),
        )
    return layer, calls


def test_interrupted_rerun_restores_every_switch() -> None:
    hot, _ = quantised_wan("float8_e4m3fn", hot=True)
    before = switches(hot)
    interrupted = import_module("comfy.model_management").InterruptProcessingException

    def interrupt(layer: Any, *_: Any) -> None:
        if layer._full_precision_mm:
            raise interrupted

    hot.model.diffusion_model.blocks[1].ffn[2].register_forward_pre_hook(interrupt)
    with pytest.raises(interrupted):
        sampled(guarded(hot))
    assert before == switches(hot)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8", "nvfp4"])
def test_lora_on_quantised_weights_is_in_rerun(kind: str) -> None:
    """The LoRA is quantised into the weights, or with lowvram added when ComfyUI casts them."""
    patcher, twin = quantised_wan(kind, "own" if FORMATS[kind].on_cpu else "emulated", hot=True)
    name, lora = "blocks.0.ffn.2.weight", torch.randn((96, 128), generator=torch.Generator().manual_seed(4)) * 0.05
    patcher.add_patches({f"diffusion_model.{name}": ("diff", (lora,))}, 1.0)
    layer, weight = patcher.model.diffusion_model.blocks[0].ffn[2], twin.model.diffusion_model.get_parameter(name)
    with torch.inference_mode():
        patcher.load(CPU, lowvram_model_memory=1)
        assert len(layer.weight_function) == 1
        made, stored = denoised(guarded(patcher)), weight.clone()
        without = denoised(twin)
        weight += lora
        exact = denoised(twin)
        patcher.detach()
    assert difference(made, exact) <= 1e-5 < 1e-3 < difference(without, exact)
    made = sampled(guarded(patcher))
    with torch.inference_mode():
        weight.copy_(layer.weight.float().dequantize())
    assert difference(weight, stored + lora) > 0  # the merged weight was quantised again
    assert difference(made, sampled(twin)) <= 1e-5
    assert "2 steps, 2 recomputed in fp32" in texts[-1]


def test_overflow_hidden_by_rounding_is_recomputed() -> None:
    """A value overflows, and rounding to fp8 makes it finite: the plain picture is finite but wrong."""
    patcher, twin = quantised(SD15, FORMATS["float8_e4m3fn"], only="middle_block.1.transformer_blocks.0.ff.net.2")
    with torch.inference_mode():
        weight, whole = (m.model.diffusion_model.get_submodule(HIDDEN).weight for m in (patcher, twin))
        weight[: len(weight) // 2] *= 6e4  # only the half before the gate
        whole.copy_(weight)
    plain, made, exact = (sampled(each) for each in (patcher, guarded(patcher), twin))
    assert plain.isfinite().all() and difference(plain, exact) > 0.01
    assert difference(made, exact) <= 1e-5
    assert "2 steps, 2 recomputed in fp32" in texts[-1]


def test_quantised_weight_in_layer_without_switch_is_rejected_by_name() -> None:
    patcher, _ = quantised_wan("int8", hot=True)
    network = patcher.model.diffusion_model
    with torch.inference_mode():
        plain = torch.nn.Linear(96, 96, dtype=torch.float16)
        plain.weight = torch.nn.Parameter(network.blocks[1].self_attn.q.weight, requires_grad=False)
        network.blocks[1].self_attn.q = plain
    error = error_of(lambda: sampled(guarded(patcher)))
    assert error.startswith("RerunUnsupported: 'blocks.1.self_attn.q.weight' is quantised (TensorWiseINT8Layout)")
    assert "(Linear) cannot compute in full precision" in error and "Update ComfyUI" in error


def test_damaged_quantised_weight_is_named_in_error() -> None:
    broken, _ = quantised_wan("float8_e4m3fn", hot=True)
    with torch.inference_mode():
        broken.model.diffusion_model.blocks[1].ffn[2].weight._params.scale.fill_(torch.nan)
    error = error_of(lambda: sampled(guarded(broken)))
    assert error.startswith("GuardStopped") and "the weight 'blocks.1.ffn.2.weight' holds" in error


def quantised(
    layout: Layout,
    kind: Format,
    compute: torch.dtype | None = None,
    *,
    hot: bool = False,
    disabled: Any = (),
    more: Any = None,
    only: str = "blocks.",
) -> tuple[Any, Any]:
    """Return a model with quantised weights in the linear layers of its blocks, and an fp32 twin of these weights.

    compute: the dtype that other weights are cast to at each layer; None: they stay fp16.
    """
    with torch.inference_mode(), patch.object(logging.root, "disabled", True):  # it warns about missing weights
        plain = make_model(layout, torch.float16, hot=hot).model.diffusion_model
        stored, whole = plain.state_dict(), {name: weight.float() for name, weight in plain.state_dict().items()}
        for name, layer in plain.named_modules():
            if isinstance(layer, torch.nn.Linear) and name.startswith(only) and layer.in_features % kind.group == 0:
                tensors, whole[f"{name}.weight"] = written(kind, stored.pop(f"{name}.weight"), more)
                stored |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        operations = OPS.mixed_precision_ops({}, torch.float16, disabled=set(disabled))
        patcher = make_model(layout, torch.float16, compute, operations=operations)
        twin = make_model(layout, torch.float32)
        patcher.model.diffusion_model.load_state_dict(stored)
        twin.model.diffusion_model.load_state_dict(whole)
    return patcher, twin


def written(kind: Format, weight: torch.Tensor, more: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a layer's quantised tensors as a checkpoint stores them, and the dequantised weight in fp32."""
    held = QUANT.QuantizedTensor.from_float(weight, kind.layout, **kind.options)
    options = json.dumps({"format": kind.name, **kind.checkpoint_options, **(more or {})}).encode()
    return held.state_dict("weight") | {"comfy_quant": torch.tensor(list(options), dtype=torch.uint8)}, (
        held.float().dequantize()
    )


def switches(patcher: Any) -> list[Any]:
    """Return everything that decides how products are computed."""
    layers = [getattr(layer, "_full_precision_mm", None) for layer in patcher.model.diffusion_model.modules()]
    own = [vars(layer).get("_full_precision_mm") for layer in patcher.model.diffusion_model.modules()]
    functions = [OPS.fp8_linear, getattr(OPS, "linear_input_act", None)]
    return [*functions, sorted(vars(OPS.CastWeightBiasOp)), layers, own]


def denoised(patcher: Any) -> torch.Tensor:
    """Call the model once, as a sampler does."""
    generator = torch.Generator().manual_seed(2)
    latents, context = (torch.randn(shape, generator=generator) for shape in (WAN.latents, WAN.context))
    options = {"wrappers": patcher.wrappers}
    return patcher.model.apply_model(latents, torch.tensor([3.0]), c_crossattn=context, transformer_options=options)


@torch.inference_mode()
def product(make: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the product; None if a CPU does not support it."""
    try:
        return make().float()
    except ValueError as error:
        if "CPU does not support" not in str(error):
            raise
        return None
