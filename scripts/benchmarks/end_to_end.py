"""From a prompt to frames: our nodes' functions compared with diffusers' own pipeline, both from the same folder.

Contestants run one after another, not interleaved: several whole pipelines do not fit on a card.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from budget import Budget
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.memory import peak_memory
from contestants import compiled_by_block
from measure import attempt, opened, synchronize
from moves import Moves
from PIL import Image
from random_pipeline import write
from subject import Subject

STEPS = 10
ENCODE, DENOISE, DECODE, ALL = "encode", "steps", "decode", "all"
PROMPT = "a paper boat drifts down a narrow stream in the forest, {}"
Seconds = dict[str, float]
Run = Callable[[int], tuple[Seconds, torch.Tensor]]  # run number → seconds of each part, and frames
Open = Callable[[Path, Subject], Run]


def end_to_end(subject: Subject, rounds: int, budget: Budget, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Return a row per contestant: seconds of the first run and of later runs, each with another prompt and seed; the
    later runs' peak; and the bytes that one more run moves."""
    rows: dict[str, Any] = {}
    made = {"dtype": subject.dtype, "size": str(subject.size), "steps": STEPS, "rows": rows}
    with tempfile.TemporaryDirectory() as place:
        started = time.perf_counter()
        folder = write(
            subject,
            Path(place) / subject.name,
            DTYPES[subject.dtype],
            small=subject.size == subject.model.sizes["tiny"],
        )
        made["write_seconds"] = round(time.perf_counter() - started, 1)
        made["folder_bytes"] = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        for left, (name, make) in zip(range(len(CONTESTANTS), 0, -1), CONTESTANTS.items(), strict=True):
            start_anew(subject.device, Path(place) / f"compiled-{left}")
            found = budget.too_late() or attempt(
                lambda make=make, left=left: row(make, folder, subject, rounds, budget, 1 / left)
            )
            rows[name] = {"error": found} if isinstance(found, str) else found
            keep(made)
    return made


def row(make: Open, folder: Path, subject: Subject, most: int, budget: Budget, share: float) -> dict[str, Any]:
    started = time.perf_counter()
    run = make(folder, subject)
    opened = time.perf_counter() - started
    first, _ = run(0)
    rounds = budget.rounds([first[ALL]], most, share=share / 2)
    with peak_memory(subject.device) as peak:
        later = [run(number)[0] for number in range(1, rounds + 1)]
        found = peak()
    with Moves(subject.device.type) as moves:
        _, frames = run(rounds + 1)
    return {
        "first": rounded(first | {"open": opened}),
        "later": rounded({part: statistics.median(each[part] for each in later) for part in first}),
        "rounds": rounds,
        "moves": dict(moves.counts),
        "peak_bytes": found.used if found else None,
        "finite": bool(frames.isfinite().all()),
    }


class Clock:
    """Times calls in seconds; waits for the device before and after each."""

    def __init__(self, device: torch.device):
        self.seconds: Seconds = {}
        self._device = device

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize(self._device)
            started = time.perf_counter()
            made = call(*args, **kwargs)
            synchronize(self._device)
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started
            return made

        return run


def ours(backend: str, *, decoder: str = "eager", channels_last: bool = False) -> Open:
    """Make our contestant. decoder: the backend that compiles the VAE decoder's similar calls."""

    def make(folder: Path, subject: Subject) -> Run:
        family, size = subject.model.family, subject.size
        handle = opened(folder, subject.dtype, backend=backend, placement=PlainPlacement(subject.device))
        handle = replace(handle, compile_options=CompileOptions(channels_last=channels_last))

        def run(number: int) -> tuple[Seconds, torch.Tensor]:
            clock = Clock(subject.device)

            def whole() -> torch.Tensor:
                positive, negative, guidance = None, None, None
                if family.prompt:
                    prompts = [PROMPT.format(number), ""]
                    (positive, negative), _ = clock.timed(ENCODE, encode_prompts)(handle, prompts)
                    guidance = GUIDANCE
                settings = SampleSettings(
                    size.width, size.height, STEPS, number, frames=size.frames, guidance_scale=guidance
                )
                given = {"image": picture(subject)} if family.takes_image else {}
                latents, _ = clock.timed(DENOISE, sample)(handle, positive, negative, settings, **given)
                return clock.timed(DECODE, decode)(handle, latents, backend=decoder)[0]

            frames = clock.timed(ALL, whole)()
            return clock.seconds, frames

        return run

    return make


def theirs(*, compiles: bool = False) -> Open:
    """Make diffusers' contestant, entirely on the card."""

    def make(folder: Path, subject: Subject) -> Run:
        family, size = subject.model.family, subject.size
        kind = getattr(diffusers, family.pipeline)
        pipe: Any = kind.from_pretrained(folder, torch_dtype=DTYPES[subject.dtype]).to(subject.device)
        pipe.set_progress_bar_config(disable=True)
        if compiles:
            setattr(pipe, family.denoiser, compiled_by_block(getattr(pipe, family.denoiser), family.blocks))
        encode, decode_latents = getattr(pipe, "encode_prompt", None), pipe.vae.decode
        frames = {"num_frames": size.frames} if family.layout.counts_frames else {}

        def run(number: int) -> tuple[Seconds, torch.Tensor]:
            clock = Clock(subject.device)
            if encode:
                pipe.encode_prompt = clock.timed(ENCODE, encode)
            pipe.vae.decode = clock.timed(DECODE, decode_latents)
            given = {"image": picture(subject)} if family.takes_image else {}
            if family.prompt:
                given |= {"prompt": PROMPT.format(number), "negative_prompt": "", "guidance_scale": GUIDANCE}
            made = clock.timed(ALL, pipe)(
                **given,
                **frames,
                width=size.width,
                height=size.height,
                num_inference_steps=STEPS,
                generator=torch.Generator("cpu").manual_seed(number),
                output_type="pt",
            )
            found = clock.seconds
            found[DENOISE] = found[ALL] - found.get(ENCODE, 0.0) - found[DECODE]
            return found, (made.frames[0] if frames else made.images).cpu()

        return run

    return make


GUIDANCE = 6.0
CONTESTANTS: dict[str, Open] = {
    "diffusers": theirs(),
    "ours, inductor": ours("inductor"),
    "diffusers, torch.compile by block": theirs(compiles=True),
    "ours, eager": ours("eager"),
    "ours, inductor, decoder too": ours("inductor", decoder="inductor"),
    "ours, inductor, decoder too, channels-last": ours("inductor", decoder="inductor", channels_last=True),
}


def picture(subject: Subject) -> Image.Image:
    return Image.new("RGB", (subject.size.width, subject.size.height), (90, 120, 200))


def start_anew(device: torch.device, compiled: Path) -> None:
    """Drop the previous contestant's weights and compiled code."""
    torch.compiler.reset()
    os.environ.update({name: str(compiled / name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")})
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rounded(seconds: Seconds) -> Seconds:
    return {part: round(taken, 4) for part, taken in seconds.items()}
