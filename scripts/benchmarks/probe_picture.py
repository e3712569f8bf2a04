"""Draw docs/probe.png: the Numerics Probe on a toy model whose residual stream and one feed-forward overflow fp16.

    python scripts/benchmarks/probe_picture.py [--out docs/probe.png]

The model has CogVideoX's real classes with random weights: 30 small blocks. One block writes 5e5 to the residual
stream, and one reaches 1e5 inside its feed-forward.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from comfyui_onediff_guard.pipelines.insight.probe import probe
from comfyui_onediff_guard.pipelines.insight.probe_figure import draw
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings
from comfyui_onediff_guard.precision import arch
from measure import opened
from PIL import Image

SETTINGS = SampleSettings(width=64, height=48, frames=9, steps=8, seed=3, guidance_scale=6.0, scheduler="DDIM")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[2] / "docs" / "probe.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pipeline = toy(Path(folder) / "toy-cogvideox")
        (positive, negative), _ = encode_prompts(pipeline, ["a red kite", ""])
        result = probe(pipeline, positive, negative, SETTINGS)
    print(result.text())
    Image.fromarray(draw(result)).save(args.out, optimize=True)
    print(f"written to {args.out}")


def toy(folder: Path) -> PipelineHandle:
    """Return the toy model's pipeline, as on a Turing card."""
    build_cogvideox(folder, variant="1.5", overflow="stream", layers=30)
    pipeline = replace(opened(folder, "auto"), architecture=arch.named("sm75"))
    denoiser: Any = pipeline.store.module("transformer", "fp16")
    with torch.no_grad():
        feed_forward = denoiser.transformer_blocks[17].ff
        feed_forward.net[0].proj.weight.mul_(2.0**16)
        feed_forward.net[2].weight.mul_(2.0**-16)
    return pipeline


if __name__ == "__main__":
    main()
