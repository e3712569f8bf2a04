"""Decoder weights set by formula: latents become smooth colours (see flow_denoiser.py for why).

Three latent channels are the fields that carry the picture. Each is held with both signs, because
silu(x) - silu(-x) = x, so that a real ResNet block can pass it on unchanged; two anchors, far larger, keep every
GroupNorm's standard deviation constant. Upsamplers interpolate in space, two ResNet blocks in time, and the last level
looks the colour up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLCogVideoX
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSpatialNorm3D
from torch import Tensor, nn

BLOCK_CHANNELS = (32, 16, 8, 16)  # block_out_channels; a ResNet block has a shortcut to close where they change
FIELDS = 3
ANCHOR = 40.0
PAIRS = ((0, 3), (1, 4), (2, 5), (6, 7))  # channels that hold the three fields and the anchor with both signs
FEATURES = BLOCK_CHANNELS[0] - 2
SHARPNESS = 3.0

HUE = torch.tensor([0.85, 0.53, 0.0])  # direction in field space along which STOPS lie
FOLD = torch.tensor([-0.30, 0.30, 0.90])  # direction along which light and shade alternate
STOPS = (0x070B2B, 0x1B1F6B, 0x5B2A9B, 0xC23A86, 0xFF7A5C, 0xFFD08A, 0x6FD3C4, 0x14708F, 0x0A2350)
REACH = 2.7  # the stops cover -REACH to REACH
BORDER = 0x05060F  # what the zero padding at the frame's border fades to


def set_decoder(vae: AutoencoderKLCogVideoX) -> None:
    """Give the decoder of a VAE with BLOCK_CHANNELS and one normalisation group its weights (in place)."""
    decoder: Any = vae.decoder
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        for module in decoder.modules():
            if isinstance(module, CogVideoXSpatialNorm3D):
                norm: Any = module.norm_layer
                norm.weight.fill_(math.sqrt(2 * ANCHOR**2 / norm.num_channels))
                scale: Any = module.conv_y.conv
                scale.bias.fill_(1.0)
        for field, channels in enumerate(PAIRS[:FIELDS]):
            for channel, sign in zip(channels, (1.0, -1.0), strict=True):
                decoder.conv_in.conv.weight[channel, field, -1, 1, 1] = sign
        for channel, sign in zip(PAIRS[-1], (1.0, -1.0), strict=True):
            decoder.conv_in.conv.bias[channel] = sign * ANCHOR
        for block, taps in ((decoder.up_blocks[1], (1 / 3, 1 / 3, 1 / 3)), (decoder.up_blocks[2], (0.0, 0.5, 0.5))):
            _pass_on(block.resnets[0].conv1.conv, taps)
            _pass_on(block.resnets[0].conv2.conv, (0.0, 0.0, 1.0))
        tent = torch.tensor([0.25, 0.5, 0.25])
        for block in decoder.up_blocks[:3]:
            for channel in range(2 * len(PAIRS)):
                block.upsamplers[0].conv.weight[channel, channel] = tent[:, None] * tent[None, :]
        _colour(decoder)


def _pass_on(convolution: nn.Conv3d, taps: Sequence[float]) -> None:
    """Undo the SiLU before `convolution`, and filter in time; taps: weights of the last three frames, oldest first."""
    kernel = torch.tensor(taps)
    for pair in PAIRS:
        for target, sign in zip(pair, (1.0, -1.0), strict=True):
            convolution.weight[target, pair[0], :, 1, 1] = sign * kernel
            convolution.weight[target, pair[1], :, 1, 1] = -sign * kernel


def _colour(decoder: Any) -> None:
    """The last level: SiLU features of the fields, and the palette fitted to them by ridge regression."""
    directions, offsets = _features()
    lift = decoder.up_blocks[3].resnets[0].conv_shortcut.weight[:, :, 0, 0, 0]
    lift[:FEATURES, :FIELDS] = directions
    lift[:FEATURES, PAIRS[-1][0]] = offsets / ANCHOR
    for channel, sign in ((FEATURES, SHARPNESS), (FEATURES + 1, -SHARPNESS)):
        lift[channel, PAIRS[-1][0]] = sign
    fields = 1.2 * torch.randn(20000, FIELDS, generator=torch.Generator().manual_seed(5))
    raw = fields @ directions.T + offsets
    mean = raw.mean() * FEATURES / BLOCK_CHANNELS[0]
    total = raw.square().mean() * FEATURES + 2 * (SHARPNESS * ANCHOR) ** 2
    decoder.norm_out.norm_layer.weight.fill_((total / BLOCK_CHANNELS[0] - mean**2).sqrt())
    features = nn.functional.silu(raw - mean).double()
    border = 2 * _colours((BORDER,))[0] - 1
    wanted = (2 * palette(fields) - 1 - border).double()
    gram = features.T @ features + 1e-3 * len(features) * torch.eye(FEATURES, dtype=torch.float64)
    solution = torch.linalg.solve(gram, features.T @ wanted)
    decoder.conv_out.conv.weight[:, :FEATURES, -1, 1, 1] = solution.T.float()
    decoder.conv_out.conv.bias.copy_(border)


def _features() -> tuple[Tensor, Tensor]:
    """Directions [FEATURES, FIELDS] and offsets [FEATURES] of ramps whose knots lie along HUE and FOLD.

    Their signs alternate, so that the mean over channels, which GroupNorm takes away, does not follow the fields.
    """
    along_fold = 10
    along_hue = FEATURES - along_fold
    knots = torch.cat([torch.linspace(-2.8, 2.8, along_hue), torch.linspace(-2.2, 2.2, along_fold)])
    directions = torch.cat([HUE.expand(along_hue, -1), FOLD.expand(along_fold, -1)])
    signs = SHARPNESS * torch.tensor([1.0, -1.0]).repeat(FEATURES // 2)
    return signs[:, None] * directions, -signs * knots


def palette(fields: Tensor) -> Tensor:
    """Colour, float 0..1 [n, 3], of fields [n, FIELDS]: a gradient along HUE, lighter and darker along FOLD."""
    stops = _colours(STOPS)
    place = ((fields @ HUE + REACH) / (2 * REACH)).clamp(0, 1) * (len(stops) - 1)
    index = place.floor().clamp(max=len(stops) - 2).long()
    between = (place - index)[:, None]
    light = 0.13 * torch.cos(3.2 * (fields @ FOLD))[:, None]
    return (stops[index].lerp(stops[index + 1], between**2 * (3 - 2 * between)) + light).clamp(0, 1)


def _colours(codes: Sequence[int]) -> Tensor:
    return torch.tensor([[code >> 16, code >> 8 & 255, code & 255] for code in codes]) / 255
