"""Draw the figure of docs/overflow_protection.md, the errors with scaled layers, and print its tables.

    python scripts/benchmarks/scaled_figure.py [--out docs/overflow_protection.png]

The denoisers are small, with random weights from diffusers' initialisation, or changed so that the residual stream
climbs from block to block. An error is the norm of the output's difference from fp32, divided by fp32's norm.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS, COGVIEW4
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from comfyui_onediff_guard.precision.dtypes import FP16_MAX
from comfyui_onediff_guard.precision.layer_peaks import floating, hooked, largest, leaves
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from diffusers import CogVideoXTransformer3DModel, CogView3PlusTransformer2DModel, CogView4Transformer2DModel
from matplotlib.figure import Figure
from measure import relative_error

BLOCKS, HEADS, CHANNELS, TEXT = 10, 4, 32, 32  # channels of one head, and of a prompt's embedding
HOT = 5e5  # max |stream| after the last block
TARGETS = [10.0**exponent for exponent in range(14)]
WRITER = "ff.net.2"  # the layer that makes the stream climb
INK, GREY, RULE = "#1f2328", "#656d76", "#dee2e6"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#964b82"  # told apart by the colour-blind too
STYLE: dict[Any, Any] = {"font.size": 17, "axes.titlesize": 18, "text.color": INK, "lines.linewidth": 3}
STYLE |= {"lines.markersize": 10, "lines.markeredgecolor": "white", "savefig.dpi": 100}
Call = dict[str, Any]


@dataclass(frozen=True)
class Model:
    cls: Any  # diffusers class
    family: FamilySpec
    gates: tuple[str, int, int]  # the layer of WRITER's gates in each block, and their place: for picture and for text
    config: Call


@dataclass(frozen=True)
class Errors:
    peak: float  # max |stream| in fp32
    plain: float  # fp16
    protected: float  # fp16
    bf16: float


_VIDEO = {"sample_width": 12, "sample_height": 8, "sample_frames": 9, "max_text_seq_length": 16}
_PICTURE = {"condition_dim": 8, "pos_embed_max_size": 8}
COGVIDEOX_5B = Model(
    CogVideoXTransformer3DModel, COGVIDEOX, ("norm2.linear", 2, 5), _VIDEO | {"use_rotary_positional_embeddings": True}
)
MODELS = {
    "CogVideoX-5B": COGVIDEOX_5B,
    "CogView3-Plus": Model(CogView3PlusTransformer2DModel, COGVIEW3PLUS, ("norm1.linear", 5, 11), _PICTURE),
    "CogView4": Model(CogView4Transformer2DModel, COGVIEW4, ("norm1.linear", 10, 11), _PICTURE),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "overflow_protection.png")
    args = parser.parse_args()
    with torch.no_grad():
        denoiser, call = build(COGVIDEOX_5B, HOT)
        stream, half = behind_blocks(denoiser, call), inside_blocks(denoiser, call)
        print(f"CogVideoX-5B's kind, {BLOCKS} blocks; by block: max |stream| in fp32, and of what is half beside it")
        for block, row in enumerate(zip(stream, half, strict=True), 1):
            print(f"{block:8d}" + "".join(f"{value:12.3g}" for value in row))
        print(f"{'error against fp32':26}{'max |stream|':>12}{'plain fp16':>12}{'protected':>12}{'bf16':>12}")
        for name, model in MODELS.items():
            tell(f"{name}, as made", errors(model))
            tell(f"{name}, climbing", errors(model, HOT))
        climbing = [errors(COGVIDEOX_5B, target) for target in TARGETS]
        for made in climbing:
            tell("CogVideoX-5B, climbing", made)
    with mpl.rc_context(STYLE):
        draw(stream, half, climbing).savefig(args.out)
    print(f"written to {args.out}")


def tell(name: str, made: Errors) -> None:
    found = (f"{error:.5f}" if math.isfinite(error) else "NaN" for error in (made.plain, made.protected, made.bf16))
    print(f"{name:26}{made.peak:12.3g}" + "".join(f"{error:>12}" for error in found), flush=True)


def errors(model: Model, target: float | None = None) -> Errors:
    denoiser, call = build(model, target)
    expected = denoiser(**call)[0]

    def of(dtype: torch.dtype) -> float:
        return relative_error(copy.deepcopy(denoiser).to(dtype)(**in_dtype(call, dtype))[0], expected)

    peak = max(behind_blocks(denoiser, call))
    half = copy.deepcopy(denoiser).half()
    assert all(parameter.isfinite().all() for parameter in half.parameters()), "the stream leaves fp16, no weight does"
    scaled = relative_error(protected(half, call)(), expected)
    return Errors(peak, plain=of(torch.float16), protected=scaled, bf16=of(torch.bfloat16))


def protected(half: torch.nn.Module, call: Call) -> Callable[[], torch.Tensor]:
    """Return a step after the first one, which determines the scales."""
    products = LearnedProducts()
    products.run(half, **call)
    return lambda: products.run(half, **call)[0]


def build(model: Model, target: float | None = None) -> tuple[Any, Call]:
    """Build a denoiser in fp32, and one call's arguments. With a target, the stream climbs from 1 to it, by the same
    amount in each block: gates, weights and their inputs grow, so that none of them overflows fp16."""
    torch.manual_seed(0)
    config = {"num_attention_heads": HEADS, "attention_head_dim": CHANNELS, "num_layers": BLOCKS}
    config |= {"time_embed_dim": 32, "text_embed_dim": TEXT}
    denoiser: Any = model.cls(**config, **model.config).eval().requires_grad_(False)
    call = _call(model)
    if target:
        _climb(model, denoiser, call, target)
    return denoiser, call


def _climb(model: Model, denoiser: Any, call: Call, target: float) -> None:
    started = behind(denoiser, call, {"": denoiser.patch_embed})[0]
    for name in ("patch_embed.proj", "patch_embed.text_proj"):
        for parameter in denoiser.get_submodule(name).parameters():
            parameter.mul_(1 / started)
    layer, *gates = model.gates
    for index, block in enumerate(denoiser.transformer_blocks):
        peak = target ** ((index + 1) / BLOCKS)
        share = max(1.0, peak) ** 0.25
        block.get_submodule(layer).bias.view(-1, HEADS * CHANNELS)[gates] += 16 * share
        block.ff.net[0].proj.weight.mul_(share)
        for _ in range(6):
            found = behind_blocks(denoiser, call)[index]
            for parameter in block.get_submodule(WRITER).parameters():
                parameter.mul_(peak / found)


def _call(model: Model) -> Call:
    call = {
        "encoder_hidden_states": torch.randn(2, 16, TEXT),
        "timestep": torch.tensor([700, 700]),
        "return_dict": False,
    }
    if model.family is COGVIDEOX:
        return call | {"hidden_states": torch.randn(2, 3, 16, 8, 12)}
    pixels = {name: torch.tensor([[64.0, 96.0]] * 2) for name in ("original_size", "target_size")}
    return call | pixels | {"hidden_states": torch.randn(2, 16, 8, 12), "crop_coords": torch.zeros(2, 2)}


def in_dtype(call: Call, dtype: torch.dtype) -> Call:
    return call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}


def behind_blocks(denoiser: Any, call: Call) -> list[float]:
    """Return max |x| of the stream after each block."""
    return behind(denoiser, call, dict(denoiser.transformer_blocks.named_children()))


def behind(denoiser: Any, call: Call, parts: dict[str, torch.nn.Module]) -> list[float]:
    """Return max |x| of the outputs of its parts."""
    peaks: list[float] = []
    with hooked(parts, lambda _name, _part, _given, made: peaks.append(largest(made).item())):
        denoiser(**call)
    return peaks


def inside_blocks(denoiser: Any, call: Call) -> list[float]:
    """Return max |x| of the half-precision outputs of each block's layers, with overflow protection."""
    peaks = [0.0] * BLOCKS

    def see(name: str, _layer: torch.nn.Module, _given: Any, made: Any) -> None:
        block = int(name.split(".")[1])
        half = [tensor for tensor in floating(made) if tensor.dtype == torch.float16]
        peaks[block] = max(peaks[block], largest(half).item()) if half else peaks[block]

    network = copy.deepcopy(denoiser).half()
    step = protected(network, call)
    layers = {name: layer for name, layer in leaves(network).items() if name.startswith("transformer_blocks.")}
    with hooked(layers, see):
        step()
    return peaks


