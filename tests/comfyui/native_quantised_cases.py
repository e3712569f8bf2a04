"""Models of which layers hold quantised weights, guarded: run in ComfyUI's interpreter, judged in
test_native_quantised.py.

Weights are quantised, and read back, by ComfyUI's own layouts: comfy.quant_ops has them since late 2025.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import CPU, LAYOUTS, Layout, make_model, sample

OPS = import_module("comfy.ops")
QUANT: Any = import_module("comfy.quant_ops") if hasattr(OPS, "mixed_precision_ops") else None
HERE = hasattr(QUANT, "QUANT_ALGOS")
WAN, SD15 = LAYOUTS["wan"], LAYOUTS["sd15"]  # WAN's feed-forward asks for an activation and a product in one
STEPS = 2
HIDDEN = "middle_block.1.transformer_blocks.0.ff.net.0.proj"  # feeds a product through a GEGLU, with no norm between
ROTATED = {"convrot_groupsize": 16}


@dataclass(frozen=True)
class Format:
    name: str  # in ComfyUI's table
    layout: str
    options: Mapping[str, Any] = field(default_factory=dict)  # for the layout
    said: Mapping[str, Any] = field(default_factory=dict)  # by the checkpoint, of each layer
    group: int = 1  # of inputs; a layer has a multiple of it
    on_cpu: bool = True  # its products, else they are emulated here


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
FULL = {"full_precision_matrix_mult": True}


def case_formats() -> dict[str, Any]:
    """Each format: with its own products, on a card that has none, and where the checkpoint says that they be whole."""
    results: dict[str, Any] = {"here": HERE, "all": sorted(QUANT.QUANT_ALGOS) if HERE else []}
    for name, kind in FORMATS.items() if HERE else ():
        ways: dict[str, dict[str, Any]] = {"emulated": {"disabled": {kind.name}}, "whole": {"more": FULL}}
        if kind.on_cpu:
            ways["own"] = {}
        for way, how in ways.items():
            key = f"{name}, {way}"
            healthy, _ = quantised(WAN, kind, **how)
            hot, twin = quantised(WAN, kind, hot=True, **how)
            results[f"{key}, healthy plain"] = sampled(healthy)
            said.clear()
            results[f"{key}, healthy guarded"] = sampled(node("model", healthy))
            results[f"{key}, healthy said"] = said[-1]
            results[f"{key}, plain"] = sampled(hot)
            before = switches(hot)
            said.clear()
            results[f"{key}, guarded"] = sampled(node("model", hot))
            results[f"{key}, said"] = said[-1]
            results[f"{key}, switches as before"] = before == switches(hot)
            results[f"{key}, fp32"] = sampled(twin)
    return results


def newer_linear_input_act() -> Callable[[], None]:
    """Have ComfyUI's function take what it takes since 0.35; returns the undo."""
    original = getattr(OPS, "linear_input_act", None)
    if original is None:
        return lambda: None

    def newer(linear: Any, x: Any, input_act: Any, *, residual: Any = None, residual_scale: Any = 1) -> Any:
        made = original(linear, x, input_act)
        return made if residual is None else residual + residual_scale * made

    OPS.linear_input_act = newer
    return lambda: setattr(OPS, "linear_input_act", original)


def case_products() -> dict[str, Any]:
    """One layer, also by the function that makes one of an activation and the product: in full inside, in this thread
    alone. Products that no CPU makes raise there."""
    undo = newer_linear_input_act()
    try:
        return one_layer()
    finally:
        undo()


