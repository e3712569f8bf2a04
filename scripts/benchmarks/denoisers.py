"""The denoisers that gpu.py and compiled.py time, in published and reduced sizes, and one step of each.

Weights are random: the cost of a step does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar

import diffusers
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from comfyui_onediff_guard.pipelines.families.svd import SVD
from torch.utils import _pytree as pytree

Call = dict[str, Any]
Floats = Callable[..., torch.Tensor]  # shape → random numbers in the step's dtype
Module = TypeVar("Module", bound=torch.nn.Module)


@dataclass(frozen=True)
class Size:
    """The size of the output."""

    width: int  # pixels
    height: int  # pixels
    frames: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)  # changes of the published denoiser's config

    def __str__(self) -> str:
        return f"{self.width}×{self.height}" + (f", {self.frames} frames" if self.frames > 1 else "")


@dataclass(frozen=True)
class Model:
    """One published denoiser."""

    family: FamilySpec
    kind: str  # diffusers class
    config: Mapping[str, Any]  # changes of the class's defaults
    arguments: Callable[[Any, Size, Floats], Call]  # arguments of one step, made from the config
    fails: str  # the layer that overflows half precision
    sizes: Mapping[str, Size]  # "full": published; "cut", "deep": for a CPU, "deep" with all blocks; "tiny": for tests
    gates: tuple[str, tuple[int, int]] | None = None  # a block's output gates: layer, and place in its output


def build(model: Model, size: Size, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Build the denoiser with random weights."""
    config = {**model.config, **size.config}
    return random_weights(lambda: getattr(diffusers, model.kind)(**config), device, dtype)


def random_weights(make: Callable[[], Module], device: torch.device, dtype: torch.dtype) -> Module:
    """Make a module with its class's random weights, directly on the device and in the dtype: no fp32 copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)
            module = make()
    finally:
        torch.set_default_dtype(before)
    torch.nn.Module.to(module, device, dtype)  # for parts that ignored the defaults
    return module.eval().requires_grad_(False)


def step(model: Model, config: Any, size: Size, device: torch.device, dtype: torch.dtype) -> Call:
    """Return the arguments of one step, both halves of guidance, as the diffusers pipeline passes them in `dtype`."""
    return on_device(device, model.arguments(config, size, random_floats(device, dtype)))


def random_floats(device: torch.device, dtype: torch.dtype) -> Floats:
    """Return a generator of the same random numbers on every device."""
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> torch.Tensor:
        if device.type == "meta":
            return torch.empty(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=generator).to(device, dtype)

    return floats


def on_device(device: torch.device, given: Call) -> Call:
    """A call's arguments there, as a diffusers pipeline passes them."""
    return pytree.tree_map_only(torch.Tensor, lambda part: part.to(device), given) | {"return_dict": False}


def _cogvideox(config: Any, size: Size, floats: Floats) -> Call:
    frames, height, width = (size.frames - 1) // 4 + 1, size.height // 8, size.width // 8
    frames += frames % (config.patch_size_t or 1)  # the pipeline pads frames in the same way
    call: Call = {
        "hidden_states": floats(2, frames, config.in_channels, height, width),
        "encoder_hidden_states": floats(2, config.max_text_seq_length, config.text_embed_dim),
        "timestep": torch.tensor([500, 500]),
    }
    if config.use_rotary_positional_embeddings:
        call["image_rotary_emb"] = _rotary(config, size, frames)
    return call


