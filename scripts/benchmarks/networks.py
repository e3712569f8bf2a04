"""The networks of all_layers_scaled.py and scaled_bytes.py: the published denoisers of denoisers.py, and others that
ComfyUI runs natively, in diffusers' classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import denoisers
import diffusers
import torch
from denoisers import Call, Floats, Size

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Network:
    """A network and one step of it, at named sizes.

    "full": as published. "cut": fewer, narrower layers, to be timed on a CPU. "deep": all layers, so narrow that almost
    only the host's work is left.
    """

    said: str  # its name and size, for people
    make: Callable[[str, torch.device, torch.dtype], torch.nn.Module]  # size, device, dtype
    step: Callable[[Any, str, torch.device, torch.dtype], Call]  # config, size, device, dtype


def _published(name: str, said: str, *, deep: denoisers.Size | None = None) -> Network:
    model = denoisers.MODELS[name]
    sizes = {**model.sizes, **({"deep": deep} if deep else {})}
    return Network(
        said,
        lambda size, device, dtype: denoisers.build(model, sizes[size], device, dtype),
        lambda config, size, device, dtype: denoisers.step(model, config, sizes[size], device, dtype),
    )


def _other(kind: str, said: str, configs: Mapping[str, Config], call: Callable[[Any, str, Floats], Call]) -> Network:
    """Return a network. configs: by size. call: makes a step's arguments from config and size."""

    def make(size: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
        return denoisers.random_weights(lambda: getattr(diffusers, kind)(**configs[size]), device, dtype)

    def step(config: Any, size: str, device: torch.device, dtype: torch.dtype) -> Call:
        return denoisers.on_device(device, call(config, size, denoisers.random_floats(device, dtype)))

    return Network(said, make, step)


def _cogview4(config: Any, size: str, floats: Floats) -> Call:
    del size
    return denoisers.cogview(config, Size(1024, 1024), floats)


def _sdxl(config: Any, size: str, floats: Floats) -> Call:
    side = {"full": 128, "cut": 32, "deep": 8}[size]
    numbers = 6 * config.addition_time_embed_dim
    pooled = config.projection_class_embeddings_input_dim - numbers
    return {
        "sample": floats(2, config.in_channels, side, side),
        "timestep": torch.tensor(500),
        "encoder_hidden_states": floats(2, 77, config.cross_attention_dim),
        "added_cond_kwargs": {"text_embeds": floats(2, pooled), "time_ids": floats(2, 6)},
    }


def _flux(config: Any, size: str, floats: Floats) -> Call:
    del size
    return {
        "hidden_states": floats(1, 64 * 64, config.in_channels),
        "encoder_hidden_states": floats(1, 512, config.joint_attention_dim),
        "pooled_projections": floats(1, config.pooled_projection_dim),
        "timestep": floats(1),
        "guidance": floats(1),
        "img_ids": floats(64 * 64, 3),
        "txt_ids": floats(512, 3),
    }


def _qwen(config: Any, size: str, floats: Floats) -> Call:
    del size
    return {
        "hidden_states": floats(2, 64 * 64, config.in_channels),
        "encoder_hidden_states": floats(2, 128, config.joint_attention_dim),
        "timestep": floats(2),
        "img_shapes": [[(1, 64, 64)]] * 2,
    }


def _wan(config: Any, size: str, floats: Floats) -> Call:
    del size
    return {
        "hidden_states": floats(2, config.in_channels, 21, 60, 104),
        "encoder_hidden_states": floats(2, 512, config.text_dim),
        "timestep": torch.tensor([500, 500]),
    }


_SDXL = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
}


def _sdxl_of(width: int, heads: int, layers: tuple[int, int, int], text: int, embedding: int, pooled: int) -> Config:
    return _SDXL | {
        "block_out_channels": (width, 2 * width, 4 * width),
        "attention_head_dim": (heads, 2 * heads, 4 * heads),  # the number of heads, in spite of its name
        "transformer_layers_per_block": layers,
        "cross_attention_dim": text,
        "addition_time_embed_dim": embedding,
        "projection_class_embeddings_input_dim": 6 * embedding + pooled,
    }


_DEEP_VIDEO = {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32, "time_embed_dim": 32}
_DEEP_VIDEO |= {"sample_width": 4, "sample_height": 4, "sample_frames": 1, "max_text_seq_length": 16}

NETWORKS: dict[str, Network] = {
    "cogvideox-2b": _published(
        "cogvideox-2b", "CogVideoX-2B, 49 frames, 720×480", deep=denoisers.Size(32, 32, 1, _DEEP_VIDEO)
    ),
    "cogvideox-5b": _published("cogvideox-5b", "CogVideoX-5B, 49 frames, 720×480"),
    "cogview3-plus": _published("cogview3-plus", "CogView3-Plus, 1024²"),
    "cogview4": _other(
        "CogView4Transformer2DModel",
        "CogView4-6B, 1024²",
        {"full": {"num_layers": 28, "attention_head_dim": 128, "num_attention_heads": 32}},
        _cogview4,
    ),
    "svd-xt": _published("svd-xt", "SVD-XT, 25 frames, 1024×576"),
    "sdxl": _other(
        "UNet2DConditionModel",
        "SDXL, 1024²",
        {
            "full": _sdxl_of(320, 5, (1, 2, 10), text=2048, embedding=256, pooled=1280),
            "cut": _sdxl_of(64, 1, (1, 1, 2), text=512, embedding=64, pooled=128),
            "deep": _sdxl_of(32, 1, (1, 2, 10), text=32, embedding=8, pooled=32),
        },
        _sdxl,
    ),
    "flux": _other("FluxTransformer2DModel", "Flux.1-dev, 1024²", {"full": {"guidance_embeds": True}}, _flux),
    "qwen-image": _other("QwenImageTransformer2DModel", "Qwen-Image, 1024²", {"full": {}}, _qwen),
    "wan-14b": _other("WanTransformer3DModel", "Wan 2.1 14B, 81 frames, 832×480", {"full": {}}, _wan),
}