def draw(stream: Sequence[float], half: Sequence[float], climbing: Sequence[Errors]) -> Figure:
    figure = Figure(figsize=(16, 8))
    figure.text(0.025, 0.945, "A small CogVideoX whose residual stream climbs over its blocks", size=23, va="center")
    figure.subplots_adjust(left=0.07, right=0.98, top=0.81, bottom=0.14, wspace=0.2)
    left, right = figure.subplots(1, 2)
    _draw_stream(left, stream, half)
    _draw_errors(right, climbing)
    return figure


def _draw_stream(axes: Any, stream: Sequence[float], half: Sequence[float]) -> None:
    blocks = range(1, BLOCKS + 1)
    _frame(axes, "largest |x|, made to climb to 5e5", (0.5, BLOCKS + 0.5), (0.1, 1e7))
    axes.set_xlabel("block")
    axes.set_xticks(blocks)
    axes.axhspan(FP16_MAX, 1e7, color=VERMILLION, alpha=0.1, lw=0)
    axes.axhline(FP16_MAX, color=INK, ls=(0, (5, 5)), lw=2)
    axes.plot(blocks, half, color=BLUE, marker="s")
    axes.plot(blocks, stream, color=VERMILLION, marker="o")
    axes.text(0.7, 1.3e5, "beyond fp16's 65504: infinite, then NaN")
    axes.text(6.7, 1.6 * stream[6], "the stream: float32", color=VERMILLION, ha="right")
    axes.text(10, 0.2 * half[4], "what other layers put out: half", color=BLUE, ha="right")


