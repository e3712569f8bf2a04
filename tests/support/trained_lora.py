"""A small LoRA for a small model's denoiser, saved like diffusers' training scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora


def train_lora(
    folder: Path, model: Path, name: str = "a.safetensors", layers: tuple[str, ...] = ("to_q",), seed: int | None = None
) -> Lora:
    """folder: to save it in. model: a diffusers folder with a transformer."""
    import diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    kind = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))["_class_name"]
    student: Any = getattr(diffusers, kind).from_pretrained(model / "transformer")
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        student.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights=False, target_modules=[*layers]))
    diffusers.CogVideoXPipeline.save_lora_weights(  # same format for other families
        folder, transformer_lora_layers=get_peft_model_state_dict(student), weight_name=name
    )
    return Lora(folder / name)
