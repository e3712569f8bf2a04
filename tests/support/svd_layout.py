"""Keys and shapes of a Stable Video Diffusion single file of any size, and a writer of such files.

Written from the published file, not from the tables in pipelines/families/svd_keys.py, which it tests. A test checks
that it gives the committed key list at the published sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

Keys = Iterator[tuple[str, tuple[int, ...]]]
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP = "conditioner.embedders.0.open_clip.model."
SECOND_VAE = "conditioner.embedders.3.encoder."


@dataclass(frozen=True)
class Layout:
    channels: tuple[int, ...] = (64, 128)  # of the UNet's levels
    attends: tuple[bool, ...] = (True, False)
    blocks: int = 1  # per level
    vae_channels: tuple[int, ...] = (32, 64)
    vae_blocks: int = 2  # diffusers' decoder has as many in its middle; the file has two
    width: int = 160  # of CLIP
    layers: int = 2
    patch: int = 14
    image: int = 28
    projected: int = 48  # width of CLIP's output, the UNet's context
    vocabulary: int = 16
    text_length: int = 8


TINY = Layout()
REAL = Layout(
    channels=(320, 640, 1280, 1280),
    attends=(True, True, True, False),
    blocks=2,
    vae_channels=(128, 256, 512, 512),
    width=1280,
    layers=32,
    image=224,
    projected=1024,
    vocabulary=49408,
    text_length=77,
)


def shapes(layout: Layout, *, unused: bool = True) -> dict[str, tuple[int, ...]]:
    """unused: with the unused parts of the published files: CLIP's text half and a second VAE."""
    found = dict(_unet(layout))
    found |= {VAE + key: shape for key, shape in autoencoder(layout, temporal=True)}
    found |= _vision(layout)
    if unused:
        found |= {SECOND_VAE + key: shape for key, shape in autoencoder(layout, temporal=False)}
        found |= dict(conv(SECOND_VAE + "quant_conv", 8, 8, 1, 1))
        found |= dict(conv(SECOND_VAE + "post_quant_conv", 4, 4, 1, 1))
        found |= _text(layout)
    return found