def one_layer() -> dict[str, Any]:
    results: dict[str, Any] = {}
    products = import_module("custom_nodes_pack.comfyui_host.layers")
    in_fp32 = import_module("custom_nodes_pack.precision.upcast").run_in_fp32
    for name, kind in FORMATS.items() if HERE else ():
        layer, whole = quantised_layer(kind)
        given = torch.randn((2, 3, 64), generator=torch.Generator().manual_seed(8)).half().float()
        single: dict[str, Callable[[], torch.Tensor]] = {"plain": partial(torch.nn.functional.linear, given, whole)}
        half: dict[str, Callable[[], torch.Tensor]] = {"plain": partial(layer, given.half())}
        for act, eager in getattr(OPS, "INPUT_ACT_EAGER", {}).items():
            wide = torch.cat([given, given], -1) if act == "swiglu" else given
            single[act] = partial(lambda act, x, whole=whole: torch.nn.functional.linear(act(x), whole), eager, wide)
            half[act] = partial(lambda act, x, layer=layer: OPS.linear_input_act(layer, x, act), act, wide.half())
            named = {"linear": layer, "x": wide.half(), "input_act": act}
            single[f"{act}, by name"] = single[act]
            half[f"{act}, by name"] = lambda named=named: OPS.linear_input_act(**named)
            single[f"{act}, newer"] = lambda made=single[act]: 1 + 2 * made()
            half[f"{act}, newer"] = lambda named=named: OPS.linear_input_act(**named, residual=1, residual_scale=2)
        for call, product in half.items():
            seen: list[Any] = []
            with products.products_in_fp32(layer):
                seen.append(made(partial(in_fp32, product)))
                other = threading.Thread(target=lambda seen=seen, product=product: seen.append(made(product)))
                other.start()
                other.join()
            seen.append(made(product))
            results[f"{name}, {call}"] = [difference(tensor, made(single[call])) for tensor in seen]
    return results


def case_interrupted() -> dict[str, Any]:
    """A rerun that ends otherwise than by returning leaves every switch as it was."""
    if not HERE:
        return {}
    patcher, _ = quantised(WAN, FORMATS["float8_e4m3fn"], hot=True)
    before = switches(patcher)
    interrupted = import_module("comfy.model_management").InterruptProcessingException
    results = {"inside": False}

    def interrupt(layer: Any, *_: Any) -> None:
        if layer._full_precision_mm:
            results["inside"] = True
            raise interrupted

    hook = patcher.model.diffusion_model.blocks[1].ffn[2].register_forward_pre_hook(interrupt)
    try:
        sampled(node("model", patcher))
    except interrupted:
        results["interrupted"] = True
    hook.remove()
    return results | {"as before": before == switches(patcher)}


def case_lora() -> dict[str, Any]:
    """A LoRA quantised into the weights again, and one that ComfyUI adds on the way to those it casts (lowvram)."""
    results: dict[str, Any] = {}
    name = "blocks.0.ffn.2.weight"
    patch = torch.randn((96, 128), generator=torch.Generator().manual_seed(4)) * 0.05
    for key in ("float8_e4m3fn", "int8", "nvfp4") if HERE else ():
        kind = FORMATS[key]
        way: dict[str, Any] = {} if kind.on_cpu else {"disabled": {kind.name}}
        patcher, twin = quantised(WAN, kind, hot=True, **way)
        patcher.add_patches({f"diffusion_model.{name}": ("diff", (patch,))}, 1.0)
        said.clear()
        with torch.inference_mode():
            patcher.load(CPU, lowvram_model_memory=1)
            layer = patcher.model.diffusion_model.blocks[0].ffn[2]
            results[f"{key}, on the way"] = len(layer.weight_function)
            results[f"{key}, lowvram guarded"] = denoised(node("model", patcher))
            weight = twin.model.diffusion_model.get_parameter(name)
            stored = weight.clone()
            weight += patch
            results[f"{key}, lowvram fp32"] = denoised(twin)
            weight.copy_(stored)
            results[f"{key}, fp32 without"] = denoised(twin)
            patcher.detach()
        guarded = node("model", patcher)
        results[f"{key}, loaded guarded"] = sampled(guarded)
        with torch.inference_mode():
            weight.copy_(layer.weight.float().dequantize())
            results[f"{key}, moved by"] = difference(weight, stored + patch)
        results[f"{key}, loaded fp32"] = sampled(twin)
        results[f"{key}, said"] = said[-1]
    return results


