"""LoRAs trained on small diffusers denoisers, and their outputs in diffusers itself."""

from __future__ import annotations

import copy
import functools
import json

import diffusers
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, compiled
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW4
from comfyui_onediff_guard.pipelines.models.lora import Lora, with_loras
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

COMMON = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 3, "time_embed_dim": 32}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2"]


@functools.cache
def video_model(**config):
    """(CogVideoX denoiser, one call's arguments)"""
    config |= {"max_text_seq_length": 6, "sample_height": 8, "sample_width": 12, "sample_frames": 9}
    inputs, angles = {}, torch.linspace(0, 3, 3 * 4 * 6 * 16).reshape(-1, 16)
    if config.get("use_rotary_positional_embeddings"):
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    return build(diffusers.CogVideoXTransformer3DModel, config, (2, 3, 16, 8, 12), inputs)


@functools.cache
def picture_model():
    """(CogView4 denoiser, one call's arguments)"""
    pixels = torch.tensor([[64.0, 96.0]] * 2)
    inputs = {"original_size": pixels, "target_size": pixels, "crop_coords": torch.zeros(2, 2)}
    config = {"condition_dim": 8, "pos_embed_max_size": 8}
    return build(diffusers.CogView4Transformer2DModel, config, (2, 16, 8, 12), inputs)


def build(cls, config, latents, inputs):
    torch.manual_seed(0)
    inputs |= {"hidden_states": torch.randn(latents), "encoder_hidden_states": torch.randn(2, 6, 24)}
    inputs |= {"timestep": torch.tensor([700, 700]), "return_dict": False}
    return cls(**COMMON, **config, text_embed_dim=24).eval().requires_grad_(False), inputs


ROTARY = {"use_rotary_positional_embeddings": True}
MODELS = {
    "CogVideoX-2B": (video_model, COGVIDEOX, diffusers.CogVideoXPipeline),
    "CogVideoX-5B": (lambda: video_model(**ROTARY), COGVIDEOX, diffusers.CogVideoXPipeline),
    "CogView4": (picture_model, COGVIEW4, diffusers.CogView4Pipeline),
}
denoiser, call = video_model()
INDUCTOR = BackendChoice("inductor", "as you chose")


def training(folder):
    """train(denoiser, seed=…, metadata=…, **config of peft) → a LoRA file as diffusers' training scripts save it"""

    @functools.cache
    def train(model=denoiser, seed=1, metadata=False, targets=tuple(TARGETS), **config):
        student = copy.deepcopy(model)
        torch.manual_seed(seed)
        config = {"r": 4, "lora_alpha": 4, "init_lora_weights": False, "target_modules": list(targets)} | config
        student.add_adapter(LoraConfig(**config))
        name = f"number{len(list(folder.iterdir()))}.safetensors"
        settings = student.peft_config["default"].to_dict() if metadata else None
        diffusers.CogVideoXPipeline.save_lora_weights(  # CogView4's does the same
            folder,
            transformer_lora_layers=get_peft_model_state_dict(student),
            weight_name=name,
            transformer_lora_adapter_metadata=settings,
        )
        return folder / name

    return train


def by_diffusers(paths, scales, model=denoiser, pipeline=diffusers.CogVideoXPipeline, call=call):
    """The output of diffusers' own pipe.load_lora_weights and pipe.set_adapters."""
    model = copy.deepcopy(model)
    parts = {"tokenizer": None, "text_encoder": None, "vae": None, "scheduler": diffusers.CogVideoXDDIMScheduler()}
    pipe = pipeline(transformer=model, **parts)
    for path in paths:
        pipe.load_lora_weights(path.parent, weight_name=path.name, adapter_name=path.stem)
    pipe.set_adapters([path.stem for path in paths], scales)
    return model.eval()(**call)[0]  # diffusers leaves a LoRA's dropout on


def apply_loras(paths, scales, model=denoiser, family=COGVIDEOX):
    return with_loras(model, [Lora(path, scale) for path, scale in zip(paths, scales, strict=True)], family)


def protected(model, family, *, in_layers):
    """The denoiser in fp16 with every layer scaled: by rows, then by its plan, by a mode or in layers."""

    def compile_nothing(half, _key, inside):
        return compiled(half, family.blocks, BackendChoice("eager", ""), inside=inside)

    how = {"blocks": block_names(model, family.blocks), "compiled": compile_nothing} if in_layers else {}
    return build_half_precision_forward(model, NOTHING, "fp16", all_layers_scaled=True, **how).run


def changed(path, tmp_path, value=None, metadata=None):
    """The file with another first tensor, or another header."""
    tensors = load_file(path)
    first = next(iter(tensors))
    if value is not None:
        tensors[first] = torch.full_like(tensors[first], value)
    return saved(tmp_path, tensors, {"lora_adapter_metadata": metadata} if metadata else None)


def saved(tmp_path, tensors, metadata=None):
    save_file(tensors, tmp_path / "changed.safetensors", metadata=metadata)
    return tmp_path / "changed.safetensors"


def header(path, tmp_path, **settings):
    return changed(path, tmp_path, metadata=json.dumps({f"transformer.{key}": v for key, v in settings.items()}))


def written(path, content):
    path.write_bytes(content)
    return path