def _rotary(config: Any, size: Size, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    pipeline: Any = SimpleNamespace(vae_scale_factor_spatial=8, transformer=SimpleNamespace(config=config))
    tables = diffusers.CogVideoXPipeline._prepare_rotary_positional_embeddings
    return tables(pipeline, size.height, size.width, frames, torch.device("cpu"))


def cogview(config: Any, size: Size, floats: Floats) -> Call:
    sides = torch.tensor([[size.height, size.width]] * 2, dtype=floats(1).dtype)
    return {
        "hidden_states": floats(2, config.in_channels, size.height // 8, size.width // 8),
        "encoder_hidden_states": floats(2, 224, config.text_embed_dim),
        "timestep": torch.tensor([500, 500]),
        "original_size": sides,
        "target_size": sides.clone(),
        "crop_coords": torch.zeros_like(sides),
    }


def _svd(config: Any, size: Size, floats: Floats) -> Call:
    tokens = floats(2, 1, config.cross_attention_dim)
    return {
        "sample": floats(2, size.frames, config.in_channels, size.height // 8, size.width // 8),
        "encoder_hidden_states": tokens,
        "timestep": torch.tensor(1.2),
        "added_time_ids": torch.tensor([[6, 127, 0.02]] * 2, dtype=tokens.dtype),
    }


_SMALL_COG = {"num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32, "time_embed_dim": 32}
_SMALL_VIDEO = _SMALL_COG | {"num_layers": 2, "sample_width": 8, "sample_height": 8, "sample_frames": 5}
_TINY_VIDEO = Size(64, 64, 5, _SMALL_VIDEO)
_NARROW_VIDEO = Size(
    128, 96, 5, {"num_attention_heads": 3, "sample_width": 16, "sample_height": 12, "sample_frames": 5}
)
_CUT_VIDEO = replace(_NARROW_VIDEO, config={**_NARROW_VIDEO.config, "num_layers": 12})
_VIDEO = {"full": Size(720, 480, 49), "cut": _CUT_VIDEO, "deep": _NARROW_VIDEO, "tiny": _TINY_VIDEO}
_5B = {"num_layers": 42, "num_attention_heads": 48, "use_rotary_positional_embeddings": True}
_1_5 = _5B | {"patch_size_t": 2, "patch_bias": False, "sample_frames": 81, "sample_width": 300, "sample_height": 300}


def _cogvideox_of(config: Mapping[str, Any], sizes: Mapping[str, Size] = _VIDEO) -> Model:
    kind, fails, gates = "CogVideoXTransformer3DModel", "transformer_blocks.1.ff.net.0", ("norm2.linear", (2, 5))
    return Model(COGVIDEOX, kind, config, _cogvideox, fails, sizes, gates)


MODELS: dict[str, Model] = {
    "cogvideox-2b": _cogvideox_of({}),
    "cogvideox-5b": _cogvideox_of(_5B),
    "cogvideox-1.5-5b": _cogvideox_of(_1_5, _VIDEO | {"full": Size(1360, 768, 81)}),
    "cogview3-plus": Model(
        COGVIEW3PLUS,
        "CogView3PlusTransformer2DModel",
        config={},
        arguments=cogview,
        fails="transformer_blocks.1.ff.net.0",
        sizes={
            "full": Size(1024, 1024),
            "cut": Size(128, 128, config={"num_layers": 12, "num_attention_heads": 5}),
            "deep": Size(128, 128, config={"num_attention_heads": 5}),
            "tiny": Size(64, 64, config=_SMALL_COG | {"num_layers": 2, "condition_dim": 8, "sample_size": 8}),
        },
        gates=("norm1.linear", (5, 11)),
    ),
    "svd-xt": Model(
        SVD,
        "UNetSpatioTemporalConditionModel",
        config={},
        arguments=_svd,
        fails="down_blocks.1.resnets.0.spatial_res_block.conv1",
        sizes={
            "full": Size(1024, 576, 25),
            "cut": Size(128, 64, 5, {"block_out_channels": (32, 64, 128, 128), "num_attention_heads": (1, 1, 2, 2)}),
            "tiny": Size(
                64,
                64,
                2,
                {
                    "block_out_channels": (32, 32),
                    "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                    "num_attention_heads": (1, 1),
                    "layers_per_block": 1,
                    "addition_time_embed_dim": 8,
                    "projection_class_embeddings_input_dim": 24,
                    "cross_attention_dim": 16,
                },
            ),
        },
    ),
}
