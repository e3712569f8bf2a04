"""Small models of ComfyUI's own, made by its own classes with random weights, and a sampling run of each.

Imported by ComfyUI's interpreter alone, after its options have been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import torch

CPU = torch.device("cpu")
UNET = {
    "image_size": 32,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "legacy": False,
    "context_dim": 24,
}
SVD = UNET | {
    "channel_mult": [1, 1],
    "in_channels": 8,
    "adm_in_channels": 768,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "model_channels": 64,  # a head has as many
    "use_temporal_resblock": True,
    "use_temporal_attention": True,
    "extra_ff_mix_layer": True,
    "use_spatial_context": True,
    "merge_strategy": "learned_with_images",
    "merge_factor": 0.0,
    "video_kernel_size": [3, 1, 1],
}
SDXL = UNET | {
    "in_channels": 4,
    "adm_in_channels": 2816,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "model_channels": 64,  # a head has as many
}
FLUX = {
    "image_model": "flux",
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 24,
    "context_in_dim": 32,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 8, 8],
    "theta": 10000,
    "qkv_bias": True,
    "guidance_embed": False,
}
WAN = {
    "image_model": "wan2.1",
    "model_type": "t2v",
    "dim": 96,  # 2 heads of 48, of which time has 16 and height and width have 16 each
    "ffn_dim": 128,
    "freq_dim": 32,
    "text_dim": 32,
    "num_heads": 2,
    "num_layers": 2,
}
LUMINA2 = {
    "image_model": "lumina2",
    "in_channels": 16,
    "dim": 48,  # 2 heads of 24
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.0,
    "qk_norm": True,
    "cap_feat_dim": 32,
    "axes_dims": [8, 8, 8],
    "axes_lens": [64, 64, 64],
}
Z_IMAGE = LUMINA2 | {
    "dim": 256,  # its modulation has as many, at least
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
    "z_image_modulation": True,
    "time_scale": 1000.0,
    "pad_tokens_multiple": 32,
}
ACE = {
    "audio_model": "ace",
    "num_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 2,
    "text_embedding_dim": 32,
    "lyric_encoder_vocab_size": 16,
    "lyric_hidden_size": 32,
    "ssl_latent_dims": [16, 16],
}
LYRICS = {"output_size": 32, "attention_heads": 2, "linear_units": 48, "num_blocks": 1}  # not in ACE-Step's config


@dataclass(frozen=True)
class Layout:
    config: str  # its class in comfy.supported_models
    sizes: Mapping[str, Any]
    latents: tuple[int, ...]
    context: tuple[int, ...]
    hot: Mapping[str, float]  # weight → what it is multiplied by, so that fp16 overflows and fp32 does not
    cfg: float = 4.0
    scheduler: str = "simple"
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # further conditions, by shape
    ones: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # those that are whole numbers: masks, tokens


LAYOUTS = {
    "sd15": Layout(
        "SD15",
        UNET | {"in_channels": 4, "adm_in_channels": None, "use_linear_in_transformer": False},
        latents=(1, 4, 8, 8),
        context=(1, 7, 24),
        hot={"input_blocks.1.0.in_layers.2.weight": 1e5},
    ),
    "svd": Layout(
        "SVD_img2vid",
        SVD,
        latents=(2, 4, 4, 4),
        context=(1, 1, 24),
        hot={"input_blocks.1.0.in_layers.2.weight": 1e5},
        scheduler="karras",
        extra={"concat_latent_image": (1, 4, 4, 4)},
    ),
    "flux": Layout(
        "FluxSchnell",
        FLUX,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"double_blocks.0.txt_mlp.2.weight": 8e4},
        cfg=1.0,
        extra={"pooled_output": (1, 24)},
    ),
    "sdxl": Layout(
        "SDXL",
        SDXL,
        latents=(1, 4, 8, 8),
        context=(1, 7, 24),
        hot={"input_blocks.1.0.in_layers.2.weight": 1e5},
        extra={"pooled_output": (1, 1280)},
    ),
    "wan": Layout(
        "WAN21_T2V",
        WAN,
        latents=(1, 16, 2, 8, 8),
        context=(1, 7, 32),
        hot={"blocks.0.ffn.0.weight": 1e5},
    ),
    "ace": Layout(
        "ACEStep",
        ACE,
        latents=(1, 8, 16, 8),
        context=(1, 7, 32),
        hot={"transformer_blocks.0.attn.to_out.0.weight": 1.2e5},
        ones={"conditioning_lyrics": (1, 5)},
    ),
    "lumina2": Layout(
        "Lumina2",
        LUMINA2,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"layers.0.feed_forward.w3.weight": 6e4},
        ones={"attention_mask": (1, 7)},
    ),
    "z_image": Layout(
        "ZImage",
        Z_IMAGE,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"layers.0.feed_forward.w3.weight": 6e4},
        ones={"attention_mask": (1, 7)},
    ),
}
SUPPORTED = import_module("comfy.supported_models")
if "txt_ids_dims" in import_module("comfy.ldm.flux.model").FluxParams.__annotations__:
    FLUX["txt_ids_dims"] = []
_ACE_STEP = import_module("comfy.ldm.ace.model")
_ACE_STEP.LyricEncoder = partial(_ACE_STEP.LyricEncoder, **LYRICS)
LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if hasattr(SUPPORTED, layout.config)}


def make_model(
    layout: Layout,
    dtype: torch.dtype = torch.float16,
    compute: torch.dtype | None = None,
    *,
    hot: bool = False,
    operations: Any = None,
) -> Any:
    """ComfyUI's ModelPatcher.

    dtype: of the weights. compute: what they are cast to at each layer; None where they are not cast. hot: overflows.
    operations: ComfyUI's layer classes; None where it shall choose.
    """
    config = getattr(SUPPORTED, layout.config)(dict(layout.sizes))
    config.set_inference_dtype(dtype, compute)
    config.custom_operations = operations
    model = config.get_model({}, "", device=CPU).eval().requires_grad_(False)
    model.diffusion_model.load_state_dict(_weights(model.diffusion_model, layout.hot if hot else {}))
    return import_module("comfy.model_patcher").ModelPatcher(model, CPU, CPU)


def in_fp32(patcher: Any, layout: Layout) -> Any:
    """A model with the same weights, in fp32."""
    twin = make_model(layout, torch.float32)
    weights = patcher.model.diffusion_model.state_dict()
    twin.model.diffusion_model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return twin


def _weights(network: torch.nn.Module, hot: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Random, such that activations stay about 1."""
    generator = torch.Generator().manual_seed(0)

    def draw(name: str, weight: torch.Tensor) -> torch.Tensor:
        random = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            return random * weight[0].numel() ** -0.5
        return 0.05 * random + (1.0 if name.endswith(("weight", "scale")) else 0.0)

    drawn = {name: draw(name, weight) for name, weight in sorted(network.state_dict().items())}
    return {name: weight * hot.get(name, 1.0) for name, weight in drawn.items()}


