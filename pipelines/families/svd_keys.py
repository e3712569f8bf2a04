"""Stable Video Diffusion's single file (svd.safetensors, svd_xt.safetensors): its keys for the parameters of diffusers
and transformers, the configs that follow from its shapes, and the configs that it lacks.

The layout is that of Stability's generative-models (sgm), which wrote the file. Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from math import isqrt, prod
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
Config = Mapping[str, Any]

PREFIXES = {  # component → prefix of its keys in the file
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "image_encoder": "conditioner.embedders.0.open_clip.model.visual.",
}
UNUSED = (  # prefixes of unused keys in the published files
    "conditioner.embedders.0.open_clip.model.",  # the text half of OpenCLIP
    # sgm encodes the conditioning image with this autoencoder of Stable Diffusion 2. ComfyUI and this pack use
    # first_stage_model, whose encoder has no quant_conv.
    "conditioner.embedders.3.encoder.",
)
SIGNATURE = "model.diffusion_model.input_blocks.1.0.time_stack."  # no image model has this key
TEMPORAL_DECODER = "first_stage_model.decoder.mid.block_1.mix_factor"  # ComfyUI recognises the VAE by it, too
SV3D = "conditioner.embedders.1.encoder."  # SVD lacks this key

HEAD_DIM = 64  # num_head_channels in svd.yaml; the shapes do not show it
CLIP_HEAD_DIM = 80  # head_width of ViT-H-14 in OpenCLIP's model_configs/ViT-H-14.json
# eps of the norms in the UNet's residual blocks: GroupNorm's default, as in sgm's and ComfyUI's GroupNorm32. diffusers
# has 1e-6 in its down blocks with attention and in all its up blocks.
UNET_RESNET_EPS = 1e-5
_MOST = 64  # limit of blocks or layers in sequence: twice the 32 layers of the image encoder
_TIME_IDS = 3  # frames per second, motion bucket, noise augmentation; their embeddings are concatenated

# (pattern in a parameter's name, its replacement in the file's key), applied in order.
_RESNET = (
    (r"res_block\.norm1", "res_block.in_layers.0"),
    (r"res_block\.conv1", "res_block.in_layers.2"),
    (r"res_block\.time_emb_proj", "res_block.emb_layers.1"),
    (r"res_block\.norm2", "res_block.out_layers.0"),
    (r"res_block\.conv2", "res_block.out_layers.3"),
    (r"res_block\.conv_shortcut", "res_block.skip_connection"),
)
_UNET = (
    *_RESNET,
    (r"\.spatial_res_block", ""),
    (r"\.temporal_(res_block|transformer_blocks)", ".time_stack"),
    (r"time_pos_embed\.linear_1", "time_pos_embed.0"),
    (r"time_pos_embed\.linear_2", "time_pos_embed.2"),
    (r"downsamplers\.0\.conv", "downsamplers.0.op"),
    (r"^time_embedding\.linear_1", "time_embed.0"),
    (r"^time_embedding\.linear_2", "time_embed.2"),
    (r"^add_embedding\.linear_1", "label_emb.0.0"),
    (r"^add_embedding\.linear_2", "label_emb.0.2"),
    (r"^conv_in", "input_blocks.0.0"),
    (r"^mid_block\.resnets\.0", "middle_block.0"),
    (r"^mid_block\.attentions\.0", "middle_block.1"),
    (r"^mid_block\.resnets\.1", "middle_block.2"),
    (r"^conv_norm_out", "out.0"),
    (r"^conv_out", "out.2"),
)
_VAE = (
    *((pattern.replace("res_block", "temporal_res_block"), there) for pattern, there in _RESNET),
    (r"\.res_block", ".time_stack"),
    (r"\.spatial_res_block", ""),
    (r"\.time_mixer", ""),
    (r"\.conv_shortcut", ".nin_shortcut"),
    (r"mid_block\.resnets\.0", "mid.block_1"),
    (r"mid_block\.resnets\.1", "mid.block_2"),
    (r"mid_block\.attentions\.0", "mid.attn_1"),
    (r"\.group_norm", ".norm"),
    (r"\.to_([qkv])", r".\1"),
    (r"\.to_out\.0", ".proj_out"),
    (r"conv_norm_out", "norm_out"),
    (r"time_conv_out", "conv_out.time_mix_conv"),
    (r"(down|up)_blocks\.(\d+)\.\1samplers\.0", r"\1.\2.\1sample"),
    (r"(down|up)_blocks\.(\d+)\.resnets\.(\d+)", r"\1.\2.block.\3"),
)
_CLIP = (
    (r"^vision_model\.embeddings\.class_embedding", "class_embedding"),
    (r"^vision_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding", "conv1"),
    (r"^vision_model\.pre_layrnorm", "ln_pre"),
    (r"^vision_model\.post_layernorm", "ln_post"),
    (r"^vision_model\.encoder\.layers", "transformer.resblocks"),
    (r"\.layer_norm([12])", r".ln_\1"),
    (r"\.self_attn\.out_proj", ".attn.out_proj"),
    (r"\.self_attn\.[qkv]_proj\.", ".attn.in_proj_"),  # concatenated
    (r"\.mlp\.fc1", ".mlp.c_fc"),
    (r"\.mlp\.fc2", ".mlp.c_proj"),
    (r"^visual_projection\.weight", "proj"),
)


def why_not_svd(keys: Collection[str]) -> str:
    """Return why a file's tensors are no Stable Video Diffusion, as the end of a sentence; "" if they are."""
    for part in (SIGNATURE, *PREFIXES.values(), TEMPORAL_DECODER):
        if not any(key.startswith(part) for key in keys):
            return f"none of its {len(keys)} tensors is '{part}*'"
    return f"it has '{SV3D}*', as SV3D has" if any(key.startswith(SV3D) for key in keys) else ""


