"""Weights set by formula, not trained: a small CogVideoX whose videos are slowly flowing colours.

Random weights decode to grey noise, which would say nothing to somebody who runs the demo. Here each real layer is
given a job that can be written down:

- denoiser, block 0: queries and keys read the sinusoidal positions, so attention is a Gaussian-like blur of the noisy
  latents in space and time; the blur, scaled to unit variance, is the prediction of the clean latents.
- denoiser, block 1: attention adds the mean of the prompt's tokens (another prompt, other colours); the feed-forward
  copies the stream on, a few channels of it tens of thousands of times larger when it is to leave fp16's range.
- norm_out and proj_out: v = p(t) * noisy + r(t) * clean, the two gains fitted to the scheduler by least squares.
- VAE decoder: bilinear upsampling in space, a box filter in time, and a colour table as its last two layers.

The numbers follow from the seed's noise alone, in any number of steps, at any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_cogvideox import CogVideoXSpatialNorm3D
from torch import Tensor, nn

HEADS, HEAD_DIM, WIDTH = 4, 32, 128  # one head for each of the 2 x 2 latents in a patch
FIELDS = 3  # latent channels that carry the picture
ANCHOR = 16.0  # two channels hold +-this: they fix each LayerNorm's standard deviation
NOISY, CLEAN = 0.5, 0.5  # standard deviations at which the stream holds the noisy and the clean latents
HIDDEN_GAIN = 4.0  # of the copying feed-forward's hidden activations
SPACE_KERNEL = {1: 4.0, 3: 8.0, 6: 10.0}  # index of a position's frequency -> attention logit it adds
TIME_KERNEL = {1: 2.0, 3: 4.0}
PROMPT_GAIN = 1.0
DECODER_CHANNELS = (16, 12, 8, 12)  # block_out_channels; where a block changes them, its shortcut can be closed
VAE_ANCHOR = 40.0


@dataclass(frozen=True)
class Channels:
    """Which channels of the residual stream hold what. Taken from those whose position code hardly varies."""

    anchors: tuple[int, int]
    noisy: list[list[int]]  # [field][sub-pixel]
    noisy_zero: int  # holds no content: read against it, LayerNorm's mean cancels
    clean: list[list[int]]
    clean_zero: int
    prompt: list[int]  # [field], written by text tokens alone

    @classmethod
    def choose(cls) -> Channels:
        time, space = WIDTH // 8, 3 * WIDTH // 16  # number of frequencies: of time, of each spatial axis
        slow_time, slow_space = range(time // 2, time), range(2 * space // 3, space)
        starts = (2 * time, 2 * time + 2 * space)
        sines = [i for i in slow_time] + [start + i for start in starts for i in slow_space]
        cosines = [time + i for i in slow_time] + [start + space + i for start in starts for i in slow_space]

        def take(pool: list[int]) -> list[list[int]]:
            return [[pool.pop() for _ in range(HEADS)] for _ in range(FIELDS)]

        return cls(
            anchors=(sines.pop(0), sines.pop(0)),
            noisy=take(cosines),
            noisy_zero=cosines.pop(),
            clean=take(sines),
            clean_zero=sines.pop(),
            prompt=[sines.pop() for _ in range(FIELDS)],
        )


def set_denoiser(transformer: CogVideoXTransformer3DModel, schedule: CogVideoXDDIMScheduler, *, peak: float) -> None:
    """Give a 2b-style denoiser of width 128 and two blocks its weights (in place).

    peak: what |residual stream| reaches after the last block.
    """
    channels = Channels.choose()
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.zero_()
        for module in transformer.modules():
            if isinstance(module, nn.LayerNorm) and module.weight is not None:
                module.weight.fill_(1.0)
        blurring, copying = transformer.transformer_blocks
        spread = _embed(transformer, channels)
        alpha, sigma = _noise_levels(schedule)
        noise_gain, smooth_gain = _kernel_gains()
        blurred = alpha * smooth_gain + sigma * noise_gain  # standard deviation of the blurred noisy latents
        features = _time_features(transformer)
        _blur(blurring, channels, spread=spread, gain=CLEAN / noise_gain)
        for norm in (blurring.norm1, copying.norm1, copying.norm2):
            norm.linear.bias[2 * WIDTH : 3 * WIDTH] = 1.0  # gates
            norm.linear.bias[5 * WIDTH :] = 1.0
        _fit(blurring.norm1.linear, features, noise_gain / blurred, rows=range(2 * WIDTH, 3 * WIDTH))
        _balance(copying, channels, spread=spread)
        _copy(copying, peak=peak, spread=spread)
        _read_out(transformer, channels, features, alpha, sigma, spread=spread)


def _embed(transformer: CogVideoXTransformer3DModel, channels: Channels) -> float:
    """Noisy latents and anchors into the stream. Returns the stream's standard deviation over its channels."""
    embed = transformer.patch_embed
    for field, row in enumerate(channels.noisy):
        for pixel, channel in enumerate(row):
            embed.proj.weight[channel, field, pixel // 2, pixel % 2] = NOISY
    for projection in (embed.proj, embed.text_proj):
        projection.bias[channels.anchors[0]] = ANCHOR
        projection.bias[channels.anchors[1]] = -ANCHOR
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(FIELDS, embed.text_proj.in_features, generator=generator)
    embed.text_proj.weight[channels.prompt] = words / math.sqrt(embed.text_proj.in_features)
    positions = embed.pos_embedding[0, -1].var(unbiased=False).item()
    contents = FIELDS * HEADS * (NOISY**2 + CLEAN**2)
    return math.sqrt(positions + (2 * ANCHOR**2 + contents) / WIDTH)


def _noise_levels(schedule: CogVideoXDDIMScheduler) -> tuple[Tensor, Tensor]:
    """alpha and sigma at each training timestep: noisy = alpha * clean + sigma * noise."""
    product = schedule.alphas_cumprod.double()
    return product.sqrt(), (1 - product).sqrt()


def _kernel_gains(size: int = 24, frames: int = 9) -> tuple[float, float]:
    """Standard deviation after the blur of white noise, and of noise that was blurred once (relative to before)."""
    space = torch.arange(size).double() / 1.875
    kernels = []
    for positions, kernel, count in ((space, SPACE_KERNEL, 24), (torch.arange(frames).double(), TIME_KERNEL, 16)):
        distance = positions[:, None] - positions[None, :]
        logits = sum(logit * torch.cos(10000 ** (-i / count) * distance) for i, logit in kernel.items())
        kernels.append(torch.as_tensor(logits).softmax(-1))
    once = [kernel.square().sum(-1).mean().item() for kernel in kernels]
    twice = [(kernel @ kernel).square().sum(-1).mean().item() for kernel in kernels]
    first, second = (math.sqrt(gain[0] ** 2 * gain[1]) for gain in (once, twice))
    return first / 2, second / first  # a patch is the mean of four latents: half the standard deviation


def _time_features(transformer: CogVideoXTransformer3DModel) -> Tensor:
    """Fix a random time embedding that varies slowly; returns silu(temb) for each training timestep [1000, n]."""
    generator = torch.Generator().manual_seed(2)
    embedding = transformer.time_embedding
    slow = torch.arange(WIDTH // 2) > 20  # frequencies below 0.05
    first = torch.randn(embedding.linear_1.weight.shape, generator=generator)
    embedding.linear_1.weight.copy_(first * torch.cat([slow, slow]) * 0.3)
    embedding.linear_1.bias.copy_(torch.randn(embedding.linear_1.bias.shape, generator=generator))
    embedding.linear_2.weight.copy_(torch.randn(embedding.linear_2.weight.shape, generator=generator) * 0.4)
    embedding.linear_2.bias.copy_(torch.randn(embedding.linear_2.bias.shape, generator=generator))
    timesteps = torch.arange(1000)
    return nn.functional.silu(embedding(transformer.time_proj(timesteps))).double()


def _fit(linear: nn.Linear, features: Tensor, target: Tensor, rows: Sequence[int]) -> None:
    """Make each of `rows` of linear(features) follow `target`, one number per timestep, by ridge regression."""
    inputs = torch.cat([features, torch.ones(len(features), 1, dtype=features.dtype)], dim=1)
    gram = inputs.T @ inputs + 1e-4 * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    solution = torch.linalg.solve(gram, inputs.T @ target.double()).float()
    linear.weight[list(rows)] = solution[:-1]
    linear.bias[list(rows)] = solution[-1]


def _blur(block: nn.Module, channels: Channels, *, spread: float, gain: float) -> None:
    """Attention by distance: head j blurs around sub-pixel j of the patch and writes `gain` times the result."""
    attention = block.attn1
    time, space = WIDTH // 8, 3 * WIDTH // 16
    codes = [(i, time + i, logit, 10000 ** (-i / time), None) for i, logit in TIME_KERNEL.items()]
    for axis, start in enumerate((2 * time, 2 * time + 2 * space)):  # x, then y
        codes += [
            (start + i, start + space + i, logit, 10000 ** (-i / space), axis) for i, logit in SPACE_KERNEL.items()
        ]
    total = sum(logit for _, _, logit, _, _ in codes)
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(math.sqrt(total / math.sqrt(HEAD_DIM)))
    for head in range(HEADS):
        first = head * HEAD_DIM
        for k, (sine, cosine, logit, frequency, axis) in enumerate(codes):
            shift = 0.0 if axis is None else ((head % 2, head // 2)[axis] - 0.5) / 2 / 1.875 * frequency
            size = 100 * math.sqrt(logit)
            for row, sign in ((first + 2 * k, 1.0), (first + HEAD_DIM // 2 + 2 * k, -1.0)):  # +-: LayerNorm's mean is 0
                for weight, angle in ((attention.to_q.weight, shift), (attention.to_k.weight, 0.0)):
                    for offset, terms in (
                        (0, ((sine, math.cos(angle)), (cosine, math.sin(angle)))),
                        (1, ((cosine, math.cos(angle)), (sine, -math.sin(angle)))),
                    ):
                        for channel, factor in terms:
                            weight[row + offset, channel] += sign * size * factor
                            weight[row + offset, channels.clean_zero] -= sign * size * factor
        for field, row in enumerate(channels.noisy):
            attention.to_v.weight[first + field, row] = spread / NOISY / len(row)
            attention.to_v.weight[first + field, channels.noisy_zero] = -spread / NOISY
            attention.to_out[0].weight[channels.clean[field][head], first + field] = gain


def _balance(block: nn.Module, channels: Channels, *, spread: float) -> None:
    """Attention with equal weights: takes the mean over the video from the clean latents, adds the prompt's mean."""
    attention = block.attn1
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(1.0)
    clean = [channel for row in channels.clean for channel in row]
    for value, channel in enumerate((*clean, *channels.prompt)):
        attention.to_v.weight[value, channel] = spread
        attention.to_v.weight[value, channels.clean_zero] = -spread
        if channel in clean:
            attention.to_out[0].weight[channel, value] = -1.0
        else:
            attention.to_out[0].weight[channels.clean[value - len(clean)], value] = PROMPT_GAIN


def _copy(block: nn.Module, *, peak: float, spread: float) -> None:
    """A feed-forward that writes the normalised stream again, so large that the anchors reach `peak`.

    gelu(x) - gelu(-x) = x, so hidden units in pairs pass anything through unchanged.
    """
    inward, outward = block.ff.net[0].proj, block.ff.net[2]
    one = torch.eye(WIDTH)
    inward.weight[:WIDTH] = HIDDEN_GAIN * one
    inward.weight[WIDTH : 2 * WIDTH] = -HIDDEN_GAIN * one
    size = peak / (ANCHOR / spread) / HIDDEN_GAIN
    outward.weight[:, :WIDTH] = size * one
    outward.weight[:, WIDTH : 2 * WIDTH] = -size * one


def _read_out(
    transformer: CogVideoXTransformer3DModel,
    channels: Channels,
    features: Tensor,
    alpha: Tensor,
    sigma: Tensor,
    *,
    spread: float,
) -> None:
    """v = (alpha * noisy - clean) / sigma, the gains held where sigma has become very small."""
    floor = sigma.clamp(min=sigma[15].item())
    for contents, zero, gain, held in (
        (channels.noisy, channels.noisy_zero, alpha / floor, NOISY),
        (channels.clean, channels.clean_zero, -1 / floor, CLEAN),
    ):
        largest = gain.abs().max().item()
        used = [channel for row in contents for channel in row]
        rows = [WIDTH + channel for channel in (*used, zero)]
        _fit(transformer.norm_out.linear, features, gain / largest - 1, rows)
        for field, row in enumerate(contents):
            for pixel, channel in enumerate(row):
                transformer.proj_out.weight[4 * field + pixel, channel] = largest * spread / held
                transformer.proj_out.weight[4 * field + pixel, zero] = -largest * spread / held


def set_decoder(vae: AutoencoderKLCogVideoX) -> None:
    """Give the VAE's decoder its weights (in place); block_out_channels must be DECODER_CHANNELS."""
    decoder = vae.decoder
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
        for module in decoder.modules():
            if isinstance(module, CogVideoXSpatialNorm3D):
                channels = module.norm_layer.num_channels
                module.norm_layer.weight.fill_(math.sqrt(2 * (VAE_ANCHOR**2 + FIELDS) / channels))
                module.conv_y.conv.bias.fill_(1.0)
        for field in range(FIELDS):
            for sign, channel in ((1.0, field), (-1.0, FIELDS + field)):
                decoder.conv_in.conv.weight[channel, field, 2, 1, 1] = sign
        decoder.conv_in.conv.bias[2 * FIELDS] = VAE_ANCHOR
        decoder.conv_in.conv.bias[2 * FIELDS + 1] = -VAE_ANCHOR
        for block, taps in zip(decoder.up_blocks[1:3], ((1 / 3, 1 / 3, 1 / 3), (0.0, 0.5, 0.5)), strict=True):
            for conv, kernel in ((block.resnets[0].conv1, taps), (block.resnets[0].conv2, (0.0, 0.0, 1.0))):
                _pass_pairs(conv.conv, kernel)
        bilinear = torch.tensor([0.25, 0.5, 0.25])
        for block in decoder.up_blocks[:3]:
            convolution = block.upsamplers[0].conv
            for channel in range(2 * FIELDS + 2):
                convolution.weight[channel, channel] = bilinear[:, None] * bilinear[None, :]
        _colour(decoder)


def _pass_pairs(convolution: nn.Conv3d, taps: Sequence[float]) -> None:
    """Pass fields and anchors through a SiLU: silu(x) - silu(-x) = x, and each is there with both signs."""
    pairs = [(field, FIELDS + field) for field in range(FIELDS)] + [(2 * FIELDS, 2 * FIELDS + 1)]
    kernel = torch.tensor(taps)
    for plus, minus in pairs:
        for target, sign in ((plus, 1.0), (minus, -1.0)):
            convolution.weight[target, plus, :, 1, 1] = sign * kernel
            convolution.weight[target, minus, :, 1, 1] = -sign * kernel


def _colour(decoder: nn.Module) -> None:
    """The last level: SiLU features of the fields, and the colours fitted to them by ridge regression."""
    count = DECODER_CHANNELS[0] - 2
    generator = torch.Generator().manual_seed(5)
    fields = 1.2 * torch.randn(20000, FIELDS, generator=generator)
    directions, offsets = palette_features(count)
    lift = decoder.up_blocks[3].resnets[0].conv_shortcut.weight[:, :, 0, 0, 0]
    lift[:count, :FIELDS] = directions
    lift[:count, 2 * FIELDS] = offsets / VAE_ANCHOR
    lift[count, 2 * FIELDS], lift[count + 1, 2 * FIELDS] = 3.0, -3.0
    raw = fields @ directions.T + offsets
    lifted = torch.cat([raw, 3 * VAE_ANCHOR * torch.tensor([[1.0, -1.0]]).expand(len(raw), 2)], dim=1)
    mean, spread = lifted.mean(), lifted.std()
    for resnet in decoder.up_blocks[3].resnets[1:]:
        resnet.conv2.conv.weight.zero_()
    decoder.norm_out.norm_layer.weight.fill_(spread)
    features = nn.functional.silu(raw - mean).double()
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    gram = inputs.T @ inputs / len(inputs) + 1e-4 * torch.eye(count + 1)
    solution = torch.linalg.solve(gram, inputs.T @ (2 * palette(fields).double() - 1) / len(inputs)).float()
    decoder.conv_out.conv.weight[:, :count, 2, 1, 1] = solution[:-1].T
    decoder.conv_out.conv.bias.copy_(solution[-1])


def palette_features(count: int) -> tuple[Tensor, Tensor]:
    main = count - 5
    d0 = torch.tensor([0.8, 0.5, 0.0]); d0=d0/d0.norm()
    d1 = torch.tensor([-0.3, 0.3, 0.9]); d1=d1/d1.norm()
    directions = torch.cat([3 * d0.expand(main, 3), 3*d1.expand(5, 3)])
    knots = torch.cat([torch.linspace(-2.6, 2.4, main), torch.linspace(-1.8,1.6,5)])
    signs = torch.ones(count); signs[::2] = -1
    return directions*signs[:,None], -3 * knots*signs


STOPS = (0x070B2B, 0x1B1F6B, 0x5B2A9B, 0xC23A86, 0xFF7A5C, 0xFFD08A, 0x6FD3C4, 0x14708F, 0x0A2350)

def palette(fields: Tensor) -> Tensor:
    d0 = torch.tensor([0.8, 0.5, 0.0]); d0=d0/d0.norm()
    d1 = torch.tensor([-0.3, 0.3, 0.9]); d1=d1/d1.norm()
    stops = torch.tensor([[s >> 16, s >> 8 & 255, s & 255] for s in STOPS]) / 255
    x = ((fields @ d0 + 2.6) / 5.2).clamp(0, 1) * (len(stops) - 1)
    i = x.floor().clamp(max=len(stops) - 2).long()
    f = (x - i)[:, None]; f = f*f*(3-2*f)
    rgb = stops[i] * (1 - f) + stops[i + 1] * f
    light = 0.12*torch.cos(3.0 * (fields @ d1))[:, None]
    return (rgb + light).clamp(0, 1)
