"""What the fold does to the numbers: the figure of docs/folding.md, and the numbers in it on standard output.

    python benchmarks/fold_figure.py [--out docs/folding.png]

A small CogVideoX with random weights, made so that its residual stream climbs to 5e5 over its blocks. An error is
the norm of what the output differs by from fp32's, in parts of fp32's norm.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.precision.folding import bits_for, fold
from comfyui_onediff_guard.precision.observe import stream_peak
from comfyui_onediff_guard.precision.streams import Stream
from diffusers import CogVideoXTransformer3DModel
from PIL import Image
from plot import BLUE, GREY, INK, PURPLE, VERMILLION, Figure, Plot

BLOCKS = 10
FIRST, LAST = 30.0, 5e5  # max |stream| behind the first and the last block
MOST_BITS = 16
FP16 = torch.finfo(torch.float16)


@dataclass(frozen=True)
class Measured:
    k: int  # as the fold measures it
    peaks: list[float]  # max |x| of the stream behind each block, in fp32
    lows: list[float]  # 1 % of the stream's values are smaller
    folded_peaks: list[float]  # in folded fp16
    folded_lows: list[float]
    bf16: float  # error
    by_inputs: list[float]  # error of folded fp16 for each k from 0
    by_weights: list[float]  # the same where weights are scaled instead, and lose their last bits to subnormals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "folding.png")
    args = parser.parse_args()
    assert COGVIDEOX.stream
    with torch.no_grad():
        measured = measure(COGVIDEOX.stream)
        describe(measured)
        for name, shares in subnormal_shares(COGVIDEOX.stream).items():
            print(f"{name}: subnormal if the weight were scaled: " + ", ".join(f"{v:.0%} at k={k}" for k, v in shares))
    draw(measured).save(args.out, optimize=True)
    print(f"written to {args.out}")


def measure(stream: Stream) -> Measured:
    denoiser, call = build()
    expected = denoiser(**call)[0]
    k = bits_for(stream_peak(denoiser, stream, lambda: denoiser(**call)))
    half, half_call = copy.deepcopy(denoiser).half(), in_dtype(call, torch.float16)

    def error(module: torch.nn.Module, call: dict[str, Any]) -> float:
        return ((module(**call)[0].float() - expected).norm() / expected.norm()).item()

    peaks, lows = behind_blocks(denoiser, call)
    folded_peaks, folded_lows = behind_blocks(fold(half, stream, k), half_call)
    return Measured(
        k,
        peaks,
        lows,
        folded_peaks,
        folded_lows,
        bf16=error(copy.deepcopy(denoiser).bfloat16(), in_dtype(call, torch.bfloat16)),
        by_inputs=[error(fold(half, stream, k), half_call) for k in range(MOST_BITS + 1)],
        by_weights=[error(fold(rounded(half, stream, k), stream, k), half_call) for k in range(MOST_BITS + 1)],
    )


def build() -> tuple[Any, dict[str, Any]]:
    """A denoiser in fp32 whose blocks write ever more to the stream, and one call's arguments."""
    torch.manual_seed(0)
    denoiser: Any = CogVideoXTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=32,
        num_layers=BLOCKS,
        time_embed_dim=64,
        text_embed_dim=64,
        max_text_seq_length=16,
        sample_width=24,
        sample_height=16,
        sample_frames=9,
    )
    denoiser.eval().requires_grad_(False)
    call = {
        "hidden_states": torch.randn(2, 3, 16, 16, 24),
        "encoder_hidden_states": torch.randn(2, 16, 64),
        "timestep": torch.tensor([700, 700]),
        "return_dict": False,
    }
    for index, block in enumerate(denoiser.transformer_blocks):
        block.norm2.linear.bias.view(6, -1)[[2, 5]] += 16  # the gates: their product overflows, and no factor of it
        growth = (LAST / FIRST) ** (index / (BLOCKS - 1))
        block.ff.net[2].weight.mul_(growth)
        for _ in range(3):
            peaks, _ = behind_blocks(denoiser, call)
            block.ff.net[2].weight.mul_(FIRST * growth / peaks[index])
    return denoiser, call


def in_dtype(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}


