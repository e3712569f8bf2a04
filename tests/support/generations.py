"""A small generation of any family, from folder to frames, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.report import RunReport
from small_runs import start_image

PROMPTS = ["a red kite", "grey"]
STEPS = 2
_SIZES = {"cogview3": (64, 64, 1), "cogview4": (64, 64, 1), "svd": (64, 64, 2), "svd-xt": (64, 64, 2)}
_SIZES |= {"5b-i2v": (96, 64, 9)}  # the only size it has position embeddings for
_SIZE = (64, 48, 9)


@dataclass
class Generation:
    """A generation stage by stage; a stage that raised can be run again."""

    handle: PipelineHandle
    variant: str
    seed: int = 3
    prompts: tuple[Any, Any] = (None, None)
    latents: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    frames: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    reports: dict[str, RunReport] = field(default_factory=dict)

    def encode(self) -> Any:
        if self.handle.family.prompt:
            (positive, negative), report = encode_prompts(self.handle, PROMPTS)
            self.prompts, self.reports["text_encoder"] = (positive, negative), report
        return self.prompts

    def sample(self) -> torch.Tensor:
        width, height, frames = _SIZES.get(self.variant, _SIZE)
        guidance = 5.0 if self.handle.family.prompt else None
        settings = SampleSettings(width, height, STEPS, self.seed, frames, guidance)
        self.latents, report = sample(self.handle, *self.prompts, settings, **start_image(self.handle, width, height))
        self.reports |= {before.plan.component.value: before for before in report.before} | {"denoiser": report}
        return self.latents

    def decode(self) -> torch.Tensor:
        self.frames, self.reports["vae_decode"] = decode(self.handle, self.latents)
        return self.frames

    def whole(self) -> torch.Tensor:
        self.encode()
        self.sample()
        return self.decode()

    def outcomes(self) -> Iterator[tuple[str, list[str]]]:
        """(stage, outcome of each of its calls)"""
        for stage, report in self.reports.items():
            yield stage, [step.outcome for step in report.steps]