def _draw_errors(axes: Any, climbing: Sequence[Errors]) -> None:
    peaks = [made.peak for made in climbing]
    _frame(axes, "relative error of the output against fp32", (TARGETS[0] / 4, TARGETS[-1] * 4), (1e-4, 0.1))
    axes.set_xlabel("largest |x| of the stream")
    axes.set_xscale("log")
    axes.set_xticks(TARGETS[::2])
    axes.axvspan(FP16_MAX, TARGETS[-1] * 4, color=VERMILLION, alpha=0.1, lw=0)
    axes.plot(peaks, [made.bf16 for made in climbing], color=PURPLE, marker="D")
    axes.plot(peaks, [made.plain for made in climbing], color=VERMILLION, marker="o")
    axes.plot(peaks, [made.protected for made in climbing], color=BLUE, marker="s")
    axes.text(3e8, 1.3 * climbing[8].bf16, "bf16", color=PURPLE)
    axes.text(3e8, 0.6 * climbing[8].protected, "fp16, protected", color=BLUE)
    axes.text(8e3, 1.6 * climbing[3].plain, "fp16, plain", color=VERMILLION, ha="right")
    axes.text(2e5, 0.065, "fp16, plain: NaN", color=VERMILLION)


def _frame(axes: Any, title: str, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_title(title, loc="left", pad=16)
    axes.set(xlim=x, ylim=y, yscale="log", axisbelow=True)
    axes.set_yticks([10.0**exponent for exponent in range(round(math.log10(y[0])), round(math.log10(y[1])) + 1)])
    axes.minorticks_off()
    axes.tick_params(length=0, pad=8, colors=GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=RULE)


if __name__ == "__main__":
    main()