def case_hidden() -> dict[str, Any]:
    """What overflows before it is rounded, where that makes it finite: so is the picture, and wrong."""
    if not HERE:
        return {}
    patcher, twin = quantised(SD15, FORMATS["float8_e4m3fn"], only="middle_block.1.transformer_blocks.0.ff.net.2")
    with torch.inference_mode():
        weight, whole = (m.model.diffusion_model.get_submodule(HIDDEN).weight for m in (patcher, twin))
        weight[: len(weight) // 2] *= 6e4  # not the gate
        whole.copy_(weight)
    results: dict[str, Any] = {"plain": sample(patcher, SD15, steps=1)}
    said.clear()
    results["guarded"] = sample(node("model", patcher), SD15, steps=1)
    return results | {"said": said[-1], "fp32": sample(twin, SD15, steps=1)}


def case_refused() -> dict[str, Any]:
    """Quantised weights in a layer without ComfyUI's switch; and weights that are broken, in no precision."""
    if not HERE:
        return {}
    patcher, _ = quantised(WAN, FORMATS["int8"], hot=True)
    network = patcher.model.diffusion_model
    with torch.inference_mode():
        plain = torch.nn.Linear(96, 96, dtype=torch.float16)
        plain.weight = torch.nn.Parameter(network.blocks[1].self_attn.q.weight, requires_grad=False)
        network.blocks[1].self_attn.q = plain
    broken, _ = quantised(WAN, FORMATS["float8_e4m3fn"], hot=True)
    with torch.inference_mode():
        broken.model.diffusion_model.blocks[1].ffn[2].weight._params.scale.fill_(torch.nan)
    return {
        "no switch": error_of(lambda: sampled(node("model", patcher))),
        "broken": error_of(lambda: sampled(node("model", broken))),
    }


def quantised(
    layout: Layout, kind: Format, *, hot: bool = False, disabled: Any = (), more: Any = None, only: str = "blocks."
) -> tuple[Any, Any]:
    """A model with quantised weights in the linear layers of its blocks; and one in fp32 of what those weights are."""
    with torch.inference_mode(), quiet():  # as ComfyUI's nodes load
        plain = make_model(layout, torch.float16, hot=hot).model.diffusion_model
        stored, whole = plain.state_dict(), {name: weight.float() for name, weight in plain.state_dict().items()}
        for name, layer in plain.named_modules():
            if isinstance(layer, torch.nn.Linear) and name.startswith(only) and layer.in_features % kind.group == 0:
                tensors, whole[f"{name}.weight"] = written(kind, stored.pop(f"{name}.weight"), more)
                stored |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        operations = OPS.mixed_precision_ops({}, torch.float16, disabled=set(disabled))
        patcher, twin = make_model(layout, torch.float16, operations=operations), make_model(layout, torch.float32)
        patcher.model.diffusion_model.load_state_dict(stored)
        twin.model.diffusion_model.load_state_dict(whole)
    return patcher, twin


def quantised_layer(kind: Format) -> tuple[Any, torch.Tensor]:
    """With 64 inputs and 32 outputs; and its weights."""
    weight = torch.randn((32, 64), generator=torch.Generator().manual_seed(1)).half() / 8
    tensors, whole = written(kind, weight, {})
    layer = OPS.mixed_precision_ops({}, torch.float16).Linear(64, 32, bias=False)
    layer.load_state_dict(tensors)
    return layer.eval(), whole


def written(kind: Format, weight: torch.Tensor, more: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a checkpoint has of a layer's weight; and the values that this holds, in fp32."""
    held = QUANT.QuantizedTensor.from_float(weight, kind.layout, **kind.options)
    how = json.dumps({"format": kind.name, **kind.said, **(more or {})}).encode()
    return held.state_dict("weight") | {"comfy_quant": torch.tensor(list(how), dtype=torch.uint8)}, (
        held.float().dequantize()
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without what ComfyUI says of a layer that has no weights yet."""
    logging = import_module("logging")
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def switches(patcher: Any) -> list[Any]:
    """All that decides which products are made."""
    base = OPS.CastWeightBiasOp
    layers = [getattr(layer, "_full_precision_mm", None) for layer in patcher.model.diffusion_model.modules()]
    own = [vars(layer).get("_full_precision_mm") for layer in patcher.model.diffusion_model.modules()]
    return [OPS.fp8_linear, getattr(OPS, "linear_input_act", None), sorted(vars(base)), layers, own]


def sampled(patcher: Any) -> torch.Tensor:
    return sample(patcher, WAN, steps=STEPS)


def denoised(patcher: Any) -> torch.Tensor:
    """One call of the model, as a sampler makes it."""
    generator = torch.Generator().manual_seed(2)
    latents, context = (torch.randn(shape, generator=generator) for shape in (WAN.latents, WAN.context))
    options = {"wrappers": patcher.wrappers}
    return patcher.model.apply_model(latents, torch.tensor([3.0]), c_crossattn=context, transformer_options=options)


@torch.inference_mode()
def made(product: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """None where it cannot be made on a CPU."""
    try:
        return product().float()
    except ValueError as error:
        if "CPU does not support" not in str(error):
            raise
        return None


def difference(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> float | None:
    if ours is None or theirs is None:
        return None
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
