"""What this pack encodes and samples, wired into ComfyUI's own nodes: run in its interpreter, judged in
test_native_travel.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node
from native_models import LAYOUTS, make_model, make_vae, prompts
from native_vae_cases import CALLS, latents, run

labels = import_module("custom_nodes_pack.comfyui_host.tagged_tensor")
SD15 = LAYOUTS["sd15"]
MODEL, SAMPLER = "CogVideoX-2B", "Sample CogVideoX"


def sampled(patcher: Any, context: torch.Tensor) -> torch.Tensor:
    prompt = [[context, {}]]
    noise = torch.randn(SD15.streams[0], generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        return import_module("comfy.sample").sample(
            patcher,
            noise,
            2,
            7.0,
            "euler",
            "normal",
            prompt,
            prompt,
            torch.zeros_like(noise),
            seed=1,
            disable_pbar=True,
        )


def case_prompt() -> dict[str, Any]:
    foreign = labels.prompt_of(torch.randn(1, 226, 4096), MODEL, SAMPLER)
    right, _ = prompts(SD15)
    patcher = make_model(SD15)
    return {
        "ksampler": error_of(lambda: sampled(patcher, foreign)),
        "guarded": error_of(lambda: sampled(node("model", make_model(SD15)), foreign)),
        "next": sampled(patcher, right[0][0]),
        "right": sampled(patcher, labels.prompt_of(right[0][0], MODEL, SAMPLER)),
    }


def case_latents() -> dict[str, Any]:
    foreign = labels.latents_of(torch.randn(1, 16, 3, 6, 6), MODEL)
    vae = make_vae(torch.float32)
    return {
        "decode": error_of(lambda: vae.decode(foreign)),
        "guarded": error_of(lambda: node("vae", make_vae(torch.float32)).decode(foreign)),
        "next": run(CALLS["decode"], vae),
        "right": run(lambda vae: vae.decode(labels.latents_of(latents(), MODEL)), vae),
    }
