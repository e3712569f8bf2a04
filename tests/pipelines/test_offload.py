"""Offload on a machine without an accelerator, and the device that diffusers is told. On one: devices/on_it/."""

from __future__ import annotations

from typing import Any

import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.precision.shallow_copy import reporting
from diffusers import CogVideoXPipeline
from small_runs import opened, sampled


def test_without_an_accelerator_it_is_as_model_and_says_so(model_folder):
    def run(offload: str):
        stores._STORES.clear()
        handle = opened("2b", offload, device=torch.device("cpu"))
        rested = []
        handle.store.placement.to_host = lambda name, _module: rested.append(name)
        latents, report = sampled(handle, "2b")
        return latents, decode(handle, latents)[0], report, rested

    (right, frames, _, _), (latents, decoded, report, rested) = run("none"), run("group")
    assert torch.equal(latents, right) and torch.equal(decoded, frames)
    assert rested == ["text_encoder", "transformer", "vae"]
    assert "note: offload 'group' is as 'model' here: a CPU computes in main memory" in report.text()


def test_diffusers_is_told_the_device_that_computes(model_folder):
    pipe: Any = CogVideoXPipeline.from_pretrained(model_folder("2b"))
    pipe.transformer = reporting(pipe.transformer, device=torch.device("cuda", 1))
    pipe.text_encoder = pipe.vae = None
    assert pipe._execution_device == torch.device("cuda", 1)
    assert reporting(pipe.transformer, dtype=torch.float32).device == torch.device("cuda", 1), "and by a shell of it"
