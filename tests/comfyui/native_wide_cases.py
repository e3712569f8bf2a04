"""Every family with every layer wide, and what else the guard's precision asks for: run in ComfyUI's interpreter,
judged in test_native_wide.py."""

from __future__ import annotations

import os
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from native_beside_cases import lora_on, lowvram
from native_family_cases import Figures, case_about, tried, with_its_twin
from native_in_comfyui import error_of, node, on, said
from native_models import LAYOUTS, Layout, make_model, sample

torch.set_num_threads(1)  # so small that threads cost more than they gain
__all__ = ["case_about"]
WEIGHTS = {  # dtype, and what they are cast to; the second as ComfyUI has models that it refuses fp16 for
    "fp16": (torch.float16, None),
    "bf16 in fp32": (torch.bfloat16, torch.float32),
}
HEATS = ("hot in the stream", "hot inside")
HEALTHY = "healthy"
BESIDE = ("sd15", "flux", "qwen_image", "wan")
STEPS = 2
HOTTEST = 6e4  # |w| of a hot layer: of fp16's 65504
MODULATES = re.compile("mod|norm|emb|ada")  # in the names of layers: they neither write to the stream nor widen it
SQUARE = dict.fromkeys(("Lumina2", "ZImage"), "feed_forward.w2.weight")  # their writers, as wide as what they read


def case_families() -> Figures:
    """By "family, weights, heat". Without guidance, which takes out what both halves round alike: the coarser they
    round, the more of it that is."""
    found: Figures = {}
    for name, layout in LAYOUTS.items():
        for heat in (HEALTHY, *HEATS):
            for weights, dtypes in WEIGHTS.items():
                heated = replace(layout if heat == HEALTHY else hot(layout, heat), cfg=1.0)
                make = partial(with_its_twin, heated, *dtypes, hot=heat != HEALTHY)
                found[f"{name}, {weights}, {heat}"] = tried(_family, heated, make)
    return found


def hot(layout: Layout, heat: str) -> Layout:
    """With a layer of its block that overflows in the named way: what writes to the stream makes few of many, and what
    stays inside makes many of few."""
    stored = make_model(layout).model.diffusion_model.get_submodule(layout.block).state_dict()
    layers = [name for name, weight in stored.items() if weight.ndim > 1 and name.endswith("weight")]
    layers = [name for name in layers if not MODULATES.search(name)]

    def widens(name: str) -> float:
        return stored[name].shape[0] / stored[name].shape[1]

    inside = heat == "hot inside"
    chosen = max(layers, key=widens) if inside else SQUARE.get(layout.config) or min(reversed(layers), key=widens)
    return replace(layout, hot={f"{layout.block}.{chosen}": HOTTEST / stored[chosen].abs().max().item()})


def _family(layout: Layout, patcher: Any, exact: Any) -> Figures:
    stored = held(patcher)
    plain, reference = (sample(model, layout, steps=STEPS) for model in (patcher, exact))
    wide, text = guarded(patcher, layout, "fp16")
    again = sample(patcher, layout, steps=STEPS)
    in_bf16, _ = guarded(patcher, layout, "bf16")
    (weight,) = layout.hot
    return {
        "weight": weight,
        "plain": distance(layout, plain, reference),
        "wide": distance(layout, wide, reference),
        "bf16": distance(layout, in_bf16, reference),
        "said": text,
        "as before": same(plain, again) and all(map(same, stored, held(patcher))),
    }


def case_learned() -> Figures:
    """By family: two runs of one guard, whose model fails in fp16; and one of another guard, later."""
    found: Figures = {}
    folder = os.environ["ONEDIFF_GUARD_PROFILES"]
    for name, layout in LAYOUTS.items():
        with patch.dict(os.environ, ONEDIFF_GUARD_PROFILES=f"{folder}/{name}"):  # some are one network
            found[name] = tried(_learned, layout, partial(with_its_twin, layout, hot=True))
    return found


def _learned(layout: Layout, patcher: Any, exact: Any) -> Figures:
    reference = sample(exact, layout, steps=STEPS)
    learner = node("model", patcher, scope="learned")
    found: Figures = {}
    for run in ("first", "second", "after a restart"):
        said.clear()
        if run == "after a restart":
            learner = node("model", patcher, scope="learned")
        found[run] = distance(layout, sample(learner, layout, steps=STEPS), reference)
        found[f"{run} said"] = list(said)
    return found


def case_learned_of_others() -> Figures:
    """What a run learned is known to later guards of the same model, and not to those of its kin."""
    layout, found = LAYOUTS["sd15"], {}
    hot, healthy = make_model(layout, hot=True), make_model(layout)
    plain = sample(healthy, layout, steps=STEPS)

    def run(name: str, patcher: Any, around: Any = nullcontext) -> torch.Tensor:
        said.clear()
        with around():
            made = sample(node("model", patcher, scope="learned"), layout, steps=STEPS)
        found[name] = said[-1]
        return made

    run("first", hot)
    found["healthy kept its bits"] = same(plain, run("healthy", healthy))
    run("LoRA", lora_on(hot))
    run("LoRA again", lora_on(make_model(layout, hot=True)))
    run("LoRA as it goes", lora_on(make_model(layout, hot=True)), lowvram)
    run("in part", make_model(layout, hot=True), lowvram)
    run("again", hot)
    return found


