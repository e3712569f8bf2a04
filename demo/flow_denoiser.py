"""Denoiser weights set by formula, not trained: a small CogVideoX whose videos are slowly flowing colours.

Random weights decode to grey noise, which would say nothing to somebody who runs the demo. Here each layer is given a
job that can be written down:

- block 0: queries and keys read the sinusoidal positions, so that attention is a blur of the noisy latents in space
  and time; the blur, scaled to unit variance, is the prediction of the clean latents.
- block 1: attention takes the video's mean away and adds the prompt's (another prompt, other colours); the
  feed-forward writes the stream once more, so large that a few channels of it leave fp16's range.
- norm_out and proj_out: v = (alpha * noisy - clean) / sigma, fitted to the scheduler's alpha and sigma.

So the video follows from the seed's noise, at any size and in any number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from torch import Tensor, nn

HEADS, HEAD_DIM = 4, 32  # one head for each of the 2 x 2 latents in a patch
WIDTH = HEADS * HEAD_DIM
TIME_FREQUENCIES, SPACE_FREQUENCIES = WIDTH // 8, 3 * WIDTH // 16  # of the sinusoidal positions; space: per axis
PATCH_STEP = 1 / 1.875  # from one patch to the next, in the units of the spatial positions
FIELDS = 3  # latent channels that carry the picture; the others stay noise, and the decoder does not read them
ANCHOR = 48.0  # two channels hold +-this: they keep every LayerNorm's standard deviation the same for all tokens
NOISY, CLEAN = 0.5, 0.5  # standard deviations at which the stream holds the noisy and the clean latents
HIDDEN_GAIN = 4.0  # of the copying feed-forward's hidden activations
SPACE_KERNEL = {1: 4.0, 3: 8.0, 6: 10.0}  # index of a position's frequency -> attention logit that it adds
TIME_KERNEL = {1: 2.0, 3: 4.0}
PROMPT_GAIN = 0.025
VIDEO_LOGIT = 12.0  # by how much a video token outweighs a text token where only the video is to count


@dataclass(frozen=True)
class Channels:
    """Which channels of the residual stream hold what. All are ones whose position code hardly varies."""

    anchors: tuple[int, int]
    noisy: list[list[int]]  # [field][sub-pixel of the patch]
    noisy_zero: int  # holds no content: what is read is read against it, so that LayerNorm's mean cancels
    clean: list[list[int]]
    clean_zero: int
    prompt: list[tuple[int, int]]  # [field], written by text tokens alone; with both signs, so that their mean is 0

    @classmethod
    def choose(cls) -> Channels:
        slow_time = range(TIME_FREQUENCIES // 2, TIME_FREQUENCIES)
        slow_space = range(2 * SPACE_FREQUENCIES // 3, SPACE_FREQUENCIES)
        spatial = (2 * TIME_FREQUENCIES, 2 * TIME_FREQUENCIES + 2 * SPACE_FREQUENCIES)
        sines = [*slow_time, *(start + i for start in spatial for i in slow_space)]
        cosines = [TIME_FREQUENCIES + i for i in slow_time]
        cosines += [start + SPACE_FREQUENCIES + i for start in spatial for i in slow_space]

        def take(pool: list[int]) -> list[list[int]]:
            return [[pool.pop() for _ in range(HEADS)] for _ in range(FIELDS)]

        return cls(
            anchors=(sines.pop(0), sines.pop(0)),
            noisy=take(cosines),
            noisy_zero=cosines.pop(),
            clean=take(sines),
            clean_zero=sines.pop(),
            prompt=[(sines.pop(), sines.pop()) for _ in range(FIELDS)],
        )


def set_denoiser(
    transformer: CogVideoXTransformer3DModel,
    schedule: CogVideoXDDIMScheduler,
    *,
    peak: float,
    hidden_gain: float = HIDDEN_GAIN,
) -> None:
    """Give a 2b-style denoiser of HEADS x HEAD_DIM and two blocks its weights (in place).

    peak: what |residual stream| reaches after the last block, for each token of video and text.
    hidden_gain: of the copying feed-forward's hidden activations; what it writes is the same.
    """
    channels = Channels.choose()
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.zero_()
        for module in transformer.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
        blocks: Any = transformer.transformer_blocks
        blurring, copying = blocks
        for norm, gates in ((blurring.norm1, (2,)), (copying.norm1, (2,)), (copying.norm2, (2, 5))):
            for gate in gates:  # 2: of video, 5: of text
                norm.linear.bias[gate * WIDTH : (gate + 1) * WIDTH] = 1.0
        alpha, sigma = noise_levels(schedule)
        features = _time_features(transformer)
        noise_gain, smooth_gain = _kernel_gains()
        blurred = alpha * smooth_gain + sigma * noise_gain  # standard deviation of the blurred noisy latents
        spread = _embed(transformer, channels)
        _blur(blurring, channels, spread=spread, gain=CLEAN / noise_gain)
        _fit(blurring.norm1.linear, features, noise_gain / blurred, rows=range(2 * WIDTH, 3 * WIDTH))
        _balance(copying, channels, spread=spread)
        _copy(copying, size=peak / (ANCHOR / spread), gain=hidden_gain)
        floor = sigma.clamp(min=sigma[39].item())  # the last of 25 steps; larger gains would be less exact in fp16
        _read(transformer, features, alpha / floor, channels.noisy, channels.noisy_zero, size=spread / NOISY)
        _read(transformer, features, -1 / floor, channels.clean, channels.clean_zero, size=spread / CLEAN)


def noise_levels(schedule: CogVideoXDDIMScheduler) -> tuple[Tensor, Tensor]:
    """alpha and sigma at each training timestep, float64 [1000]: noisy = alpha * clean + sigma * noise."""
    product = schedule.alphas_cumprod.double()
    return product.sqrt(), (1 - product).sqrt()


def _kernel_gains(size: int = 24, frames: int = 9) -> tuple[float, float]:
    """Standard deviation after the blur of white noise, and of noise that was blurred once (relative to before)."""
    gains = [1 / HEADS, 1 / HEADS]  # variances; a token's value is the mean of its 2 x 2 latents
    for count, step, kernel, length, axes in (
        (SPACE_FREQUENCIES, PATCH_STEP, SPACE_KERNEL, size, 2),
        (TIME_FREQUENCIES, 1.0, TIME_KERNEL, frames, 1),
    ):
        positions = torch.arange(length).double() * step
        logits = torch.zeros(length, length, dtype=torch.float64)
        for index, logit in kernel.items():
            logits += logit * torch.cos(10000 ** (-index / count) * (positions[:, None] - positions[None, :]))
        weights = logits.softmax(-1)
        for i, matrix in enumerate((weights, weights @ weights)):
            gains[i] *= matrix.square().sum(-1).mean().item() ** axes
    once, twice = (math.sqrt(gain) for gain in gains)
    return once, twice / once


def _time_features(transformer: CogVideoXTransformer3DModel) -> Tensor:
    """Give the time embedding random weights on its slow frequencies; returns silu(temb), float64 [1000, n]."""
    generator = torch.Generator().manual_seed(2)
    first, second = transformer.time_embedding.linear_1, transformer.time_embedding.linear_2
    slow = torch.arange(WIDTH // 2) > 20  # frequencies below 0.05 per timestep
    for linear, scale in ((first, 0.3 * torch.cat([slow, slow])), (second, torch.tensor(0.4))):
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator) * scale)
        linear.bias.copy_(torch.randn(linear.bias.shape, generator=generator))
    return nn.functional.silu(transformer.time_embedding(transformer.time_proj(torch.arange(1000)))).double()


def _fit(linear: nn.Linear, features: Tensor, target: Tensor, rows: Iterable[int]) -> None:
    """Make each of `rows` of linear(features) follow `target`, one number per timestep, by ridge regression."""
    inputs = torch.cat([features, torch.ones_like(features[:, :1])], dim=1)
    gram = inputs.T @ inputs + 1e-4 * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    solution = torch.linalg.solve(gram, inputs.T @ target.double()).float()
    for row in rows:
        linear.weight[row] = solution[:-1]
        linear.bias[row] = solution[-1]


def _embed(transformer: CogVideoXTransformer3DModel, channels: Channels) -> float:
    """Noisy latents, prompt and anchors into the stream. Returns a token's standard deviation over its channels."""
    embed: Any = transformer.patch_embed
    for field, row in enumerate(channels.noisy):
        for pixel, channel in enumerate(row):
            embed.proj.weight[channel, field, pixel // 2, pixel % 2] = NOISY
    for projection in (embed.proj, embed.text_proj):
        projection.bias[channels.anchors[0]] = ANCHOR
        projection.bias[channels.anchors[1]] = -ANCHOR
    width = embed.text_proj.in_features
    words = torch.randn(FIELDS, width, generator=torch.Generator().manual_seed(1)) / math.sqrt(width)
    for pair, row in zip(channels.prompt, words, strict=True):
        for channel, sign in zip(pair, (1.0, -1.0), strict=True):
            embed.text_proj.weight[channel] = sign * row
    positions = embed.pos_embedding[0, -1].var(unbiased=False).item()
    return math.sqrt(positions + 2 * ANCHOR**2 / WIDTH)


def _blur(block: Any, channels: Channels, *, spread: float, gain: float) -> None:
    """Attention by distance: head j blurs around sub-pixel j of the patch and writes `gain` times the result.

    Queries and keys are the sine and cosine of a few positions, each with both signs, so that the LayerNorm on them
    sees mean 0 and the same norm at each position; the logit is then a sum of cosines of the distance.
    """
    attention = block.attn1
    codes = [(index, TIME_FREQUENCIES, None, logit) for index, logit in TIME_KERNEL.items()]
    codes += [(index, SPACE_FREQUENCIES, axis, logit) for axis in (0, 1) for index, logit in SPACE_KERNEL.items()]
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(math.sqrt(sum(logit for *_, logit in codes) / math.sqrt(HEAD_DIM)))
    for head in range(HEADS):
        offsets = {None: 0.0, 0: (head % 2 - 0.5) / 2 * PATCH_STEP, 1: (head // 2 - 0.5) / 2 * PATCH_STEP}  # x, y
        for k, (index, count, axis, logit) in enumerate(codes):
            sine = index if axis is None else 2 * TIME_FREQUENCIES + 2 * SPACE_FREQUENCIES * axis + index
            row = head * HEAD_DIM + 2 * k
            angle = offsets[axis] * 10000 ** (-index / count)
            _rotate(attention.to_q.weight, row, (sine, sine + count), angle, math.sqrt(logit), channels.clean_zero)
            _rotate(attention.to_k.weight, row, (sine, sine + count), 0.0, math.sqrt(logit), channels.clean_zero)
        for field, pixels in enumerate(channels.noisy):
            value = head * HEAD_DIM + field
            attention.to_v.weight[value, pixels] = spread / NOISY / len(pixels)
            attention.to_v.weight[value, channels.noisy_zero] = -spread / NOISY
            attention.to_out[0].weight[channels.clean[field][head], value] = gain


def _rotate(weight: Tensor, row: int, code: tuple[int, int], angle: float, size: float, zero: int) -> None:
    """Rows that read sine and cosine of (position + angle) from channels `code`; half a head on, the same negated."""
    sine, cosine = code
    for target, (of_sine, of_cosine) in (
        (row, (math.cos(angle), math.sin(angle))),
        (row + 1, (-math.sin(angle), math.cos(angle))),
    ):
        for place, scale in ((target, 100 * size), (target + HEAD_DIM // 2, -100 * size)):
            weight[place, sine] = scale * of_sine
            weight[place, cosine] = scale * of_cosine
            weight[place, zero] = -scale * (of_sine + of_cosine)


def _balance(block: Any, channels: Channels, *, spread: float) -> None:
    """Takes the mean over the video from the clean latents, and adds the mean over the prompt.

    Queries and keys read a channel that is 1 in video tokens and 0 in text tokens. Head 0 looks for it, so it attends
    to the video alone, equally; head 1 for the opposite, so to the text alone.
    """
    attention = block.attn1
    for norm in (attention.norm_q, attention.norm_k):
        norm.weight.fill_(math.sqrt(VIDEO_LOGIT / math.sqrt(HEAD_DIM)))
    for head, query in enumerate((1.0, -1.0)):
        for row, sign in ((head * HEAD_DIM, 100.0), (head * HEAD_DIM + 1, -100.0)):
            for weight, scale in ((attention.to_q.weight, sign * query), (attention.to_k.weight, sign)):
                weight[row, channels.noisy_zero] = scale
                weight[row, channels.clean_zero] = -scale
    for field, (pixels, (word, _)) in enumerate(zip(channels.clean, channels.prompt, strict=True)):
        for value, read, gain in ((field, pixels, -1.0), (HEAD_DIM + field, [word], PROMPT_GAIN)):
            attention.to_v.weight[value, read] = spread / len(read)
            attention.to_v.weight[value, channels.clean_zero] = -spread
            attention.to_out[0].weight[pixels, value] = gain


def _copy(block: Any, *, size: float, gain: float) -> None:
    """A feed-forward that writes `size` times the normalised stream.

    gelu(x) - gelu(-x) = x, so hidden units in pairs pass anything through unchanged.
    """
    inward, outward = block.ff.net[0].proj, block.ff.net[2]
    for pair, sign in enumerate((1.0, -1.0)):
        units = slice(pair * WIDTH, (pair + 1) * WIDTH)
        inward.weight[units] = sign * gain * torch.eye(WIDTH)
        outward.weight[:, units] = sign * size / gain * torch.eye(WIDTH)


def _read(
    transformer: CogVideoXTransformer3DModel,
    features: Tensor,
    gain: Tensor,
    contents: list[list[int]],
    zero: int,
    *,
    size: float,
) -> None:
    """Add gain(timestep) * size * contents to the output, through norm_out's scale and proj_out."""
    largest = gain.abs().max().item()
    used = [channel for pixels in contents for channel in pixels]
    scales = [WIDTH + channel for channel in (*used, zero)]
    _fit(transformer.norm_out.linear, features, gain / largest - 1, scales)
    for row, channel in enumerate(used):  # proj_out's rows: latent channel, then sub-pixel
        transformer.proj_out.weight[row, channel] = largest * size
        transformer.proj_out.weight[row, zero] = -largest * size