def prompts(layout: Layout, **conditions: Any) -> tuple[list[Any], list[Any]]:
    """Random; positive and negative. conditions: further ones of the positive."""
    generator = torch.Generator().manual_seed(6)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    given = {name: random(shape) for name, shape in layout.extra.items()}
    given |= {name: torch.ones(shape, dtype=torch.long) for name, shape in layout.ones.items()}
    positive, negative = ([[random(layout.context), dict(given)]] for _ in range(2))
    positive[0][1].update(conditions)
    return positive, negative


def sample(
    patcher: Any, layout: Layout, *, steps: int = 3, latents: torch.Tensor | None = None, **conditions: Any
) -> torch.Tensor:
    """As the KSampler node does. conditions: further ones of the positive prompt."""
    noise = torch.randn(layout.latents, generator=torch.Generator().manual_seed(5))
    positive, negative = prompts(layout, **conditions)
    start = torch.zeros(layout.latents) if latents is None else latents
    given = (positive, negative, start)
    with torch.inference_mode():
        return import_module("comfy.sample").sample(
            patcher, noise, steps, layout.cfg, "euler", layout.scheduler, *given, seed=1, disable_pbar=True
        )


VAE_SETTINGS: dict[str, Any] = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3}
VAE_SETTINGS |= {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
HOT_DECODER = {"decoder.mid.block_1.conv1.weight": 5e4}
HOT_ENCODER = {"encoder.mid.block_1.conv1.weight": 5e4}


def make_vae(dtype: torch.dtype, hot: Mapping[str, float] | None = None, *, temporal: bool = False) -> Any:
    """ComfyUI's VAE. hot: weights and what they are multiplied by. temporal: SVD's, whose decoder mixes frames."""
    config = {"params": {"ddconfig": VAE_SETTINGS, "embed_dim": 4}}
    vae = import_module("comfy.sd").VAE(sd={}, device=CPU, config=config, dtype=dtype)
    if temporal:
        video = {**VAE_SETTINGS, "video_kernel_size": [3, 1, 1], "alpha": 0.0}
        vae.first_stage_model = (
            import_module("comfy.ldm.models.autoencoder")
            .AutoencodingEngine(
                regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
                encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": VAE_SETTINGS},
                decoder_config={"target": "comfy.ldm.modules.temporal_ae.VideoDecoder", "params": video},
            )
            .eval()
        )
        vae.patcher = import_module("comfy.model_patcher").ModelPatcher(vae.first_stage_model, CPU, CPU)
    network = vae.first_stage_model.requires_grad_(False)
    network.load_state_dict(_weights(network, hot or {}))
    network.to(dtype)
    return vae


def vae_in_fp32(vae: Any, *, temporal: bool = False) -> Any:
    """A VAE with the same weights, in fp32."""
    twin = make_vae(torch.float32, temporal=temporal)
    twin.first_stage_model.load_state_dict({n: w.float() for n, w in vae.first_stage_model.state_dict().items()})
    return twin