def case_precisions() -> Figures:
    """By "family, what ComfyUI computes in, precision, card": whether that has the bits of ComfyUI's own run; how far
    it is from fp32; and what is said."""
    asked = [("auto", card) for card in ("cpu", "sm75", "sm80", "sm90")]
    asked += [(precision, "cpu") for precision in ("inherit", "bf16", "fp16 (plain)", "fp32")]
    found: Figures = {}
    for name in BESIDE:
        layout = LAYOUTS[name]
        for weights, dtypes in (WEIGHTS | {"bf16": (torch.bfloat16, None)}).items():
            patcher, exact = with_its_twin(layout, *dtypes)
            plain, reference = (sample(model, layout, steps=STEPS) for model in (patcher, exact))
            for precision, card in asked:
                with on(card):
                    made, text = guarded(patcher, layout, precision)
                found[f"{name}, {weights}, {precision}, {card}"] = {
                    "same bits": same(made, plain),
                    "distance": distance(layout, made, reference),
                    "said": text,
                }
    return found


def case_options() -> Figures:
    """ComfyUI started such that it computes in fp32, on a card where precision auto is fp16 otherwise."""
    layout, found = LAYOUTS["flux"], {}
    options = import_module("comfy.cli_args").args
    patcher, _ = with_its_twin(layout, *WEIGHTS["bf16 in fp32"])
    for option in ("fp32_unet", "force_fp32"):
        with on("sm75"), patch.object(options, option, True, create=True):
            made, text = guarded(patcher, layout, "auto")
        found[option] = {"same bits": same(made, sample(patcher, layout, steps=STEPS)), "said": text}
    return found


def case_no_bf16() -> Figures:
    """On a device that has no bf16."""
    architectures = sys.modules["custom_nodes_pack.precision.arch"].ARCHITECTURES
    with patch.dict(architectures, {"mps": replace(architectures["mps"], bf16="none")}), on("mps"):
        return {"said": guarded(make_model(LAYOUTS["flux"]), LAYOUTS["flux"], "bf16")[1]}


def case_plain() -> Figures:
    """fp16 as it is, of a model that overflows."""
    found: Figures = {}
    for name in BESIDE:
        patcher = make_model(LAYOUTS[name], hot=True)
        made, text = guarded(patcher, LAYOUTS[name], "fp16 (plain)")
        found[name] = {"same bits": same(made, sample(patcher, LAYOUTS[name], steps=STEPS)), "said": text}
    return found


def case_scripted() -> Figures:
    """A layer that PyTorch has compiled: nobody can have it multiply otherwise."""
    found: Figures = {}
    for name, at in {"flux": "img_in", "wan": "blocks.1.ffn.0"}.items():
        patcher = make_model(LAYOUTS[name])
        parent, _, own = at.rpartition(".")
        layer = patcher.model.diffusion_model.get_submodule(at)
        plain = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.float16)
        plain.load_state_dict(layer.state_dict())
        scripted = torch.jit.script(plain.eval().requires_grad_(False))
        setattr(patcher.model.diffusion_model.get_submodule(parent), own, scripted)
        made, text = guarded(patcher, LAYOUTS[name], "fp16")
        found[name] = {"same bits": same(made, sample(patcher, LAYOUTS[name], steps=STEPS)), "said": text}
    return found


@torch.jit.script
def scripted_product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(given, weight, bias)


class ByScript(torch.nn.Module):
    """A layer of ComfyUI's whose product takes two tensors of one dtype: a rerun has them in float32, wide layers have
    not."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as PyTorch names it
        weight, bias = import_module("comfy.ops").cast_bias_weight(self.layer, input)
        return scripted_product(input, weight, bias)


def case_not_learned() -> Figures:
    """What fails in fp16, and cannot be wide."""
    layout = LAYOUTS["wan"]
    patcher, exact = with_its_twin(layout, hot=True)
    attention = patcher.model.diffusion_model.blocks[1].self_attn
    attention.o = ByScript(attention.o)
    return tried(_learned, layout, partial(_pair, patcher, exact))


def _pair(*models: Any) -> Any:
    return models


def guarded(
    patcher: Any, layout: Layout, precision: str, *, steps: int = STEPS, **policy: Any
) -> tuple[torch.Tensor, str]:
    """A run, and what is shown on the guard's node in the end. Where it is refused: zeros, and why."""
    said.clear()
    made: list[torch.Tensor] = []
    patcher = node("model", patcher, precision=precision, **policy)
    refused = error_of(lambda: made.append(sample(patcher, layout, steps=steps)))
    return (torch.zeros(layout.latents), refused) if refused else (made[0], said[-1])


def held(patcher: Any) -> list[torch.Tensor]:
    return [weight.clone() for weight in patcher.model.state_dict().values()]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit; one NaN is as another."""
    return one.dtype is other.dtype and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


def distance(layout: Layout, made: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference, as a share of the norm, of the stream that has the largest. NaN where one has any."""
    streams = zip(layout.split(made.float()), layout.split(exact.float()), strict=True)
    return torch.stack([(one - other).norm() / other.norm() for one, other in streams]).max().item()