def key_of(component: str, parameter: str, config: Config) -> str:
    """Return a diffusers or transformers parameter's key in the file, without the component's prefix."""
    table = {"unet": _UNET, "vae": _VAE, "image_encoder": _CLIP}[component]
    for pattern, there in table:
        parameter = re.sub(pattern, there, parameter)
    if component == "unet":
        block = r"^(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)"
        return re.sub(block, lambda found: _unet_block(found, config), parameter)
    last = len(config.get("block_out_channels", ())) - 1  # the file numbers the decoder's levels from the output on
    return re.sub(r"^decoder\.up\.(\d+)", lambda found: f"decoder.up.{last - int(found[1])}", parameter)


def _unet_block(found: re.Match[str], config: Config) -> str:
    """Return a UNet block's key. The file numbers the blocks across levels; a level's last block changes the size."""
    level, within = int(found[2]), int(found[4])
    a_level = config["layers_per_block"] + 1
    if found[3] == "downsamplers":
        return f"input_blocks.{(level + 1) * a_level}.0"
    if found[1] == "down":
        return f"input_blocks.{1 + level * a_level + within}.{int(found[3] == 'attentions')}"
    if found[3] == "upsamplers":
        return f"output_blocks.{(level + 1) * a_level - 1}.{1 + ('CrossAttn' in config['up_block_types'][level])}"
    return f"output_blocks.{level * a_level + within}.{int(found[3] == 'attentions')}"


# Each function returns a component's config from its tensors' shapes, by key without the prefix. Raises LookupError,
# ValueError or ArithmeticError if a tensor that it needs is missing or has an odd shape.


