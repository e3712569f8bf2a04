"""Runs in which each component that ComfyUI places drives out the others: with --disable-smart-memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from memory_cases import import_ours

SIZES = {"2b": (32, 32, 5), "5b-i2v": (96, 64, 9), "svd": (64, 64, 2)}


def case_called() -> dict[str, Any]:
    """{model: whether it ran: a component that is not on the card when it is called raises}"""
    import_ours()
    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from PIL import Image
    from small_families import BUILDERS

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, (width, height, frames) in SIZES.items():
            handle = moving.opened(BUILDERS[model](Path(folder) / model), "none", host.placement())
            positive, negative = encode_prompts(handle, ["a kite", "grey"])[0] if handle.family.prompt else (None, None)
            image = Image.new("RGB", (width, height), "grey") if handle.family.takes_image else None
            settings = SampleSettings(width, height, steps=2, seed=1, frames=frames, guidance_scale=5.0)
            latents, _ = sample(handle, positive, negative, settings, image=image)
            found[model] = bool(decode(handle, latents)[0].isfinite().all())
    return found