def weights(layout: Layout, *, unused: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    return draw(shapes(layout, unused=unused), seed)


def draw(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights that keep activations near 1; no two tensors are interchangeable."""
    generator = torch.Generator().manual_seed(seed)

    def one(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        random = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return random * prod(shape[1:]) ** -0.5
        return 0.2 * random + (1.0 if key.endswith(".weight") else 0.0)  # a norm's weight, or a bias or a mix factor

    return {key: one(key, shape) for key, shape in sorted(shapes.items())}


def write(file: Path, layout: Layout = TINY, **options: bool) -> Path:
    save_file(weights(layout, **options), file)
    return file


def conv(name: str, to: int, *of: int) -> Keys:
    yield f"{name}.weight", (to, *of)
    yield f"{name}.bias", (to,)


def norm(name: str, width: int) -> Keys:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def resblock(name: str, of: int, to: int, embedded: int, kernel: tuple[int, ...]) -> Keys:
    yield from norm(f"{name}.in_layers.0", of)
    yield from conv(f"{name}.in_layers.2", to, of, *kernel)
    if embedded:
        yield from conv(f"{name}.emb_layers.1", to, embedded)
    yield from norm(f"{name}.out_layers.0", to)
    yield from conv(f"{name}.out_layers.3", to, to, *kernel)
    if of != to:
        yield from conv(f"{name}.skip_connection", to, of, 1, 1)


def _video_resblock(name: str, of: int, to: int, embedded: int) -> Keys:
    yield from resblock(name, of, to, embedded, (3, 3))
    yield from resblock(f"{name}.time_stack", to, to, embedded, (3, 1, 1))
    yield f"{name}.time_mixer.mix_factor", (1,)


def transformer(name: str, width: int, context: int, *, feeds_in: bool) -> Keys:
    for attention, of in (("attn1", width), ("attn2", context)):
        yield f"{name}.{attention}.to_q.weight", (width, width)
        yield f"{name}.{attention}.to_k.weight", (width, of)
        yield f"{name}.{attention}.to_v.weight", (width, of)
        yield from conv(f"{name}.{attention}.to_out.0", width, width)
    for number in (1, 2, 3):
        yield from norm(f"{name}.norm{number}", width)
    if feeds_in:
        yield from norm(f"{name}.norm_in", width)
    for feed in ("ff", "ff_in") if feeds_in else ("ff",):
        yield from conv(f"{name}.{feed}.net.0.proj", 8 * width, width)
        yield from conv(f"{name}.{feed}.net.2", width, 4 * width)


def _video_attention(name: str, width: int, context: int) -> Keys:
    yield from norm(f"{name}.norm", width)
    yield from conv(f"{name}.proj_in", width, width)
    yield from conv(f"{name}.proj_out", width, width)
    yield from transformer(f"{name}.transformer_blocks.0", width, context, feeds_in=False)
    yield from transformer(f"{name}.time_stack.0", width, context, feeds_in=True)
    yield from conv(f"{name}.time_pos_embed.0", 4 * width, width)
    yield from conv(f"{name}.time_pos_embed.2", width, 4 * width)
    yield f"{name}.time_mixer.mix_factor", (1,)


def _unet(layout: Layout) -> Keys:
    first, context = layout.channels[0], layout.projected
    embedded = 4 * first
    for name, of in (("time_embed.", first), ("label_emb.0.", 3 * 256)):
        yield from conv(f"{UNET}{name}0", embedded, of)
        yield from conv(f"{UNET}{name}2", embedded, embedded)
    yield from conv(f"{UNET}input_blocks.0.0", first, 8, 3, 3)
    levels = list(zip(layout.channels, layout.attends, strict=True))
    width, skips, number = first, [first], 1
    for level, (to, attends) in enumerate(levels):
        for _ in range(layout.blocks):
            yield from _video_resblock(f"{UNET}input_blocks.{number}.0", width, to, embedded)
            if attends:
                yield from _video_attention(f"{UNET}input_blocks.{number}.1", to, context)
            width, number = to, number + 1
            skips.append(width)
        if level < len(levels) - 1:
            yield from conv(f"{UNET}input_blocks.{number}.0.op", width, width, 3, 3)
            number += 1
            skips.append(width)
    yield from _video_resblock(f"{UNET}middle_block.0", width, width, embedded)
    yield from _video_attention(f"{UNET}middle_block.1", width, context)
    yield from _video_resblock(f"{UNET}middle_block.2", width, width, embedded)
    number = 0
    for level, (to, attends) in reversed(list(enumerate(levels))):
        for block in range(layout.blocks + 1):
            yield from _video_resblock(f"{UNET}output_blocks.{number}.0", width + skips.pop(), to, embedded)
            if attends:
                yield from _video_attention(f"{UNET}output_blocks.{number}.1", to, context)
            if level and block == layout.blocks:
                yield from conv(f"{UNET}output_blocks.{number}.{1 + attends}.conv", to, to, 3, 3)
            width, number = to, number + 1
    yield from norm(f"{UNET}out.0", width)
    yield from conv(f"{UNET}out.2", 4, width, 3, 3)


def _vae_resblock(name: str, of: int, to: int, *, temporal: bool) -> Keys:
    yield from norm(f"{name}.norm1", of)
    yield from conv(f"{name}.conv1", to, of, 3, 3)
    yield from norm(f"{name}.norm2", to)
    yield from conv(f"{name}.conv2", to, to, 3, 3)
    if of != to:
        yield from conv(f"{name}.nin_shortcut", to, of, 1, 1)
    if temporal:
        yield from resblock(f"{name}.time_stack", to, to, 0, (3, 1, 1))
        yield f"{name}.mix_factor", (1,)


def _vae_middle(name: str, width: int, *, temporal: bool) -> Keys:
    for block in ("block_1", "block_2"):
        yield from _vae_resblock(f"{name}.mid.{block}", width, width, temporal=temporal)
    yield from norm(f"{name}.mid.attn_1.norm", width)
    for part in ("q", "k", "v", "proj_out"):
        yield from conv(f"{name}.mid.attn_1.{part}", width, width, 1, 1)


def autoencoder(layout: Layout, *, temporal: bool) -> Keys:
    channels, last = layout.vae_channels, len(layout.vae_channels) - 1
    yield from conv("encoder.conv_in", channels[0], 3, 3, 3)
    width = channels[0]
    for level, to in enumerate(channels):
        for block in range(layout.vae_blocks):
            yield from _vae_resblock(f"encoder.down.{level}.block.{block}", width, to, temporal=False)
            width = to
        if level < last:
            yield from conv(f"encoder.down.{level}.downsample.conv", to, to, 3, 3)
    yield from _vae_middle("encoder", width, temporal=False)
    yield from norm("encoder.norm_out", width)
    yield from conv("encoder.conv_out", 8, width, 3, 3)

    yield from conv("decoder.conv_in", width, 4, 3, 3)
    yield from _vae_middle("decoder", width, temporal=temporal)
    for level, to in reversed(list(enumerate(channels))):
        for block in range(layout.vae_blocks + 1):
            yield from _vae_resblock(f"decoder.up.{level}.block.{block}", width, to, temporal=temporal)
            width = to
        if level:
            yield from conv(f"decoder.up.{level}.upsample.conv", to, to, 3, 3)
    yield from norm("decoder.norm_out", width)
    yield from conv("decoder.conv_out", 3, width, 3, 3)
    if temporal:
        yield from conv("decoder.conv_out.time_mix_conv", 3, 3, 3, 1, 1)


def _vision(layout: Layout) -> dict[str, tuple[int, ...]]:
    width, here = layout.width, CLIP + "visual."
    found: dict[str, tuple[int, ...]] = {
        here + "class_embedding": (width,),
        here + "positional_embedding": ((layout.image // layout.patch) ** 2 + 1, width),
        here + "conv1.weight": (width, 3, layout.patch, layout.patch),
        here + "proj": (width, layout.projected),
    }
    found |= dict(norm(here + "ln_pre", width)) | dict(norm(here + "ln_post", width))
    for i in range(layout.layers):
        layer = f"{here}transformer.resblocks.{i}."
        found |= dict(norm(layer + "ln_1", width)) | dict(norm(layer + "ln_2", width))
        found[layer + "attn.in_proj_weight"] = (3 * width, width)
        found[layer + "attn.in_proj_bias"] = (3 * width,)
        found |= dict(conv(layer + "attn.out_proj", width, width))
        found |= dict(conv(layer + "mlp.c_fc", 4 * width, width))
        found |= dict(conv(layer + "mlp.c_proj", width, 4 * width))
    return found


def _text(layout: Layout) -> dict[str, tuple[int, ...]]:
    return {
        CLIP + "positional_embedding": (layout.text_length, layout.projected),
        CLIP + "text_projection": (layout.projected, layout.projected),
        CLIP + "logit_scale": (),
        CLIP + "token_embedding.weight": (layout.vocabulary, layout.projected),
        **dict(norm(CLIP + "ln_final", layout.projected)),
    }


_AS_SAVED = {  # OpenCLIP → transformers names, as in comfy.utils.transformers_convert and comfy.clip_vision
    "class_embedding": "vision_model.embeddings.class_embedding",
    "positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "ln_pre.": "vision_model.pre_layrnorm.",
    "ln_post.": "vision_model.post_layernorm.",
    "transformer.resblocks.": "vision_model.encoder.layers.",
    ".ln_1.": ".layer_norm1.",
    ".ln_2.": ".layer_norm2.",
    ".attn.": ".self_attn.",
    ".c_fc.": ".fc1.",
    ".c_proj.": ".fc2.",
}


def as_comfyui_saves(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As ComfyUI's ImageOnlyCheckpointSave saves it: CLIP with transformers' names, without unused parts."""
    saved: dict[str, torch.Tensor] = {}
    here = CLIP + "visual."
    for key, tensor in published.items():
        if key.startswith((UNET, VAE)):
            saved[key] = tensor
        elif key == here + "proj":
            saved[here + "visual_projection.weight"] = tensor.t().contiguous()
        elif key.startswith(here):
            name = key.removeprefix(here)
            for old, new in _AS_SAVED.items():
                name = name.replace(old, new)
            if "in_proj_" in name:
                for part, third in zip("qkv", tensor.chunk(3), strict=True):
                    saved[here + name.replace("in_proj_", f"{part}_proj.")] = third.contiguous()
            else:
                saved[here + name] = tensor
    return saved