def unet_config(shapes: Shapes) -> dict[str, Any]:
    ends = [number for number in range(_MOST) if f"input_blocks.{number}.0.op.weight" in shapes]
    a_level = ends[0] if ends else _MOST
    firsts = [f"input_blocks.{1 + level * a_level}" for level in range(len(ends) + 1)]
    channels = [shapes[f"{first}.0.out_layers.3.weight"][0] for first in firsts]
    attends = [f"{first}.1.proj_in.weight" in shapes for first in firsts]
    embedded = shapes["label_emb.0.0.weight"][1]
    return {
        "sample_size": 96,
        "in_channels": shapes["input_blocks.0.0.weight"][1],
        "out_channels": shapes["out.2.weight"][0],
        "down_block_types": [f"{'CrossAttn' * yes}DownBlockSpatioTemporal" for yes in attends],
        "up_block_types": [f"{'CrossAttn' * yes}UpBlockSpatioTemporal" for yes in reversed(attends)],
        "block_out_channels": channels,
        "addition_time_embed_dim": embedded // _TIME_IDS,
        "projection_class_embeddings_input_dim": embedded,
        "layers_per_block": a_level - 1,
        "cross_attention_dim": shapes["middle_block.1.transformer_blocks.0.attn2.to_k.weight"][1],
        "transformer_layers_per_block": 1,
        "num_attention_heads": [max(width // HEAD_DIM, 1) for width in channels],
        "num_frames": 25,  # SVD-XT's; SVD's file, for 14 frames, has the same keys and shapes
    }


def vae_config(shapes: Shapes) -> dict[str, Any]:
    levels = [shape[0] for shape in _numbered(shapes, "encoder.down.{}.block.0.conv2.weight")]
    return {
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "down_block_types": ["DownEncoderBlock2D"] * len(levels),
        "block_out_channels": levels,
        "layers_per_block": len(_numbered(shapes, "encoder.down.0.block.{}.conv2.weight")),
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "sample_size": 768,
        "scaling_factor": 0.18215,  # scale_factor in svd.yaml
        "force_upcast": True,
    }


def image_encoder_config(shapes: Shapes) -> dict[str, Any]:

    def shape(parameter: str) -> tuple[int, ...]:  # by the file's key, or by transformers' name, as ComfyUI saves
        return shapes.get(key_of("image_encoder", parameter, {})) or shapes[parameter]

    width, _, patch, _ = shape("vision_model.embeddings.patch_embedding.weight")
    layer = "vision_model.encoder.layers.{}.mlp.fc1.weight"
    return {
        "hidden_size": width,
        "intermediate_size": shape(layer.format(0))[0],
        "projection_dim": prod(shape("visual_projection.weight")) // max(width, 1),
        "num_hidden_layers": len(_numbered(shapes, key_of("image_encoder", layer, {})) or _numbered(shapes, layer)),
        "num_attention_heads": max(width // CLIP_HEAD_DIM, 1),
        "patch_size": patch,
        "image_size": isqrt(shape("vision_model.embeddings.position_embedding.weight")[0] - 1) * patch,
        "hidden_act": "gelu",
    }


def _numbered(shapes: Shapes, name: str) -> list[tuple[int, ...]]:
    return [shapes[key] for key in map(name.format, range(_MOST)) if key in shapes]


CONFIGS: Mapping[str, Callable[[Shapes], dict[str, Any]]] = {
    "unet": unet_config,
    "vae": vae_config,
    "image_encoder": image_encoder_config,
}

# scheduler/scheduler_config.json of https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt, without the
# fields that EulerDiscreteScheduler ignores. generative-models' svd_xt.yaml also has sigma_max and the v prediction.
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "interpolation_type": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "v_prediction",
    "sigma_min": 0.002,
    "sigma_max": 700.0,
    "steps_offset": 1,
    "timestep_spacing": "leading",
    "timestep_type": "continuous",
    "use_karras_sigmas": True,
}
# The fields of feature_extractor/preprocessor_config.json there that the pipeline uses: mean and deviation of
# FrozenOpenCLIPImageEmbedder, in generative-models' sgm/modules/encoders/modules.py.
FEATURE_EXTRACTOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
