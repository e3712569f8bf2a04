"""A single file that ComfyUI loads as SD1.5, which makes images of smooth colours and whose UNet overflows in fp16.

Random weights make grey noise, which looks like a broken image. So the layers of `native_checkpoints`' small SD1.5 get
computed weights. All blocks return their input; their own result is multiplied by 0, so that it has no effect unless it
overflowed to NaN. The UNet's first and last layer predict the noise as the difference to a blur. The VAE's decoder
enlarges latents smoothly and mixes three of them to a palette.
"""

from __future__ import annotations

import math
from pathlib import Path

import native_checkpoints
import svd_layout
import torch
from safetensors.torch import save_file
from svd_layout import UNET, VAE
from torch import Tensor

ANCHOR = 1000.0  # two channels of a group hold ±this, so that its norm does not depend on the latents
GROUP, COLOUR_GROUP = 10, 4  # channels in a group of the UNet's last norm, and of the decoder's
GAIN = 1.5  # of the blur: above 1, low frequencies and so the areas of colour grow
HANDED_ON = ("out_layers.3", "proj_out", "conv2")  # last layers of residual branches
OVERFLOWING = f"{UNET}middle_block.0.in_layers"  # its norm and its convolution
PALETTE = ((0.36, 0.20, 0.10), (0.08, -0.10, -0.30), (-0.20, 0.06, 0.14))  # red, green and blue of each field


def write(file: Path) -> None:
    """Write the file in fp16, like common checkpoints."""
    weights = svd_layout.draw(dict(native_checkpoints.sd15()))
    for key, weight in weights.items():
        name = key.removesuffix(".weight").removesuffix(".bias")
        if name.endswith(HANDED_ON) or native_checkpoints.is_idle(key):
            weight.zero_()
        elif name.endswith(("skip_connection", "nin_shortcut")):
            weight.zero_()
            if weight.dim() == 4:
                _hand_on(weight)
    weights[f"{OVERFLOWING}.0.bias"].fill_(1.0)  # gives the convolution a nonzero input in any case
    weights[f"{OVERFLOWING}.2.weight"] *= 3e5
    _set_unet(weights)
    _set_decoder(weights)
    save_file({key: weight.half() for key, weight in weights.items()}, file)


def _blur() -> Tensor:
    return torch.full((3, 3), 1 / 9)


def _hand_on(weight: Tensor, kernel: Tensor | None = None) -> None:
    """Copy each channel, or blur it with `kernel`."""
    middle = weight.shape[-1] // 2
    for channel in range(min(weight.shape[:2])):
        if kernel is None:
            weight[channel, channel, middle, middle] = 1.0
        else:
            weight[channel, channel] = kernel


def _set_unet(weights: dict[str, Tensor]) -> None:
    """noise = latent - GAIN * blur(blur(latent)). silu(x) - silu(-x) = x, so pairs of channels pass unchanged."""
    for layer in ("input_blocks.0.0", "out.0", "out.2"):
        weights[f"{UNET}{layer}.weight"].zero_()
        weights[f"{UNET}{layer}.bias"].zero_()
    first, first_bias = weights[f"{UNET}input_blocks.0.0.weight"], weights[f"{UNET}input_blocks.0.0.bias"]
    last = weights[f"{UNET}out.2.weight"]
    weights[f"{UNET}out.0.weight"] += math.sqrt(2 / GROUP) * ANCHOR
    for latent in range(4):
        for sign in (0, 1):
            same, blurred, anchor = (GROUP * latent + 2 * pair + sign for pair in range(3))
            plus = 1 - 2 * sign
            first[same, latent, 1, 1] = plus
            first[blurred, latent] = plus * _blur()
            first_bias[anchor] = plus * ANCHOR
            last[latent, same, 1, 1] = plus
            last[latent, blurred] = -plus * GAIN * _blur()


def _set_decoder(weights: dict[str, Tensor]) -> None:
    """Each latent is a pair of channels and its own group in the last norm, which sets its contrast."""
    entered, mixed, fields = (
        weights[f"{VAE}{layer}.weight"].zero_() for layer in ("decoder.conv_in", "decoder.conv_out", "post_quant_conv")
    )
    _hand_on(fields)
    norm = f"{VAE}decoder.norm_out"
    weights[f"{norm}.weight"].fill_(1.0)
    for bias in (f"{VAE}decoder.conv_in", f"{VAE}decoder.conv_out", f"{VAE}post_quant_conv", norm):
        weights[f"{bias}.bias"].zero_()
    for level in (1, 2, 3):
        enlarged = f"{VAE}decoder.up.{level}.upsample.conv"
        weights[f"{enlarged}.bias"].zero_()
        _hand_on(weights[f"{enlarged}.weight"].zero_(), _blur())
    for field, colours in enumerate(PALETTE):
        for sign in (1, -1):
            channel = COLOUR_GROUP * field + (sign < 0)
            entered[channel, field, 1, 1] = sign
            mixed[:, channel, 1, 1] = sign * torch.tensor(colours)
