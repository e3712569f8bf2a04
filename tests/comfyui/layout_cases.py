"""Convolutions with their channels last, under ComfyUI's own memory manager."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from memory_cases import import_ours


def case_layout() -> dict[str, Any]:
    """Whether the weights of a decoder lie so, which layout pipelines begin with, and how far a decode is off the one
    with weights as they were read; on the card, and after the manager has moved them out and in again."""
    import_ours()
    from dataclasses import replace

    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.weights.placement import laid_out
    from small_families import BUILDERS

    management = sys.modules["comfy.model_management"]
    with tempfile.TemporaryDirectory() as folder:
        handle = moving.opened(BUILDERS["cogview3"](Path(folder) / "cogview3"), "none", host.placement())
        latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
        as_read = decode(replace(handle, compile_options=CompileOptions()), latents)[0]
        found: dict[str, Any] = {"begins": handle.compile_options.channels_last, "off": [], "lies so": [], "there": []}
        vae = handle.store.module("vae", "fp32", place=False)
        for _ in range(2):
            pictures = decode(handle, latents)[0]
            found["off"].append(float((pictures - as_read).norm() / as_read.norm()))
            found["lies so"].append(laid_out(vae, channels_last=True))
            found["there"].append(bool(moving.there(vae)))
            management.unload_all_models()
            found["there"].append(bool(moving.there(vae)))
    return found
