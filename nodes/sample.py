"""Sampler nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import host, inputs
from .run import requested, running, ui

if TYPE_CHECKING:
    from ..pipelines.handle import PipelineHandle
    from ..precision.report import RunReport


class SampleCogVideoX:
    """Pipeline and prompts → latents, and a report of every step."""

    CATEGORY = inputs.CATEGORY
    DESCRIPTION = (
        "Runs CogVideoX's denoising steps. Each step is checked, and computed again in fp32 if it fails. "
        "The report says which precision was used and why, and what each step did."
    )
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latents", "report")
    FUNCTION = "sample"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..pipelines.families import COGVIDEOX

        sizes = COGVIDEOX.sizes
        size, frames = sizes.pixel_multiple, sizes.frame_multiple
        least, most = sizes.pixels
        size_tip = f"Pixels, a multiple of {size}. The models were trained at 720×480 (2B, 5B) and 1360×768 (1.5)."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "positive": ("CONDITIONING", {"tooltip": "From Encode Prompt."}),
                "negative": ("CONDITIONING", {"tooltip": "From Encode Prompt. Not used at guidance scale 1 or less."}),
                "width": inputs.integer(720, least, most, size, size_tip),
                "height": inputs.integer(480, least, most, size, size_tip),
                "frames": inputs.integer(
                    49, *sizes.frames, frames, f"{frames}·k + 1: 49 for 2B and 5B, 81 for 1.5."
                ),
                "steps": inputs.integer(50, 1, 1000, 1, "Denoising steps."),
                "guidance_scale": (
                    "FLOAT",
                    {"default": 6.0, "min": 0.0, "max": 100.0, "step": 0.1, "tooltip": "1 or less: off, half the work"},
                ),
                "seed": inputs.integer(
                    0, 0, 2**64 - 1, 1, "The same seed gives the same noise in every precision and on every card.",
                    control_after_generate=True,
                ),
                "scheduler": inputs.choice(inputs.SCHEDULERS, "DPM is advised for 5B and 1.5, DDIM for 2B."),
                "precision": inputs.precision(inherit=True),
            },
            "hidden": inputs.node_id(),
        }  # fmt: skip

    @classmethod
    def VALIDATE_INPUTS(
        cls, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool | str:
        from ..pipelines.errors import BadSize
        from ..pipelines.families import COGVIDEOX

        given = {"width": width, "height": height, "frames": frames}
        try:
            COGVIDEOX.sizes.check(**{name: value for name, value in given.items() if value is not None})
        except BadSize as error:
            return str(error)
        return True

    def sample(
        self,
        pipeline: PipelineHandle,
        positive: list[Any],
        negative: list[Any],
        width: int,
        height: int,
        frames: int,
        steps: int,
        guidance_scale: float,
        seed: int,
        scheduler: str,
        precision: str,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.sample import SampleSettings, sample

        settings = SampleSettings(width, height, frames, steps, guidance_scale, seed, scheduler)
        progress = host.Progress(steps, node_id)

        def step_done(done: int, total: int, report: RunReport) -> None:
            progress.update(done, f"step {done}/{total}, {report.plan.dtype}, {report.count_reruns()}")

        with running(pipeline), progress:
            latents, report = sample(
                pipeline,
                positive[0][0],
                negative[0][0],
                settings,
                request=requested(precision),
                step_done=step_done,
            )
        return {"ui": ui(report, node_id), "result": ({"samples": latents}, report.text())}
