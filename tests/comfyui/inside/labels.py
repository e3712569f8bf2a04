"""Prompts and latents of this pack: errors name their node if wired into another model's nodes; else no effect."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from guard_vae import decode, latents, run
from in_comfyui import error_of, guarded, module, node
from native_models import LAYOUTS, make_model, make_vae, prompts

labels = module("comfyui_host.tagged_tensor")
SD15 = LAYOUTS["sd15"]
MODEL, SAMPLER = "CogVideoX-2B", "Sample CogVideoX"


def sampled(patcher: Any, context: torch.Tensor) -> torch.Tensor:
    prompt = [[context, {}]]
    noise = torch.randn(SD15.latents, generator=torch.Generator().manual_seed(5))
    given = (2, 7.0, "euler", "normal", prompt, prompt, torch.zeros_like(noise))
    with torch.inference_mode():
        return import_module("comfy.sample").sample(patcher, noise, *given, seed=1, disable_pbar=True)


def test_tagged_prompt_names_its_sampler_and_works_where_it_fits() -> None:
    foreign = labels.prompt_of(torch.randn(1, 226, 4096), MODEL, SAMPLER)
    right = prompts(SD15)[0][0][0]
    patcher = make_model(SD15)
    for each in (patcher, guarded(make_model(SD15))):
        error = error_of(lambda each=each: sampled(each, foreign))
        assert "This CONDITIONING [1, 226, 4096] was encoded for CogVideoX-2B" in error, error
        assert "Connect it to Sample CogVideoX" in error
    assert torch.equal(sampled(patcher, right), sampled(patcher, labels.prompt_of(right, MODEL, SAMPLER)))


def test_tagged_latents_name_their_decoder_and_work_where_they_fit() -> None:
    foreign = labels.latents_of(torch.randn(1, 16, 3, 6, 6), MODEL)
    vae = make_vae(torch.float32)
    for each in (vae, node("vae", make_vae(torch.float32))):
        error = error_of(lambda each=each: each.decode(foreign))
        assert "These latents [1, 16, 3, 6, 6] were made by CogVideoX-2B" in error and "Decode Latents" in error, error
    assert torch.equal(run(decode, vae), run(lambda vae: vae.decode(labels.latents_of(latents(), MODEL)), vae))
