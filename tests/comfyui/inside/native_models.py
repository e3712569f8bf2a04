"""Small models of ComfyUI's own classes with random weights, and sampling runs of them.

Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from native_layouts import IMAGE_LAYOUTS, VIDEO_LAYOUTS, Layout

CPU = torch.device("cpu")
CARD = import_module("comfy.model_management").get_torch_device()  # the CPU, unless ComfyUI was started for a card
FP16_MAX = torch.finfo(torch.float16).max
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
PARTS: tuple[tuple[str, str, dict[str, int]], ...] = (  # parts of networks whose sizes are in no config
    (
        "comfy.ldm.ace.model",
        "LyricEncoder",
        {"output_size": 32, "attention_heads": 2, "linear_units": 48, "num_blocks": 1},
    ),
    (
        "comfy.ldm.anima.model",
        "LLMAdapter",
        {"source_dim": 32, "target_dim": 32, "model_dim": 32, "num_layers": 1, "num_heads": 2},
    ),
)
SCALES_FROM_1 = "comfy.ldm.krea2.model"  # its norms scale by 1 + weight

SUPPORTED = import_module("comfy.supported_models")
if hasattr(SUPPORTED, "Krea2"):  # an older ComfyUI is too different for these
    for name in ("SmallQwenImage21", "SmallSenseNovaU15"):
        setattr(SUPPORTED, name, getattr(import_module("native_newer"), name))
LAYOUTS = {
    name: layout for name, layout in (IMAGE_LAYOUTS | VIDEO_LAYOUTS).items() if hasattr(SUPPORTED, layout.config)
}
OF_2026 = ("chroma", "krea2", "anima", "cosmos_predict2", "ernie_image", "ideogram4")
OF_2026 += ("hidream_o1", "mage_flow", "kandinsky5", "seedvr2", "qwen_image21", "sensenova")
RECENT = [name for name in OF_2026 if name in LAYOUTS]
for module, part, sizes in PARTS:
    with suppress(ModuleNotFoundError):  # in an older ComfyUI
        setattr(import_module(module), part, partial(getattr(import_module(module), part), **sizes))


def make_model(
    family: Layout | str,
    dtype: torch.dtype = torch.float16,
    compute: torch.dtype | None = None,
    *,
    hot: bool = False,
    operations: Any = None,
) -> Any:
    """Return ComfyUI's ModelPatcher of a small model with attribute `layout`.

    dtype: of the weights. compute: dtype that each layer casts them to; None: no cast. hot: the model overflows fp16.
    operations: ComfyUI's layer classes; None: ComfyUI chooses.
    """
    layout = LAYOUTS[family] if isinstance(family, str) else family
    config = getattr(SUPPORTED, layout.config)(layout.settings())
    set_by_comfyui = config.unet_extra_config.keys() & layout.sizes.keys()  # for every checkpoint
    config.unet_config |= {name: layout.sizes[name] for name in set_by_comfyui}
    config.set_inference_dtype(dtype, compute)
    config.manual_cast_dtype = compute  # SeedVR2 computes fp16 weights in bf16 if the card has bf16
    config.custom_operations = operations
    model = config.get_model(layout.checkpoint(), "", device=CPU).eval().requires_grad_(False)
    model.layout = layout
    weights = random_weights(model.diffusion_model, layout.heat if hot else {})
    model.diffusion_model.load_state_dict(weights)
    if dtype.itemsize == 1:
        _keep_in_fp16(model.diffusion_model, weights, layout)
    return import_module("comfy.model_patcher").ModelPatcher(model, CARD, CPU)


def with_fp32_twin(family: Layout | str, *dtypes: Any, **how: Any) -> tuple[Any, Any]:
    """Return a model, and one with the same weights in fp32."""
    patcher = make_model(family, *dtypes, **how)
    return patcher, in_fp32(patcher)


def _keep_in_fp16(network: torch.nn.Module, weights: Mapping[str, torch.Tensor], layout: Layout) -> None:
    """Keep weights in fp16 that exceed fp8's range, or that ComfyUI does not accept in fp8, as fp8 checkpoints do."""
    for name, weight in weights.items():
        if weight.abs().max() > FP8_MAX or name.endswith(layout.not_in_fp8):
            layer, _, own = name.rpartition(".")
            setattr(network.get_submodule(layer), own, torch.nn.Parameter(weight.half(), requires_grad=False))


def in_fp32(patcher: Any) -> Any:
    """Return a model with the same weights in fp32."""
    twin = make_model(patcher.model.layout, torch.float32)
    weights = patcher.model.diffusion_model.state_dict()
    twin.model.diffusion_model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return twin


