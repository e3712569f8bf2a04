"""The published variants as their folders describe them, to say what they take where no folder is at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..families.cogvideox import COGVIDEOX, COGVIDEOX_FROM_IMAGE
from ..families.cogview import COGVIEW3PLUS, COGVIEW4
from ..families.spec import Config, FamilySpec
from ..families.svd import SVD
from ..families.table import VARIANTS
from ..families.wan import WAN, WAN_A14B


class Published(NamedTuple):
    """What the files of a published folder say."""

    family: FamilySpec
    configs: Mapping[str, Config]  # component with weights → of its config.json, what is not its class's default
    options: Mapping[str, Any]  # of model_index.json, what the pipeline takes


# What several variants share. Sources: the folders themselves, diffusers' scripts/convert_*_to_diffusers.py, and of the
# encoders ComfyUI's comfy/text_encoders/*_config_xxl.json and comfy/clip_vision_config_h.json.
_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
_T5_XXL = _XXL | {"vocab_size": 32128, "tie_word_embeddings": False}
_UMT5_XXL = _XXL | {"vocab_size": 256384, "tie_word_embeddings": False}
_GLM_4_9B = {"max_position_embeddings": 8192}  # else the class's defaults
_CLIP_VIT = {"hidden_size": 1280, "intermediate_size": 5120, "projection_dim": 1024, "hidden_act": "gelu"}
_CLIP_VIT_H = _CLIP_VIT | {"num_hidden_layers": 32, "num_attention_heads": 16, "patch_size": 14}
_COGVIDEOX_5B_VAE = {"scaling_factor": 0.7}
_ROPE = {"use_rotary_positional_embeddings": True}
_COGVIDEOX_15_SAMPLE = {"sample_width": 300, "sample_height": 300, "sample_frames": 81}
_COGVIDEOX_15 = _ROPE | _COGVIDEOX_15_SAMPLE | {"patch_size_t": 2, "patch_bias": False}
_COGVIDEOX_15_VAE = _COGVIDEOX_5B_VAE | {"invert_scale_latents": True}
_DOWN, _UP = {"down_block_types": ["DownEncoderBlock2D"] * 4}, {"up_block_types": ["UpDecoderBlock2D"] * 4}
_UNQUANTISED = {"use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False}
_COGVIEW_SIZES = {"block_out_channels": [128, 512, 1024, 1024], "layers_per_block": 3, "latent_channels": 16}
_COGVIEW_VAE = _DOWN | _UP | _UNQUANTISED | _COGVIEW_SIZES | {"sample_size": 1024, "scaling_factor": 1.0}
_SVD_VAE = _DOWN | {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "sample_size": 768}
_WAN_22_SIZES = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "in_channels": 12, "out_channels": 12}
# Without latents_mean and latents_std: they change no shape.
_WAN_22_VAE = _WAN_22_SIZES | {"is_residual": True, "patch_size": 2, "scale_factor_spatial": 16}


def _published(
    name: str,
    family: FamilySpec,
    encoder: Config,
    denoiser: Mapping[str, Any] | None = None,
    vae: Config | None = None,
    **options: Any,
) -> tuple[str, Published]:
    """encoder: of the prompt or of the image. denoiser: what differs beside the sizes that its variant has."""
    sizes = {**VARIANTS[name].sizes, **(denoiser or {})}
    configs = {"text_encoder" if family.prompt else "image_encoder": encoder, "vae": vae or {}}
    return name, Published(family, configs | dict.fromkeys(family.denoisers, sizes), options)


_FROM_IMAGE = _ROPE | {"use_learned_positional_embeddings": True, "in_channels": 32}
_15_FROM_IMAGE = _COGVIDEOX_15 | {"in_channels": 32, "ofs_embed_dim": 512}
_WAN_22 = {"in_channels": 48, "out_channels": 48, "ffn_dim": 14336}
PUBLISHED: Mapping[str, Published] = dict(
    (
        _published("CogVideoX-2B", COGVIDEOX, _T5_XXL),
        _published("CogVideoX-5B", COGVIDEOX, _T5_XXL, _ROPE, _COGVIDEOX_5B_VAE),
        _published("CogVideoX-5B-I2V", COGVIDEOX_FROM_IMAGE, _T5_XXL, _FROM_IMAGE, _COGVIDEOX_5B_VAE),
        _published("CogVideoX-1.5-5B", COGVIDEOX, _T5_XXL, _COGVIDEOX_15, _COGVIDEOX_15_VAE),
        _published("CogVideoX-1.5-5B-I2V", COGVIDEOX_FROM_IMAGE, _T5_XXL, _15_FROM_IMAGE, _COGVIDEOX_15_VAE),
        _published("CogView3-Plus-3B", COGVIEW3PLUS, _T5_XXL, vae=_COGVIEW_VAE),
        _published("CogView4-6B", COGVIEW4, _GLM_4_9B, {"attention_head_dim": 128}, _COGVIEW_VAE),
        *(
            _published(name, SVD, _CLIP_VIT_H, {"sample_size": 96}, _SVD_VAE)
            for name in ("SVD", "SVD-XT", "SVD-XT 1.1")
        ),
        _published("Wan2.1-T2V-1.3B", WAN, _UMT5_XXL, {"ffn_dim": 8960}),
        _published("Wan2.1-T2V-14B", WAN, _UMT5_XXL),
        _published("Wan2.2-TI2V-5B", WAN, _UMT5_XXL, _WAN_22, _WAN_22_VAE, expand_timesteps=True),
        _published("Wan2.2-T2V-A14B", WAN_A14B, _UMT5_XXL, boundary_ratio=0.875),
    )
)
