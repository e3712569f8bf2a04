"""Train small models for the benchmarks of the step cache: with random weights, steps do not resemble their neighbours.

    python scripts/benchmarks/trained.py [cogvideox] [--steps N] [--folder DIR]

They learn videos of moving shapes (moving_shapes.py) in some minutes on a CPU. The same PyTorch and number of threads
give the same weights. Their folders are outside of the repository, and are made if they are missing.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.demo.small_model import VARIANTS, new_folder, save, scheduler, small_text_encoder, small_vae
from comfyui_onediff_guard.demo.small_tokenizer import train_tokenizer
from moving_shapes import Scenes

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onediff-guard-benchmarks"
FRAMES, SIDE = 13, 64  # of the video: number of frames, pixels
CHANNELS = 16  # of CogVideoX's latents
GAIN = 2.5  # from colours to latents, which then have a variance of about 1
TEXT = 32  # channels of a prompt embedding
DROPPED = 0.15  # share of dropped prompts, for guidance
Loss = Callable[[torch.nn.Module, torch.Generator], torch.Tensor]


def latents_of(pictures: torch.Tensor) -> torch.Tensor:
    """Convert pictures [batch, frames, 3, height, width] to latents of the same frames and size, with a variance of
    about 1: the three colours, blurred colours and edges, mixed into 16 channels."""
    centred = pictures * 4 - 1.6
    flat = centred.flatten(0, 1)
    blurred = torch.nn.functional.avg_pool2d(flat, 3, 1, 1, count_include_pad=False)
    grey = flat.mean(1, keepdim=True)
    edges = torch.cat([grey - grey.roll(1, -1), grey - grey.roll(1, -2)], 1)
    planes = torch.cat([flat, blurred, edges], 1).unflatten(0, pictures.shape[:2])
    return torch.einsum("cp,bfphw->bfchw", mixing(), planes)


def colours_of(latents: torch.Tensor) -> torch.Tensor:
    """Return the pictures of latents, 0..1: the inverse of `latents_of`."""
    planes = torch.einsum("cp,bfchw->bfphw", mixing() / GAIN**2, latents)
    return ((planes[:, :, :3] + 1.6) / 4).clamp(0, 1)


def mixing() -> torch.Tensor:
    """Return a matrix [channels, planes] with orthogonal columns of norm GAIN."""
    drawn = torch.randn(CHANNELS, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (GAIN * torch.linalg.qr(drawn)[0]).float()


def cogvideox(folder: Path, steps: int) -> Path:
    """Write a pipeline whose denoiser, of CogVideoX-2B's class with 3 million parameters, makes moving shapes from
    prompts of `Scenes.prompts`."""
    from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel

    torch.manual_seed(0)
    side, frames = SIDE // 8, (FRAMES - 1) // 4 + 1
    denoiser = CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        time_embed_dim=64,
        text_embed_dim=TEXT,
        max_text_seq_length=3,
        num_layers=10,
        sample_width=side,
        sample_height=side,
        sample_frames=FRAMES,
    )
    without_fast_waves(denoiser.time_embedding.linear_1)
    schedule = scheduler(VARIANTS["2b"])
    kept = schedule.alphas_cumprod.float()

    def loss(denoiser: torch.nn.Module, generator: torch.Generator) -> torch.Tensor:
        scenes = Scenes.drawn(16, generator)
        clean = latents_of(scenes.pictures(frames, side, side))
        prompts = scenes.prompts(TEXT) * (torch.rand(16, 1, 1, generator=generator) > DROPPED)
        time = torch.randint(1000, (16,), generator=generator)
        signal, noise_part = (part.sqrt().view(-1, 1, 1, 1, 1) for part in (kept[time], 1 - kept[time]))
        noise = torch.randn(clean.shape, generator=generator)
        made = denoiser(signal * clean + noise_part * noise, prompts, time, return_dict=False)[0]
        return (made - (signal * noise - noise_part * clean)).square().mean()

    trained = fitted(denoiser, loss, steps, rate=1e-3)
    with new_folder(folder) as temporary:
        pipeline = CogVideoXPipeline(
            tokenizer=train_tokenizer(temporary / "tokenizer"),
            text_encoder=small_text_encoder(),
            transformer=trained,
            vae=small_vae(VARIANTS["2b"], channels=(8, 16, 16, 16), groups=4),
            scheduler=schedule,
        )
        save(pipeline, temporary, torch.float32)
    return folder


def without_fast_waves(layer: torch.nn.Linear) -> None:
    """Exclude waves that turn by more than 0.2 radians between two of 50 steps from a time embedding's first layer.
    Short training does not teach a model to ignore them, and its outputs would vary from step to step, which no cache
    can follow, nor a sampler of higher order.

    layer: its inputs are cosines, then sines, of the timestep times frequencies from 1 down to 1e-4.
    """
    half = layer.in_features // 2
    frequencies = 10_000 ** -(torch.arange(half) / half)
    slow = (frequencies < 1 / 100).repeat(2)
    with torch.no_grad():
        layer.weight.mul_(slow)
    layer.weight.register_hook(lambda gradient: gradient * slow)


def fitted(model: Any, loss: Loss, steps: int, *, rate: float) -> Any:
    """Return the model, with the mean of its weights over the last steps."""
    generator = torch.Generator().manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps, pct_start=0.1)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
    started, seen = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        optimiser.zero_grad()
        found = loss(model, generator)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        if step > steps // 5:
            mean.update_parameters(model)
        seen += found.item()
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {seen / 50:.4f}, {time.perf_counter() - started:.0f} s", flush=True)
            seen = 0.0
    return mean.module.eval().requires_grad_(False)


MODELS: dict[str, tuple[Callable[[Path, int], Path], int]] = {"cogvideox": (cogvideox, 800)}  # and steps of training


def trained(name: str, steps: int = 0, root: Path = CACHE) -> Path:
    """Return the folder of a trained model; trains it if it is missing. steps: of its training; 0: the default."""
    make, usual = MODELS[name]
    folder = root / f"{name}-{steps or usual}"
    return folder if folder.exists() else make(folder, steps or usual)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[*MODELS], metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--steps", type=int, default=0, help="training steps; 0: the model's own number")
    parser.add_argument("--folder", type=Path, default=CACHE)
    args = parser.parse_args()
    for name in args.models:
        print(trained(name, args.steps, args.folder))


if __name__ == "__main__":
    main()