def random_weights(network: torch.nn.Module, hot: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return random weights that keep activations near 1. hot: factors by weight."""
    generator = torch.Generator().manual_seed(0)
    more_than_1 = {f"{name}.scale" for name, part in network.named_modules() if type(part).__module__ == SCALES_FROM_1}

    def draw(name: str, weight: torch.Tensor) -> torch.Tensor:
        random = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            return random * weight[0].numel() ** -0.5
        scales = name.endswith(("weight", "scale", "gamma")) and name not in more_than_1
        return 0.05 * random + (1.0 if scales else 0.0)

    drawn = {name: draw(name, weight) for name, weight in sorted(network.state_dict().items()) if weight.numel()}
    assert hot.keys() <= drawn.keys(), f"no weight {sorted(hot.keys() - drawn.keys())} in {type(network).__name__}"
    drawn = {name: weight * hot.get(name, 1.0) for name, weight in drawn.items()}
    assert all(weight.abs().max() <= FP16_MAX for weight in drawn.values()), "a weight itself overflows fp16"
    return drawn


def prompts(
    layout: Layout, negatives: Mapping[str, Any] | None = None, **conditions: Any
) -> tuple[list[Any], list[Any]]:
    """Return random positive and negative prompts with bf16 values, since some models round them to half precision
    before the first step. conditions: further ones of the positive. negatives: of the negative."""
    generator = torch.Generator().manual_seed(6)

    def random(shape: Any) -> Any:
        if isinstance(shape, list):
            return [random(each) for each in shape]
        if isinstance(shape, dict):  # an encoder's outputs
            return SimpleNamespace(**{name: random(each) for name, each in shape.items()})
        return torch.randn(shape, generator=generator).to(torch.bfloat16).float() if isinstance(shape, tuple) else shape

    given = {name: random(shape) for name, shape in layout.extra.items()}
    given |= {name: torch.ones(shape, dtype=torch.long) for name, shape in layout.ones.items()}
    positive, negative = ([[random(layout.context), dict(given)]] for _ in range(2))
    positive[0][1].update(conditions)
    negative[0][1].update(negatives or {})
    return positive, negative


def sample(patcher: Any, *, steps: int = 3, latents: torch.Tensor | None = None, **conditions: Any) -> torch.Tensor:
    """Sample as the KSampler node does. conditions: further ones of the positive prompt. Several streams of latents are
    concatenated into one dimension."""
    layout = patcher.model.layout
    generator = torch.Generator().manual_seed(5)
    dtype = getattr(import_module("comfy.model_management"), "intermediate_dtype", lambda: torch.float32)()
    noise = _nested([torch.randn(shape, generator=generator).to(dtype) for shape in layout.streams])
    positive, negative = prompts(layout, **conditions)
    start = _nested([torch.zeros(shape, dtype=dtype) for shape in layout.streams]) if latents is None else latents
    given = (positive, negative, start)
    with torch.inference_mode():
        made = import_module("comfy.sample").sample(
            patcher, noise, steps, layout.cfg, "euler", layout.scheduler, *given, seed=1, disable_pbar=True
        )
    return torch.cat([stream.flatten() for stream in made.unbind()]) if made.is_nested else made


def _nested(streams: list[torch.Tensor]) -> Any:
    return streams[0] if len(streams) == 1 else import_module("comfy.nested_tensor").NestedTensor(streams)


def largest_difference(layout: Layout, made: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value, of the worst stream; NaN if a stream has NaN."""
    streams = zip(layout.split(made.float()), layout.split(exact.float()), strict=True)
    return torch.stack([(one - other).abs().max() / other.abs().max() for one, other in streams]).max().item()


def distance(layout: Layout, made: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative difference by norm, of the worst stream."""
    streams = zip(layout.split(made.float()), layout.split(exact.float()), strict=True)
    return torch.stack([(one - other).norm() / other.norm() for one, other in streams]).max().item()


VAE_SETTINGS: dict[str, Any] = {"double_z": True, "z_channels": 4, "resolution": 256, "in_channels": 3, "out_ch": 3}
VAE_SETTINGS |= {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0}
HOT_DECODER = {"decoder.mid.block_1.conv1.weight": 5e4}
HOT_ENCODER = {"encoder.mid.block_1.conv1.weight": 5e4}


def temporal_autoencoder(settings: dict[str, Any]) -> torch.nn.Module:
    """Return SVD's VAE network, whose decoder mixes frames, as comfy.sd.VAE makes it."""
    video = settings | {"video_kernel_size": [3, 1, 1], "alpha": 0.0}
    network = import_module("comfy.ldm.models.autoencoder").AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": settings},
        decoder_config={"target": "comfy.ldm.modules.temporal_ae.VideoDecoder", "params": video},
    )
    return network.eval()


def make_vae(
    dtype: torch.dtype, hot: Mapping[str, float] | None = None, *, temporal: bool = False, channels: int = 4
) -> Any:
    """Return ComfyUI's VAE. hot: factors by weight. temporal: SVD's network. channels: of the latents."""
    config = {"params": {"ddconfig": VAE_SETTINGS | {"z_channels": channels}, "embed_dim": channels}}
    vae = import_module("comfy.sd").VAE(sd={}, device=CARD, config=config, dtype=dtype)
    if temporal:
        vae.first_stage_model = temporal_autoencoder(VAE_SETTINGS)
        vae.patcher = import_module("comfy.model_patcher").ModelPatcher(vae.first_stage_model, CARD, CPU)
    network = vae.first_stage_model.requires_grad_(False)
    network.load_state_dict(random_weights(network, hot or {}))
    network.to(dtype)
    return vae


def vae_in_fp32(vae: Any, *, temporal: bool = False) -> Any:
    """Return a VAE with the same weights in fp32."""
    twin = make_vae(torch.float32, temporal=temporal)
    twin.first_stage_model.load_state_dict({n: w.float() for n, w in vae.first_stage_model.state_dict().items()})
    return twin
