"""Networks of ComfyUI's that remember earlier calls, under the guard. Cases of test_native_caches.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_layouts import Layout
from native_models import SUPPORTED, in_fp32, make_model
from native_video_layouts import WAN

HOT = {"blocks.0.ffn.0.weight": 1e5}
CAUSAL = Layout(
    "WAN21_CausalAR_T2V",
    WAN | {"image_model": "wan2.1", "model_type": "t2v", "causal_ar": True},
    latents=(1, 16, 3, 8, 8),
    context=(1, 7, 32),
    hot=HOT,
    cfg=1.0,
)
HIDREAM = Layout(
    "HiDreamO1",
    {
        "image_model": "hidream_o1",
        "text_config_overrides": {
            "vocab_size": 151700,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rope_dims": [4, 6, 6],
        },
        "vision_config_overrides": {
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "depth": 1,
            "deepstack_visual_indexes": (),
        },
    },
    latents=(1, 3, 64, 64),
    context=(1, 7, 64),
    hot={"language_model.layers.0.mlp.up_proj.weight": 8e4},
    cfg=1.0,
)


def fail(patcher: Any, calls: set[int]) -> None:
    """Have these of a MODEL's calls in half precision come out infinite."""
    made: list[int] = []

    def spoil(network: torch.nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        if result.dtype == torch.float32:
            return result
        made.append(1)
        return result * float("inf") if len(made) - 1 in calls else result

    patcher.model.diffusion_model.register_forward_hook(spoil)


def sampled(patcher: Any, layout: Layout, sampler: Any, sigmas: torch.Tensor, **conditions: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(layout.latents, generator=generator)
    prompt = [[torch.randn(layout.context, generator=generator), conditions]]
    sample = import_module("comfy.sample").sample_custom
    with torch.inference_mode():
        return sample(
            patcher,
            noise,
            layout.cfg,
            sampler,
            sigmas,
            prompt,
            prompt,
            torch.zeros(layout.latents),
            disable_pbar=True,
            seed=1,
        )


def case_autoregressive() -> dict[str, Any]:
    """Causal Wan: blocks of frames, which attend to keys and values of those before them."""
    if not hasattr(SUPPORTED, CAUSAL.config):
        return {}
    sampler = import_module("comfy.samplers").ksampler("ar_video", {"num_frame_per_block": 1})
    sigmas = torch.tensor([1.0, 0.6, 0.0])
    results: dict[str, Any] = {}
    for name, hot, calls in (("healthy", False, set()), ("some", False, {1, 2, 4}), ("hot", True, set())):
        model = make_model(CAUSAL, hot=hot)
        fail(model, calls)
        results[f"{name}/guarded"] = sampled(node("model", model), CAUSAL, sampler, sigmas)
        results[f"{name}/said"] = said[-1]
        results[f"{name}/fp32"] = sampled(in_fp32(model, CAUSAL), CAUSAL, sampler, sigmas)
        if not hot:
            results[f"{name}/plain"] = sampled(make_model(CAUSAL), CAUSAL, sampler, sigmas)
    return results


def case_hidream() -> dict[str, Any]:
    """HiDream-O1 keeps the prompt's keys and values on itself: for later steps, and for later runs."""
    if not hasattr(SUPPORTED, HIDREAM.config):
        return {}
    sampler = import_module("comfy.samplers").ksampler("euler")
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.0])
    tokens = {"text_input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
    results: dict[str, Any] = {}
    for name, hot in (("healthy", False), ("hot", True)):
        model = make_model(HIDREAM, hot=hot)
        guarded = node("model", model)
        for run in ("first", "second"):
            results[f"{name}/{run}"] = sampled(guarded, HIDREAM, sampler, sigmas, **tokens)
            results[f"{name}/{run}_said"] = said[-1]
        results[f"{name}/remembers"] = len(model.model.diffusion_model._kv_cache_entries)
        results[f"{name}/fp32"] = sampled(in_fp32(model, HIDREAM), HIDREAM, sampler, sigmas, **tokens)
    plain = make_model(HIDREAM)
    results["healthy/plain"] = sampled(plain, HIDREAM, sampler, sigmas, **tokens)
    stopped = make_model(HIDREAM, hot=True)
    results["stopped/error"] = error_of(
        lambda: sampled(node("model", stopped, on_failure="stop"), HIDREAM, sampler, sigmas, **tokens)
    )
    results["stopped/remembers"] = len(stopped.model.diffusion_model._kv_cache_entries)
    return results


def case_animate() -> dict[str, Any]:
    """Wan-Animate 2 with its cache: the pose video's activations, made at the first step."""
    if not hasattr(SUPPORTED, "WAN_Animate2"):
        return {}
    sizes = WAN | {"image_model": "wan2.1", "model_type": "animate2", "in_dim": 36}
    layout = Layout("WAN_Animate2", sizes, latents=(1, 16, 3, 8, 8), context=(1, 7, 32), hot=HOT, cfg=1.0)
    sampler = import_module("comfy.samplers").ksampler("euler")
    sigmas = torch.tensor([1.0, 0.6, 0.0])
    generator = torch.Generator().manual_seed(7)
    conditions = {"pose_video_latent": torch.randn((1, 16, 2, 8, 8), generator=generator)}
    cache = import_module("comfy_extras.nodes_wan").WanAnimate2Cache
    model = make_model(layout, hot=True)
    cached = cache.execute(model, "cpu").args[0]
    return {
        "guarded": sampled(node("model", cached), layout, sampler, sigmas, **conditions),
        "said": said[-1],
        "uncached": sampled(node("model", model), layout, sampler, sigmas, **conditions),
        "fp32": sampled(in_fp32(model, layout), layout, sampler, sigmas, **conditions),
    }


class Prefix:
    """Keys and values that a network computes at its first call, as Qwen-Image 2.1 keeps those of its prefix."""

    __slots__ = ("layers", "network")

    def __init__(self, network: torch.nn.Module):
        self.layers: dict[int, list[torch.Tensor]] = {}
        self.network = network

    def through(self, _layer: torch.nn.Module, _given: Any, result: torch.Tensor) -> torch.Tensor:
        first = self.layers.setdefault(0, [result * 0 + 1])[0]
        return result + first.to(result.dtype)


def case_prefix() -> dict[str, Any]:
    """A network that keeps what it computed first in an object; and one that writes to what it is given."""
    layout = Layout(
        "WAN21_T2V", WAN | {"image_model": "wan2.1", "model_type": "t2v"}, (1, 16, 3, 8, 8), (1, 7, 32), hot=HOT
    )
    sampler, sigmas = import_module("comfy.samplers").ksampler("euler"), torch.tensor([1.0, 0.6, 0.0])
    results: dict[str, Any] = {}
    for name in ("guarded", "fp32"):
        model = make_model(layout, hot=True)
        network = (model if name == "guarded" else (model := in_fp32(model, layout))).model.diffusion_model
        network.prefix = Prefix(network)
        network.blocks[0].ffn.register_forward_hook(network.prefix.through)
        network.blocks[1].register_forward_pre_hook(lambda _block, given: (given[0].mul_(2), None)[1])
        asked = node("model", model) if name == "guarded" else model
        results[name] = sampled(asked, layout, sampler, sigmas)
    return results | {"said": said[-1]}
