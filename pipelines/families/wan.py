"""Wan 2.1 and 2.2: text → a video."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...precision.policy import Variant
from ...trust.foreign import Foreign
from . import spec
from .spec import Config, FamilySpec

if TYPE_CHECKING:
    import torch

_TOKENS = 512  # tokens of a prompt
_LATENT_FRAMES = 4  # frames per latent frame, in every published VAE


def _published(name: str, layers: int, heads: int) -> Variant:
    source = f"https://huggingface.co/Wan-AI/{name}-Diffusers"
    sizes = {"num_layers": layers, "num_attention_heads": heads}
    return Variant(name, "bf16", leaves_fp16=False, protected=True, components=spec.IMAGE, source=source, sizes=sizes)


class _Options(Foreign):
    """The fields of model_index.json that the pipeline takes."""

    expand_timesteps: bool = False
    boundary_ratio: None = None


class _OptionsOfTwo(Foreign):
    """The same, of a pipeline with two transformers."""

    expand_timesteps: bool = False
    boundary_ratio: Annotated[float, Field(gt=0, lt=1)]  # the part of the timesteps that the second one denoises below


def _variant(config: Config) -> str:
    if config.get("in_channels", 16) == 48:
        return "Wan2.2-TI2V-5B"
    return "Wan2.1-T2V-1.3B" if config.get("num_attention_heads", 40) <= 12 else "Wan2.1-T2V-14B"


def _usual_size(config: Config, _pixels: int) -> tuple[int, int, int]:
    """Return the size that the authors advise, which is not in the config."""
    return (1280, 704, 121) if _variant(config) == "Wan2.2-TI2V-5B" else (832, 480, 81)


def _bound(config: Config, pixels: int, width: int, height: int, _frames: int) -> str:
    _, high, wide = (side * pixels for side in config.get("patch_size", (1, 2, 2)))
    if width % wide or height % high:
        return f"makes widths that are multiples of {wide} and heights of {high}, not {width}×{height}."
    return ""


def _unscaled(latents: torch.Tensor, _frames: int, config: Config) -> torch.Tensor:
    """Undo the VAE's scaling of [batch, channels, frames, height, width], with each channel's mean and deviation."""
    mean, deviation = (
        latents.new_tensor(config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std")
    )
    return latents / (1 / deviation) + mean  # diffusers' order of operations, for equal bits


def _step_inputs(config: Config, latents: tuple[int, ...], options: Config) -> dict[str, Any]:
    _, _, frames, height, width = latents
    tokens = frames * -(-height // 2) * -(-width // 2)
    return spec.without_values(
        hidden_states=(1, config["in_channels"], frames, height, width),
        timestep=(1, tokens) if options.get("expand_timesteps") else (1,),
        encoder_hidden_states=(1, _TOKENS, config["text_dim"]),
    )


def _context_tokens(config: Config, shape: tuple[int, ...]) -> int:
    """Count the tokens of a video: [batch, channels, frames, height, width]."""
    return math.prod(size // patch for size, patch in zip(shape[2:], config["patch_size"], strict=True))


_AUTHORS_NAMES = (
    (r"^condition_embedder\.(text|time)_embedder\.linear_1", r"\1_embedding.0"),
    (r"^condition_embedder\.(text|time)_embedder\.linear_2", r"\1_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])$", r".\1"),
    (r"\.to_out\.0$", ".o"),
    (r"\.add_([kv])_proj$", r".\1_img"),
    (r"\.norm_added_k$", ".norm_k_img"),
    (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
    (r"\.ffn\.net\.2$", ".ffn.2"),
    (r"^(blocks\.\d+)\.norm2$", r"\1.norm3"),
    (r"^proj_out$", "head.head"),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
)
_IMAGE_LAYERS = r"[kv]_img|norm_k_img|img_emb[._].*|add_[kv]_proj|norm_added_k|image_embedder[._].*"
_TRANSFORMER = spec.diffusers_model("WanTransformer3DModel")

_ONE = FamilySpec(
    name="Wan",
    pipeline="WanPipeline",
    components={
        "tokenizer": spec.T5_TOKENIZER,
        "text_encoder": spec.t5_encoder("UMT5EncoderModel"),
        "transformer": _TRANSFORMER,
        "vae": spec.diffusers_model("AutoencoderKLWan"),
        "scheduler": spec.scheduler("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"),
    },
    options=_Options,
    blocks=("blocks",),
    variants=(
        _published("Wan2.1-T2V-1.3B", 30, 12),
        _published("Wan2.1-T2V-14B", 40, 40),
        _published("Wan2.2-TI2V-5B", 30, 24),
    ),
    variant=_variant,
    layout=spec.Layout(
        _unscaled,
        channels=lambda config: config.get("z_dim", 16),
        spatial=lambda config: config.get("scale_factor_spatial") or 8,
        temporal=lambda config: config.get("scale_factor_temporal") or _LATENT_FRAMES,
        cache="feat_cache",
        cache_is_written=True,
    ),
    step_inputs=_step_inputs,
    sizes=spec.SizeRule(pixel_multiple=16, frame_multiple=_LATENT_FRAMES),
    usual_size=_usual_size,
    bound=_bound,
    prompt=spec.PromptRule(
        tokens=lambda _config: _TOKENS, channels=lambda config: config.get("text_dim", 4096), masked=True
    ),
    guidance=spec.Guidance(calls=2),
    context=spec.ContextPlan(
        _context_tokens, first={"hidden_states": 1}, every={"rotary_emb": 1}, given={"timestep": 1}
    ),
    latent_format=lambda config: "Wan22" if config.get("z_dim") == 48 else "Wan21",
    cached_blocks="blocks",
    authors_names=_AUTHORS_NAMES,
    image_layers=_IMAGE_LAYERS,
)

WAN_A14B = replace(
    _ONE,
    components={**_ONE.components, "transformer_2": _TRANSFORMER},
    also_denoise=("transformer_2",),
    options=_OptionsOfTwo,
    variants=(_published("Wan2.2-T2V-A14B", 40, 40),),
    variant=lambda _config: "Wan2.2-T2V-A14B",
    usual_size=lambda *_: (1280, 720, 81),
)
WAN = replace(_ONE, variants=(*_ONE.variants, *WAN_A14B.variants), extended={"transformer_2": WAN_A14B})

FAMILIES = (WAN,)
