"""Small versions of the diffusers denoisers that have a residual stream, with the arguments of one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS, COGVIEW4
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from diffusers import CogVideoXTransformer3DModel, CogView3PlusTransformer2DModel, CogView4Transformer2DModel
from stream_peaks import stream_peak

HEADS, HEAD = 4, 16  # attention heads, channels per head
TEXT, TOKENS = 32, 12  # channels and tokens of a prompt's embedding
HEIGHT, WIDTH = 8, 12  # of latents
ATTENTION, FEED_FORWARD = "attn1.to_out.0", "ff.net.2"  # layers that write to the stream, in each block


@dataclass(frozen=True)
class Model:
    cls: Any  # of diffusers
    family: FamilySpec
    gates: dict[str, tuple[str, int, int]]  # writer → layer that makes its gates, and their indices: image and text
    config: dict[str, Any]


def _cogvideox(**config: Any) -> Model:
    config |= {"time_embed_dim": 32, "text_embed_dim": TEXT, "sample_frames": 9}
    gates = {ATTENTION: ("norm1.linear", 2, 5), FEED_FORWARD: ("norm2.linear", 2, 5)}
    return Model(CogVideoXTransformer3DModel, COGVIDEOX, gates, config)


def _cogview(cls: Any, family: FamilySpec, attention: tuple[int, int], feed_forward: tuple[int, int]) -> Model:
    gates = {ATTENTION: ("norm1.linear", *attention), FEED_FORWARD: ("norm1.linear", *feed_forward)}
    config = {"time_embed_dim": 32, "text_embed_dim": TEXT, "condition_dim": 8, "pos_embed_max_size": 8}
    return Model(cls, family, gates, config)


_ROTARY = {"use_rotary_positional_embeddings": True}
_ROTARY_15 = _ROTARY | {"patch_size_t": 2, "patch_bias": False}
MODELS = {
    "CogVideoX-2B": _cogvideox(),
    "CogVideoX-5B": _cogvideox(**_ROTARY),
    "CogVideoX-5B-I2V": _cogvideox(**_ROTARY, use_learned_positional_embeddings=True, in_channels=32),
    "CogVideoX-1.5-5B": _cogvideox(**_ROTARY_15),
    "CogVideoX-1.5-5B-I2V": _cogvideox(**_ROTARY_15, in_channels=32, ofs_embed_dim=32),
    "CogView3-Plus": _cogview(CogView3PlusTransformer2DModel, COGVIEW3PLUS, (2, 8), (5, 11)),
    "CogView4": _cogview(CogView4Transformer2DModel, COGVIEW4, (4, 5), (10, 11)),
}


def build(name: str, *, peak: float | None = None, writer: str = FEED_FORWARD) -> tuple[Any, dict[str, Any]]:
    """(denoiser in float32, arguments of one call). With `peak`, one block's `writer` takes the stream there."""
    torch.manual_seed(0)
    model = MODELS[name]
    config = model.config | {"num_attention_heads": HEADS, "attention_head_dim": HEAD, "num_layers": 3}
    if model.family is COGVIDEOX:
        config |= {"max_text_seq_length": TOKENS, "sample_width": WIDTH, "sample_height": HEIGHT}
    denoiser = model.cls(**config).eval().requires_grad_(False)
    for layer in denoiser.modules():  # initialised as 1 and 0, which would hide code that ignores them
        if isinstance(layer, torch.nn.LayerNorm) and layer.elementwise_affine:
            layer.weight.add_(torch.randn_like(layer.weight), alpha=0.1)
            layer.bias.add_(torch.randn_like(layer.bias), alpha=0.1)
    call = _call(denoiser, is_video=model.family is COGVIDEOX)
    if peak:
        _overflow(model, denoiser, call, peak, writer)
    return denoiser, call


def in_dtype(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}


def _call(denoiser: Any, *, is_video: bool) -> dict[str, Any]:
    config = denoiser.config
    frames: list[int] = []
    if is_video:
        frames = [4 if config.patch_size_t else 3]
        if config.use_learned_positional_embeddings:
            torch.nn.init.normal_(denoiser.patch_embed.pos_embedding, std=0.1)
    call: dict[str, Any] = {
        "hidden_states": torch.randn(2, *frames, config.in_channels, HEIGHT, WIDTH),
        "encoder_hidden_states": torch.randn(2, TOKENS, TEXT),
        "timestep": torch.tensor([700, 700]),
        "return_dict": False,
    }
    if not is_video:
        pixels = torch.tensor([[8.0 * HEIGHT, 8.0 * WIDTH]] * 2)
        return call | {"original_size": pixels, "target_size": pixels, "crop_coords": torch.zeros(2, 2)}
    if config.use_rotary_positional_embeddings:
        angles = torch.rand(frames[0] // (config.patch_size_t or 1) * HEIGHT * WIDTH // 4, HEAD)
        call["image_rotary_emb"] = (angles.cos(), angles.sin())
    if config.ofs_embed_dim:
        call["ofs"] = torch.full((1,), 2.0)
    return call


def _overflow(model: Model, denoiser: Any, call: dict[str, Any], peak: float, writer: str) -> None:
    """Its product with the gate takes the stream to `peak`; the inputs of that product stay in fp16's range."""
    block = denoiser.transformer_blocks[len(denoiser.transformer_blocks) // 2]
    layer, *gates = model.gates[writer]
    biases = block.get_submodule(layer).bias.view(-1, denoiser.config.num_attention_heads * HEAD)
    biases[gates] += 16
    for _ in range(3):
        found = stream_peak(denoiser, model.family.blocks, lambda: denoiser(**call))
        block.get_submodule(writer).weight.mul_(peak / found)
