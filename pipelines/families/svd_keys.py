"""Stable Video Diffusion's single file (svd.safetensors, svd_xt.safetensors), as tables: what its tensors are called
in diffusers and transformers, what their shapes say of the model, and what the file doesn't hold.

The layout is that of Stability's generative-models (sgm), which wrote the file. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any, NamedTuple

Shapes = Mapping[str, tuple[int, ...]]

PREFIXES = {  # component → where the file keeps it
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "image_encoder": "conditioner.embedders.0.open_clip.model.visual.",
}
UNUSED = {  # what else is in the published files → why it is passed over
    "conditioner.embedders.0.open_clip.model.": "the text half of OpenCLIP",
    # sgm encodes the conditioning image with this whole autoencoder of Stable Diffusion 2. ComfyUI does with
    # first_stage_model, and so do we: its encoder has no quant_conv behind it, and gives latents without.
    "conditioner.embedders.3.encoder.": "a second VAE, for the conditioning image",
}
SIGNATURE = "model.diffusion_model.input_blocks.1.0.time_stack."  # no image model has it
TEMPORAL_DECODER = "first_stage_model.decoder.mid.block_1.mix_factor"  # ComfyUI recognises the VAE by it, too

HEAD_DIM = 64  # num_head_channels in svd.yaml; a file's shapes don't tell
CLIP_HEAD_DIM = 80  # head_width of ViT-H-14 in OpenCLIP's model_configs/ViT-H-14.json
# eps of the norms in the UNet's residual blocks: GroupNorm's default, which sgm's and ComfyUI's GroupNorm32 leave as it
# is. diffusers has 1e-6 in its down blocks with attention and in all its up blocks.
UNET_RESNET_EPS = 1e-5
_MOST = 64  # blocks or layers one behind the other, and parts of a key: twice the 32 layers of the image encoder
TIME_IDS = 3  # frames per second, motion bucket, noise augmentation; embedded side by side


class Name(NamedTuple):
    """What a tensor, or all tensors of a module, are called in the file and in diffusers."""

    file: str
    ours: str  # "" where it has no place
    how: str = ""  # name of a change in CHANGES of pipelines/models/single_file.py


Table = tuple[Name, ...]

_RESNET = (
    Name("in_layers.0", "norm1"),
    Name("in_layers.2", "conv1"),
    Name("emb_layers.1", "time_emb_proj"),
    Name("out_layers.0", "norm2"),
    Name("out_layers.3", "conv2"),
    Name("skip_connection", "conv_shortcut"),
)
_VAE_RESNET = (
    Name("norm1", "norm1"),
    Name("conv1", "conv1"),
    Name("norm2", "norm2"),
    Name("conv2", "conv2"),
    Name("nin_shortcut", "conv_shortcut"),
)
_VAE_ATTENTION = (  # 1×1 convolutions in the file, linear layers in diffusers
    Name("norm", "group_norm"),
    Name("q", "to_q", "linear"),
    Name("k", "to_k", "linear"),
    Name("v", "to_v", "linear"),
    Name("proj_out", "to_out.0", "linear"),
)


def _inside(file: str, ours: str, table: Table) -> Table:
    return tuple(Name(f"{file}.{name.file}", f"{ours}.{name.ours}", name.how) for name in table)


UNET_RESNET = (
    *(Name(name.file, f"spatial_res_block.{name.ours}") for name in _RESNET),
    *_inside("time_stack", "temporal_res_block", _RESNET),
    Name("time_mixer", "time_mixer"),
)
UNET_ATTENTION = (
    Name("norm", "norm"),
    Name("proj_in", "proj_in"),
    Name("proj_out", "proj_out"),
    Name("transformer_blocks", "transformer_blocks"),
    Name("time_stack", "temporal_transformer_blocks"),
    Name("time_pos_embed.0", "time_pos_embed.linear_1"),
    Name("time_pos_embed.2", "time_pos_embed.linear_2"),
    Name("time_mixer", "time_mixer"),
)
UNET_PARTS = {  # what tells a part of input_blocks.N or output_blocks.N → its place in the level, what is inside
    "in_layers.0.weight": ("resnets.{}", UNET_RESNET),
    "proj_in.weight": ("attentions.{}", UNET_ATTENTION),
    "op.weight": ("downsamplers.0", (Name("op", "conv"),)),
    "conv.weight": ("upsamplers.0", (Name("conv", "conv"),)),
}
UNET_ENDS = (
    Name("time_embed.0", "time_embedding.linear_1"),
    Name("time_embed.2", "time_embedding.linear_2"),
    Name("label_emb.0.0", "add_embedding.linear_1"),
    Name("label_emb.0.2", "add_embedding.linear_2"),
    Name("input_blocks.0.0", "conv_in"),
    *_inside("middle_block.0", "mid_block.resnets.0", UNET_RESNET),
    *_inside("middle_block.1", "mid_block.attentions.0", UNET_ATTENTION),
    *_inside("middle_block.2", "mid_block.resnets.1", UNET_RESNET),
    Name("out.0", "conv_norm_out"),
    Name("out.2", "conv_out"),
)
VAE_RESNETS = {
    "encoder": _VAE_RESNET,
    "decoder": (
        *(Name(name.file, f"spatial_res_block.{name.ours}") for name in _VAE_RESNET),
        *_inside("time_stack", "temporal_res_block", _RESNET),
        Name("mix_factor", "time_mixer.mix_factor"),
    ),
}
VAE_ENDS = (
    Name("conv_in", "conv_in"),
    *_inside("mid.attn_1", "mid_block.attentions.0", _VAE_ATTENTION),
    Name("norm_out", "conv_norm_out"),
    Name("conv_out", "conv_out"),
)
CLIP_LAYER = (
    Name("ln_1", "layer_norm1"),
    Name("attn.in_proj_weight", "self_attn.q_proj.weight", "first third"),
    Name("attn.in_proj_weight", "self_attn.k_proj.weight", "second third"),
    Name("attn.in_proj_weight", "self_attn.v_proj.weight", "last third"),
    Name("attn.in_proj_bias", "self_attn.q_proj.bias", "first third"),
    Name("attn.in_proj_bias", "self_attn.k_proj.bias", "second third"),
    Name("attn.in_proj_bias", "self_attn.v_proj.bias", "last third"),
    Name("attn.out_proj", "self_attn.out_proj"),
    Name("ln_2", "layer_norm2"),
    Name("mlp.c_fc", "mlp.fc1"),
    Name("mlp.c_proj", "mlp.fc2"),
)
CLIP_ENDS = (
    Name("class_embedding", "vision_model.embeddings.class_embedding"),
    Name("positional_embedding", "vision_model.embeddings.position_embedding.weight"),
    Name("conv1", "vision_model.embeddings.patch_embedding"),
    Name("ln_pre", "vision_model.pre_layrnorm"),
    Name("ln_post", "vision_model.post_layernorm"),
    Name("proj", "visual_projection.weight", "transposed"),
    # as ComfyUI's ImageOnlyCheckpointSave writes it: transformers' names under the same prefix
    Name("vision_model", "vision_model"),
    Name("vision_model.embeddings.position_ids", ""),
    Name("visual_projection", "visual_projection"),
)


def _unet(keys: Collection[str]) -> Iterator[Name]:
    """Yield the names of the UNet. The file numbers input_blocks and output_blocks through; a level ends with the block
    that changes the size."""
    yield from UNET_ENDS
    for blocks, first, ours in (("input_blocks", 1, "down_blocks"), ("output_blocks", 0, "up_blocks")):
        level, within = 0, 0
        for number in range(first, _count(keys, blocks + ".{}.0.")):
            ends = False
            for part in range(3):
                here = f"{blocks}.{number}.{part}"
                for telltale, (place, inside) in UNET_PARTS.items():
                    if f"{here}.{telltale}" in keys:
                        yield from _inside(here, f"{ours}.{level}.{place.format(within)}", inside)
                        ends = ends or place.endswith("samplers.0")
            level, within = (level + 1, 0) if ends else (level, within + 1)


def _vae(keys: Collection[str]) -> Iterator[Name]:
    """Yield the names of the VAE. The file numbers the decoder's levels from the picture on, diffusers from the latents
    on."""
    yield Name("quant_conv", "quant_conv")
    yield Name("decoder.conv_out.time_mix_conv", "decoder.time_conv_out")
    for half, side, sampler in (("encoder", "down", "downsample"), ("decoder", "up", "upsample")):
        resnet = VAE_RESNETS[half]
        yield from _inside(half, half, VAE_ENDS)
        for j in (0, 1):
            yield from _inside(f"{half}.mid.block_{j + 1}", f"{half}.mid_block.resnets.{j}", resnet)
        levels = _count(keys, f"{half}.{side}.{{}}.")
        for i in range(levels):
            here = f"{half}.{side}.{i}"
            there = f"{half}.{side}_blocks.{i if side == 'down' else levels - 1 - i}"
            yield Name(f"{here}.{sampler}.conv", f"{there}.{sampler}rs.0.conv")
            for j in range(_count(keys, here + ".block.{}.")):
                yield from _inside(f"{here}.block.{j}", f"{there}.resnets.{j}", resnet)


def _clip(keys: Collection[str]) -> Iterator[Name]:
    yield from CLIP_ENDS
    for i in range(_count(keys, "transformer.resblocks.{}.")):
        yield from _inside(f"transformer.resblocks.{i}", f"vision_model.encoder.layers.{i}", CLIP_LAYER)


NAMES: dict[str, Callable[[Collection[str]], Iterator[Name]]] = {"unet": _unet, "vae": _vae, "image_encoder": _clip}


@dataclass(frozen=True)
class Source:
    """Where a parameter comes from."""

    key: str  # the tensor's name in the file; "" where the file has no such tensor
    how: str = ""  # name of a change, or of what is made, in CHANGES and MADE of pipelines/models/single_file.py


MADE = {  # what a component needs and the file lacks, since it changes nothing
    "vae": {"quant_conv.weight": Source("", "identity"), "quant_conv.bias": Source("", "zeros")},
}


def sources(component: str, keys: Collection[str]) -> tuple[dict[str, Source], list[str]]:
    """Return {parameter in diffusers: where it comes from} of one component, and the file's keys that have no place in
    it.

    component: "unet", "vae" or "image_encoder".
    """
    prefix = PREFIXES[component]
    mine = {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}
    table: dict[str, list[Name]] = {}
    for name in NAMES[component](mine):
        table.setdefault(name.file, []).append(name)
    found: dict[str, Source] = {}
    unplaced: list[str] = []
    for key in sorted(mine):
        stem = next((stem for stem in _stems(key) if stem in table), None)
        if stem is None:
            unplaced.append(prefix + key)
            continue
        for name in table[stem]:
            if name.ours:
                found[name.ours + key.removeprefix(stem)] = Source(prefix + key, name.how)
    return {**MADE.get(component, {}), **found}, unplaced


def _stems(key: str) -> Iterator[str]:
    """Yield all starts of a key, the longest first: 'a.b.c', 'a.b' and 'a' of 'a.b.c'."""
    for _ in range(_MOST):
        if not key:
            return
        yield key
        key = key.rpartition(".")[0]


def _count(keys: Collection[str], start: str) -> int:
    """Return how many of start.format(0), start.format(1), … the keys begin with, without a gap."""
    before, after = start.split("{}")
    parted = (key[len(before) :].partition(".") for key in keys if key.startswith(before))
    numbers = {number for number, dot, rest in parted if (dot + rest).startswith(after)}
    return next(n for n in range(len(numbers) + 1) if n == _MOST or str(n) not in numbers)


# What a component's shapes, by diffusers' names, say of its config. Each raises KeyError where a tensor is missing that
# it needs.


def unet_config(shapes: Shapes, num_frames: int) -> dict[str, Any]:
    """Return what unet/config.json would say. num_frames is in no single file: 14 for SVD, 25 for SVD-XT."""
    resnet = "down_blocks.{}.resnets.{}.spatial_res_block.conv2.weight"
    n_levels = _count(shapes, "down_blocks.{}.resnets.0.")
    channels = tuple(_size(shapes, resnet.format(i, 0), 0) for i in range(n_levels))
    attends = [f"down_blocks.{i}.attentions.0.proj_in.weight" in shapes for i in range(n_levels)]
    embedded = _size(shapes, "add_embedding.linear_1.weight", 1)
    return {
        "sample_size": 96,
        "in_channels": _size(shapes, "conv_in.weight", 1),
        "out_channels": _size(shapes, "conv_out.weight", 0),
        "down_block_types": tuple(f"{'CrossAttn' * yes}DownBlockSpatioTemporal" for yes in attends),
        "up_block_types": tuple(f"{'CrossAttn' * yes}UpBlockSpatioTemporal" for yes in reversed(attends)),
        "block_out_channels": channels,
        "addition_time_embed_dim": embedded // TIME_IDS,
        "projection_class_embeddings_input_dim": embedded,
        "layers_per_block": _count(shapes, "down_blocks.0.resnets.{}."),
        "cross_attention_dim": _size(shapes, "mid_block.attentions.0.transformer_blocks.0.attn2.to_k.weight", 1),
        "transformer_layers_per_block": _count(shapes, "mid_block.attentions.0.transformer_blocks.{}."),
        "num_attention_heads": tuple(max(width // HEAD_DIM, 1) for width in channels),
        "num_frames": num_frames,
    }


def vae_config(shapes: Shapes) -> dict[str, Any]:
    """Return what vae/config.json would say."""
    n_levels = _count(shapes, "encoder.down_blocks.{}.resnets.0.")
    return {
        "in_channels": _size(shapes, "encoder.conv_in.weight", 1),
        "out_channels": _size(shapes, "decoder.conv_out.weight", 0),
        "down_block_types": ("DownEncoderBlock2D",) * n_levels,
        "block_out_channels": tuple(
            _size(shapes, f"encoder.down_blocks.{i}.resnets.0.conv2.weight", 0) for i in range(n_levels)
        ),
        "layers_per_block": _count(shapes, "encoder.down_blocks.0.resnets.{}."),
        "latent_channels": _size(shapes, "decoder.conv_in.weight", 1),
        "sample_size": 768,
        "scaling_factor": 0.18215,  # scale_factor in svd.yaml
        "force_upcast": True,
    }


def image_encoder_config(shapes: Shapes) -> dict[str, Any]:
    """Return what image_encoder/config.json would say."""
    embeddings = "vision_model.embeddings."
    width, _, patch, _ = shapes[embeddings + "patch_embedding.weight"]
    return {
        "hidden_size": width,
        "intermediate_size": _size(shapes, "vision_model.encoder.layers.0.mlp.fc1.weight", 0),
        "projection_dim": _size(shapes, "visual_projection.weight", 0),
        "num_hidden_layers": _count(shapes, "vision_model.encoder.layers.{}."),
        "num_attention_heads": max(width // CLIP_HEAD_DIM, 1),
        "patch_size": patch,
        "image_size": isqrt(_size(shapes, embeddings + "position_embedding.weight", 0) - 1) * patch,
        "hidden_act": "gelu",
    }


def _size(shapes: Shapes, name: str, axis: int) -> int:
    shape = shapes[name]
    if axis >= len(shape):
        raise KeyError(name)
    return shape[axis]


# scheduler/scheduler_config.json of https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt, without what
# EulerDiscreteScheduler doesn't take. sigma_max, and the v prediction, are in generative-models' svd_xt.yaml, too.
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
# What the pipeline uses of feature_extractor/preprocessor_config.json there: FrozenOpenCLIPImageEmbedder's mean and
# deviation, in generative-models' sgm/modules/encoders/modules.py.
FEATURE_EXTRACTOR = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

# What else lies in models/checkpoints, by parts of keys that all have to be there; the first that fits is named.
# Most are those by which ComfyUI's comfy/model_detection.py tells them.
OTHERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a LoRA", (".lora_down.",)),
    ("a LoRA", (".lora_A.",)),
    ("an SV3D checkpoint", (SIGNATURE, "conditioner.embedders.1.encoder.")),
    ("the UNet of a diffusers-format SVD folder", ("down_blocks.0.resnets.0.temporal_res_block.",)),
    ("the UNet of Stable Video Diffusion alone", ("input_blocks.1.0.time_stack.", "label_emb.0.0.")),
    ("an AnimateDiff motion module", ("motion_modules.0.temporal_transformer.",)),
    ("a ControlNet", ("control_model.input_blocks.",)),
    ("a ControlNet", ("controlnet_cond_embedding.",)),
    ("a Stable Diffusion XL checkpoint", ("conditioner.embedders.1.model.",)),
    ("a Stable Diffusion XL refiner", ("conditioner.embedders.0.model.ln_final.",)),
    ("a Stable Diffusion 2 checkpoint", ("cond_stage_model.model.ln_final.",)),
    ("a Stable Diffusion 1 checkpoint", ("cond_stage_model.transformer.text_model.",)),
    ("a Stable Diffusion 3 checkpoint", ("joint_blocks.0.context_block.",)),
    ("a HunyuanVideo model", ("txt_in.individual_token_refiner.",)),
    ("a Flux model", ("double_blocks.0.img_attn.norm.key_norm.",)),
    ("a Wan model", ("head.modulation", "blocks.0.cross_attn.")),
    ("an LTX-Video model", ("adaln_single.", "patchify_proj.")),
    ("a Mochi model", ("t5_yproj.",)),
    ("a Qwen-Image model", ("txt_norm.", "transformer_blocks.0.img_mod.")),
    ("a CogVideoX transformer", ("patch_embed.text_proj.", "transformer_blocks.0.attn1.norm_q.")),
    ("an image model", ("model.diffusion_model.input_blocks.",)),
    ("a CLIP vision model", ("vision_model.encoder.layers.",)),
    ("a VAE", ("encoder.conv_in.", "decoder.conv_in.")),
)
