"""A whole pipeline of published size with random weights, in a folder like a downloaded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from comfyui_onediff_guard.demo.small_model import VARIANTS, save, scheduler
from comfyui_onediff_guard.demo.small_tokenizer import train_tokenizer, write_json
from denoisers import build, random_weights
from subject import Subject

Config = Mapping[str, Any]
Parts = dict[str, Any]  # of a diffusers pipeline, by name
Random = Callable[[Callable[[], torch.nn.Module]], torch.nn.Module]  # makes a module with random weights

COGVIDEOX_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 256, 512),
    "down_block_types": ("CogVideoXDownBlock3D",) * 4,
    "up_block_types": ("CogVideoXUpBlock3D",) * 4,
    "layers_per_block": 3,
    "latent_channels": 16,
}
SVD_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "layers_per_block": 2,
}
_COGVIEW_VAE: dict[str, Any] = {
    "block_out_channels": (128, 512, 1024, 1024),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 3,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 1.0,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
_T5_XXL = {
    "vocab_size": 384,  # of the small tokenizer
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
}
_CLIP_H = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "projection_dim": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
}
_SMALL: dict[str, Config] = {  # changes for the tiny ones
    "t5": {"vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "clip": {"hidden_size": 32, "intermediate_size": 64, "projection_dim": 16}
    | {"num_hidden_layers": 2, "num_attention_heads": 4},
    "video vae": {"block_out_channels": (8, 16, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
    | {"sample_width": 160, "sample_height": 96},
    "vae": {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1},
}
_IMAGES = {
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "CLIPImageProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 224},
}


def write(subject: Subject, folder: Path, dtype: torch.dtype, *, small: bool) -> Path:
    """Write the pipeline of a subject's model, with a denoiser of its size. The tokenizer is small.

    small: all other parts are tiny, too.
    """
    family = subject.model.family

    def random(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
        return random_weights(make, subject.device, dtype)

    folder.mkdir()
    parts = _PARTS[family.pipeline](folder, random, _SMALL if small else {})
    parts[family.denoiser] = build(subject.model, subject.size, subject.device, dtype)
    pipeline = getattr(diffusers, family.pipeline)(**parts)
    named = {"feature_extractor": "CLIPImageProcessor"} if "feature_extractor" in parts else {}
    save(pipeline, folder, dtype, named=named)
    return folder


def _text(folder: Path, random: Random, small: Mapping[str, Config]) -> Parts:
    from transformers import T5Config, T5EncoderModel

    config: dict[str, Any] = {**_T5_XXL, **small.get("t5", {})}
    t5 = random(lambda: T5EncoderModel(T5Config(feed_forward_proj="gated-gelu", **config)))
    return {"tokenizer": train_tokenizer(folder / "tokenizer"), "text_encoder": t5}


def _cogvideox(folder: Path, random: Random, small: Mapping[str, Config]) -> Parts:
    config = COGVIDEOX_VAE | {"scaling_factor": VARIANTS["2b"].vae_scaling, **small.get("video vae", {})}
    vae = random(lambda: diffusers.AutoencoderKLCogVideoX(**config))
    return {**_text(folder, random, small), "vae": vae, "scheduler": scheduler(VARIANTS["2b"])}


def _cogview(folder: Path, random: Random, small: Mapping[str, Config]) -> Parts:
    vae = random(lambda: diffusers.AutoencoderKL(**{**_COGVIEW_VAE, **small.get("vae", {})}))
    schedule = diffusers.CogVideoXDDIMScheduler.from_config(scheduler(VARIANTS["2b"]).config, snr_shift_scale=4.0)
    return {**_text(folder, random, small), "vae": vae, "scheduler": schedule}


def _svd(folder: Path, random: Random, small: Mapping[str, Config]) -> Parts:
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    clip: dict[str, Any] = {**_CLIP_H, **small.get("clip", {})}
    vae = SVD_VAE | {"latent_channels": 4, "scaling_factor": 0.18215, **small.get("vae", {})}
    (folder / "feature_extractor").mkdir()
    write_json(folder / "feature_extractor" / "preprocessor_config.json", _IMAGES)
    return {
        "image_encoder": random(lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**clip))),
        "vae": random(lambda: diffusers.AutoencoderKLTemporalDecoder(**vae)),
        "scheduler": diffusers.EulerDiscreteScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            use_karras_sigmas=True,
            sigma_min=0.002,
            sigma_max=700.0,
            timestep_spacing="leading",
            timestep_type="continuous",
            steps_offset=1,
        ),
        "feature_extractor": CLIPImageProcessor.from_pretrained(folder / "feature_extractor"),
    }


_PARTS: dict[str, Callable[[Path, Random, Mapping[str, Config]], Parts]] = {
    "CogVideoXPipeline": _cogvideox,
    "CogView3PlusPipeline": _cogview,
    "StableVideoDiffusionPipeline": _svd,
}
