"""Estimates how each stage would run on a card with a given VRAM under offload 'auto', on "meta". Nothing is loaded.
The configs of the published variants are here too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from ...precision.accumulation import Accumulation
from ...precision.activation_estimate import META
from ...precision.arch import Architecture
from ...precision.dtypes import DTYPES
from ...precision.guard import GuardPolicy
from ...precision.policy import Component, PlanImpossible, Precision
from ..compile.backends import EAGER, BackendChoice
from ..errors import BadSize
from ..families.cogvideox import COGVIDEOX, COGVIDEOX_FROM_IMAGE
from ..families.cogview import COGVIEW3PLUS, COGVIEW4
from ..families.spec import Config, FamilySpec
from ..families.svd import SVD
from ..families.table import VARIANTS
from ..families.wan import WAN, WAN_A14B
from ..models.on_disk import StoredModel
from ..run.decode import Portions, ways_to_decode
from ..run.denoiser import features_of, ways_to_run
from ..run.feature import RunContext
from ..run.handle import PipelineHandle
from ..run.sample import SampleSettings, check_size
from ..weights.components import ComponentStore
from ..weights.offload import Offload
from ..weights.placement import ExecutionOption, PlainPlacement, first_that_fits
from .probe import usual_size

RESERVED = 800_000_000  # bytes of a card for its driver, a desktop and CUDA's context

Size = tuple[int, int, int]  # width, height, frames


@dataclass(frozen=True)
class StageEstimate:
    """The estimate of one stage, in bytes."""

    stage: str
    dtype: str
    way: str  # "none", "group", "tiling", ...
    weights: int  # on the card at once
    beside: int  # activation memory
    fits: bool


@dataclass(frozen=True)
class RunEstimate:
    """The estimate of one model's run on a card of `memory` bytes, of which the model can use `has`."""

    variant: str
    size: Size
    memory: int
    has: int
    stages: tuple[StageEstimate, ...]


def estimate_runs(
    model: StoredModel | None,
    architecture: Architecture,
    memories: Sequence[int],
    size: Size | None = None,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
) -> Iterator[RunEstimate]:
    """Yield an estimate for each model and card. Models whose plan the architecture cannot run are left out.

    model: None: all published variants that can make the size. memories: of the cards, in bytes. size: None: each
    model's own. Raises BadSize if no model can make the size.
    """
    left_out = list[BadSize]()
    for each in (models := [model] if model else [*map(_PublishedModel.of, PUBLISHED)]):
        handle = PipelineHandle(
            store=_MetaStore(each, _MetaPlacement(META)),
            architecture=architecture,
            precision=precision,
            backend=BackendChoice(EAGER, "", automatic=True),
            offload=Offload.AUTO,
            policy=GuardPolicy(),
            accumulation=accumulation,
        )
        width, height, frames = made = size or usual_size(handle, 0, 0, 0)
        try:
            check_size(handle, SampleSettings(width, height, steps=1, seed=0, frames=frames))
        except BadSize as error:
            left_out.append(error)
            if len(left_out) == len(models):
                raise
            continue
        try:
            stages = [(name, dtype, tee(ways, len(memories))) for name, dtype, ways in _stages(handle, made)]
        except PlanImpossible:  # its plan has the reason
            continue
        for number, memory in enumerate(memories):
            has = max(memory - RESERVED, 0)
            found: list[StageEstimate] = []
            for name, dtype, ways in stages:
                way, _, fits = first_that_fits(ways[number], has)
                found.append(StageEstimate(name, dtype, way.said, way.weights, way.beside, fits))
            yield RunEstimate(each.variant.name, made, memory, has, tuple(found))


def _stages(handle: PipelineHandle, size: Size) -> Iterator[tuple[str, str, Iterator[ExecutionOption]]]:
    family, model = handle.family, handle.store.model
    if family.prompt:
        stage = handle.stage(Component.TEXT_ENCODER)
        tokens = torch.zeros(1, family.prompt.tokens(model.denoiser_config), dtype=torch.long, device=META)
        inputs = {"input_ids": tokens} | ({"attention_mask": tokens.clone()} if family.prompt.masked else {})
        yield "text encoder", stage.plan.dtype, ways_to_run(stage, inputs, ())
    shape = family.layout.latents_shape(model.vae_config, *size)
    inputs = family.step_inputs(model.denoiser_config, shape, model.options)
    for stage in handle.denoising():
        name = "denoiser" if len(family.denoisers) == 1 else stage.name
        features = features_of(RunContext(handle, stage.plan, stage.report))
        yield name, stage.plan.dtype, ways_to_run(stage, inputs, features)
    stage = handle.stage(Component.VAE_DECODE)
    latents = torch.empty(shape, device=META)
    yield "decode", stage.plan.dtype, ways_to_decode(stage, latents, Portions(0, False, False))


@dataclass(frozen=True)
class _PublishedModel(StoredModel):
    """A published model, without its files."""

    @classmethod
    def of(cls, variant: str) -> _PublishedModel:
        family, configs, options = PUBLISHED[variant]
        built: list[Any] = [family.components[name].on_meta(configs[name]) for name in (family.denoiser, "vae")]
        denoiser, vae = (dict(module.config) for module in built)
        return cls(Path(variant), family, VARIANTS[variant], {}, configs, denoiser, vae, options, ())

    def unweighted(self, *_: Any, **__: Any) -> NoReturn:
        raise FileNotFoundError(f"{self.name} is described, not here")

    component = stored = unweighted


class _MetaPlacement(PlainPlacement):
    """A card that nothing is moved to."""

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None: ...

    def to_host(self, name: str, module: torch.nn.Module) -> None: ...


class _MetaStore(ComponentStore):
    """A store of components on "meta"."""

    def _load(self, name: str, dtype: str) -> torch.nn.Module:
        return self.model.bare(name, DTYPES[dtype]).eval().requires_grad_(False)

    def _checked(self, *_: Any, **__: Any) -> list[str]:
        return []


class Published(NamedTuple):
    """The configs of a published folder."""

    family: FamilySpec
    configs: Mapping[str, Config]  # component with weights → fields of its config.json that are not the defaults
    options: Mapping[str, Any]  # fields of model_index.json that the pipeline takes


# Fields that several variants share. Sources: the folders, diffusers' scripts/convert_*_to_diffusers.py, and for the
# encoders ComfyUI's comfy/text_encoders/*_config_xxl.json and comfy/clip_vision_config_h.json.
_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
_T5_XXL = _XXL | {"vocab_size": 32128, "tie_word_embeddings": False}
_UMT5_XXL = _XXL | {"vocab_size": 256384, "tie_word_embeddings": False}
_GLM_4_9B = {"max_position_embeddings": 8192}  # the rest are defaults
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
    """Return a variant's entry. encoder: config of its encoder. denoiser: fields beyond `Variant.sizes`."""
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
