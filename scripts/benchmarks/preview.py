"""Measure the cost of a preview after each step: made from latents of a published size, enlarged and written as JPEG,
compared with a step of the denoiser.

    python scripts/benchmarks/preview.py [--rounds 40] [--blocks 3] [--out scripts/benchmarks/results]

The latents are those of CogVideoX-2B at 720×480×49. The denoiser has its width and a few of its 30 blocks, so a whole
step takes correspondingly longer. On a card, a preview also waits for a copy of a frame's latents to main memory, which
is not measured here. scripts/benchmarks/measure.py explains the timing and noise.
"""

from __future__ import annotations

import io

import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.previews import of_cogvideox
from measure import arguments, build, device_and_dtype, interleave, medians, ratio, setting, write
from PIL import ImageOps

FRAMES, LATENTS = 49, (1, 13, 16, 60, 90)  # batch, frames, channels, rows, columns: as in the sampler
VAE = {"scaling_factor": 1.15258426, "temporal_compression_ratio": 4, "latent_channels": 16}
PIXELS = 512  # the picture's longer side, ComfyUI's default
BLOCKS = 30


def main() -> None:
    args = arguments(__doc__, rounds=40, rounds_help="rounds of each").parse_args()
    device, dtype = device_and_dtype()
    denoiser, call = build(args.blocks, args.heads, device, dtype)
    finished = torch.randn(LATENTS, device=device)

    def picture() -> None:
        latents = COGVIDEOX.layout.unscaled(finished, FRAMES, VAE)
        made = of_cogvideox(latents[0, :, latents.shape[2] // 2])
        ImageOps.contain(made, (PIXELS, PIXELS)).save(io.BytesIO(), "JPEG", quality=95, compress_level=1)

    with torch.no_grad():
        times = interleave(
            {
                "step": lambda: denoiser(**call),
                "picture": picture,
                "step and picture": lambda: (denoiser(**call), picture()),
                "step again": lambda: denoiser(**call),
            },
            args.rounds,
            device,
        )
    seconds = medians(times)
    result = setting("preview", denoiser, call, dtype, device, args.rounds) | {
        "median_seconds": seconds,
        "ratios": {
            "picture / step": ratio(times, "picture", "step"),
            "step and picture / step": ratio(times, "step and picture", "step"),
            "noise: step again / step": ratio(times, "step again", "step"),
            f"picture / step of {BLOCKS} blocks, estimated": round(
                seconds["picture"] / (seconds["step"] * BLOCKS / args.blocks), 5
            ),
        },
    }
    write(result, args.out, device)


if __name__ == "__main__":
    main()