def behind_blocks(denoiser: Any, call: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The largest |x| of the stream behind each block, and the |x| that 1 % of its values stay below."""
    peaks, lows = [], []

    def watch(_block: Any, _given: Any, made: tuple[torch.Tensor, ...]) -> None:
        values = torch.cat([part.float().abs().flatten() for part in made])
        peaks.append(values.max().item())
        lows.append(values.kthvalue(values.numel() // 100).values.item())

    handles = [block.register_forward_hook(watch) for block in denoiser.transformer_blocks]
    denoiser(**call)
    for handle in handles:
        handle.remove()
    return peaks, lows


def rounded(half: torch.nn.Module, stream: Stream, k: int) -> torch.nn.Module:
    """A copy whose writers have lost what their weights would lose if they were scaled by 2^-k in fp16."""
    module = copy.deepcopy(half)
    for name in stream.writer_names(module):
        for parameter in module.get_submodule(name).parameters():
            parameter.copy_(parameter * 2.0**-k * 2.0**k)
    return module


def subnormal_shares(stream: Stream) -> dict[str, list[tuple[int, float]]]:
    """Of the weights of one block of CogVideoX-2B's width, as diffusers initialises them, for some k."""
    torch.manual_seed(0)
    denoiser = CogVideoXTransformer3DModel(num_layers=1)
    weights: dict[str, Any] = {name: denoiser.get_submodule(name).weight for name in stream.writer_names(denoiser)}
    return {
        name: [(k, (weight.abs() * 2.0**-k < FP16.smallest_normal).float().mean().item()) for k in (0, 6, 12)]
        for name, weight in weights.items()
    }


def describe(measured: Measured) -> None:
    print(f"{BLOCKS} blocks; behind block: max and 1st percentile of |stream| in fp32; the same in folded fp16")
    rows = zip(measured.peaks, measured.lows, measured.folded_peaks, measured.folded_lows, strict=True)
    for block, row in enumerate(rows, 1):
        print(f"{block:8d}" + "".join(f"{value:12.3g}" for value in row))
    print(f"k as measured: {measured.k}. Error of bf16: {measured.bf16:.4f}. Error of fp16 folded by 2^-k:")
    for k, (inputs, weights) in enumerate(zip(measured.by_inputs, measured.by_weights, strict=True)):
        print(f"{k:8d}{inputs:12.4f}{weights:12.4f}  (if weights were scaled)")


def draw(measured: Measured) -> Image.Image:
    figure = Figure(1600, 800)
    figure.text(40, 44, "A small CogVideoX whose residual stream climbs to 5e5, in fp32 and in fp16", INK, 34)
    _draw_stream(figure, measured)
    _draw_errors(figure, measured)
    return figure.image()


def _draw_stream(figure: Figure, measured: Measured) -> None:
    blocks, span, least, most = range(1, BLOCKS + 1), (0.5, BLOCKS + 0.5), 1e-6, 1e7
    title = "largest |x| of the stream"
    plot = Plot(figure, (110, 150, 790, 690), span, (least, most), title=title, x_label="behind block")
    plot.area(span, (FP16.max, most), VERMILLION, 0.1)
    plot.area(span, (least, FP16.smallest_normal), GREY, 0.12)
    plot.axes(blocks, range(-6, 8, 2))
    plot.limit(FP16.max)
    plot.limit(FP16.smallest_normal)
    plot.band(blocks, measured.folded_lows, measured.folded_peaks, BLUE)
    plot.curve(blocks, measured.peaks, VERMILLION, "circle")
    plot.curve(blocks, measured.folded_peaks, BLUE, "square")
    plot.note(0.7, FP16.max, "beyond fp16's 65504: infinite, then NaN", INK, up=24)
    plot.note(0.7, FP16.smallest_normal, "below 6.1e-5 fp16 has fewer bits", INK, up=-24)
    plot.note(4.7, measured.peaks[4], "as it is, in fp32", VERMILLION, "rm", up=24)
    plot.note(4.5, 1e-2, f"folded by 2^-{measured.k}, in fp16:", BLUE, up=20)
    plot.note(4.5, 1e-2, "99 % of all values are in the band", BLUE, up=-14)


def _draw_errors(figure: Figure, measured: Measured) -> None:
    bits, span, least, most = range(MOST_BITS + 1), (-0.5, MOST_BITS + 0.5), 1e-3, 1.0
    title = "relative error of the output against fp32"
    label = "k: the stream is scaled by 2^-k, 0 is plain fp16"
    plot = Plot(figure, (930, 150, 1570, 690), span, (least, most), title=title, x_label=label)
    first = next(k for k in bits if math.isfinite(measured.by_inputs[k]))
    plot.area((span[0], first - 0.5), (least, most), VERMILLION, 0.1)
    plot.axes(range(0, MOST_BITS + 1, 2), range(-3, 1))
    plot.limit(measured.bf16)
    plot.curve(bits, measured.by_weights, PURPLE, "diamond")
    plot.curve(bits, measured.by_inputs, BLUE, "square")
    plot.mark(measured.k, measured.by_inputs[measured.k], INK, "ring")
    plot.note((span[0] + first - 0.5) / 2, 0.2, "NaN", VERMILLION, "mm")
    plot.note(first, measured.bf16, f"bf16: {measured.bf16:.4f}", INK, up=24)
    plot.note(first, measured.by_inputs[measured.k], f"folded, k as measured: {_short(measured)}", BLUE, up=-40)
    plot.note(12.6, measured.by_weights[13], "weights scaled instead", PURPLE, "rm", up=6)


def _short(measured: Measured) -> str:
    return f"{measured.by_inputs[measured.k]:.4f}"


if __name__ == "__main__":
    main()
