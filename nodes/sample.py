"""What samplers have in common, and the CogVideoX samplers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from . import inputs
from .run import requested, running, ui

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.handle import PipelineHandle
    from ..pipelines.run.sample import SampleSettings
    from ..precision.report import RunReport

FROM_ENCODE_PROMPT = {"tooltip": "From Encode Prompt."}
NEGATIVE = {"tooltip": "From Encode Prompt. Not used at guidance scale 1 or less."}


def seed() -> tuple[str, dict[str, Any]]:
    return inputs.integer(
        0, 0, 2**64 - 1, 1, "The same seed gives the same noise in every precision and on every card.",
        control_after_generate=True,
    )  # fmt: skip


def guidance(default: float) -> tuple[str, dict[str, Any]]:
    tip = "1 or less: off, half the work."
    return "FLOAT", {"default": default, "min": 0.0, "max": 100.0, "step": 0.1, "tooltip": tip}


def check_family(sampler: Any, pipeline: PipelineHandle) -> None:
    """Raise BadInput, which names the node to use, where the pipeline is of a family that a sampler does not sample."""
    from ..pipelines.errors import BadInput
    from ..pipelines.families.table import FAMILIES
    from . import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

    family = pipeline.family
    if family.pipeline in sampler.PIPELINES:
        return
    samplers = {NODE_DISPLAY_NAME_MAPPINGS[key]: cls for key, cls in NODE_CLASS_MAPPINGS.items() if is_sampler(cls)}
    (this,) = [name for name, cls in samplers.items() if cls is type(sampler)]
    fitting = [name for name, cls in samplers.items() if family.pipeline in cls.PIPELINES]
    raise BadInput(
        f"The pipeline is {family.name}'s ({pipeline.store.model.variant.name}), but {this} samples "
        f"{' and '.join(FAMILIES[name].name for name in sampler.PIPELINES)}. Use {' or '.join(fitting)}."
    )


def is_sampler(cls: Any) -> bool:
    """Of a node class: whether it samples pipelines of the families in its PIPELINES."""
    return hasattr(cls, "PIPELINES") and cls.FUNCTION == "sample"


def run(
    pipeline: PipelineHandle,
    positive: list[Any] | None,
    negative: list[Any] | None,
    settings: SampleSettings,
    precision: str,
    node_id: str | None,
    **start: Any,
) -> dict[str, Any]:
    """Sample with progress on the node; returns what a sampler node returns."""
    from ..pipelines.run.sample import sample

    progress = host.Progress(settings.computed_steps, node_id)

    def step_done(done: int, total: int, report: RunReport) -> None:
        progress.update(done, f"step {done}/{total}, {report.plan.dtype}, {report.count_reruns()}")

    with running(pipeline), progress:
        latents, report = sample(
            pipeline,
            positive[0][0] if positive else None,
            negative[0][0] if negative else None,
            settings,
            request=requested(precision),
            step_done=step_done,
            tell=progress.tell,
            **start,
        )
    latent = {"samples": latents, "made_by": pipeline.family.pipeline}
    return {"ui": ui(report, node_id), "result": (latent, report.text() if pipeline.full_report else report.summary())}


class _CogVideoXSampler:
    PIPELINES: tuple[str, ...] = ()  # diffusers classes of what it samples
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latents", "report")
    FUNCTION = "sample"
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..pipelines.families.cogvideox import COGVIDEOX

        sizes = COGVIDEOX.sizes
        size, frames = sizes.pixel_multiple, sizes.frame_multiple
        least, most = sizes.pixels
        size_tip = f"Pixels, a multiple of {size}. The models were trained at 720×480 (2B, 5B) and 1360×768 (1.5)."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "positive": ("CONDITIONING", FROM_ENCODE_PROMPT),
                "negative": ("CONDITIONING", NEGATIVE),
                "width": inputs.size(720, least, most, size, size_tip),
                "height": inputs.size(480, least, most, size, size_tip),
                "frames": inputs.size(
                    49, *sizes.frames, frames, f"{frames}·k + 1: 49 for 2B and 5B, 81 for 1.5."
                ),
                "steps": inputs.integer(50, 1, 1000, 1, "Denoising steps."),
                "guidance_scale": guidance(6.0),
                "seed": seed(),
                "scheduler": inputs.choice(inputs.SCHEDULERS, "DPM is advised for 5B and 1.5, DDIM for 2B."),
                "precision": inputs.precision(inherit=True),
            },
            "hidden": inputs.node_id(),
        }  # fmt: skip


class SampleCogVideoX(_CogVideoXSampler):
    """Pipeline and prompts → latents, and a report of every step."""

    PIPELINES = ("CogVideoXPipeline",)

    SEARCH_ALIASES = ["KSampler", "text to video", "black video", "fp16", "bf16", "fp32", "precision"]
    DESCRIPTION = (
        "Runs CogVideoX's denoising steps. Each step is checked, and computed again in fp32 if it fails. "
        "The report says which precision was used and why, and what each step did."
    )

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
        from ..pipelines.run.sample import SampleSettings

        check_family(self, pipeline)
        settings = SampleSettings(width, height, steps, seed, frames, guidance_scale, scheduler)
        return run(pipeline, positive, negative, settings, precision, node_id)


class SampleCogVideoXFromImage(_CogVideoXSampler):
    """Pipeline, prompts and a first frame → latents, and a report of every step."""

    PIPELINES = ("CogVideoXImageToVideoPipeline",)

    SEARCH_ALIASES = ["KSampler", "image to video", "img2vid", "black video", "fp16", "bf16", "fp32", "precision"]
    DESCRIPTION = (
        "Runs the denoising steps of a CogVideoX image-to-video model. The image becomes the first frame. Each step is "
        "checked, and computed again in fp32 if it fails. The report says which precision was used and why."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        inputs_ = super().INPUT_TYPES()
        inputs_["required"] |= {"image": ("IMAGE", {"tooltip": "The first frame."}), "fit": inputs.fit()}
        return inputs_

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
        image: torch.Tensor,
        fit: str,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.run.pictures import fitted
        from ..pipelines.run.sample import SampleSettings

        check_family(self, pipeline)
        first = fitted(image[:1], width, height, fit)[0]
        settings = SampleSettings(width, height, steps, seed, frames, guidance_scale, scheduler)
        return run(pipeline, positive, negative, settings, precision, node_id, image=first)


class SampleCogVideoXFromVideo(_CogVideoXSampler):
    """Pipeline, prompts and a video → latents, and a report of every step."""

    PIPELINES = ("CogVideoXPipeline",)

    SEARCH_ALIASES = ["KSampler", "video to video", "vid2vid", "black video", "fp16", "bf16", "fp32", "precision"]
    DESCRIPTION = (
        "Makes a video from a video and a prompt, with a CogVideoX text-to-video model. Each step is checked, and "
        "computed again in fp32 if it fails. The report says which precision was used and why."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        inputs_ = super().INPUT_TYPES()
        del inputs_["required"]["frames"]
        tip = "How much of it is made anew: 0.8 runs the last 80 % of the steps; 1 keeps little more than its length."
        inputs_["required"] |= {
            "video": ("IMAGE", {"tooltip": "Its frames, 4·k + 1 of them."}),
            "strength": ("FLOAT", {"default": 0.8, "min": 0.01, "max": 1.0, "step": 0.01, "tooltip": tip}),
            "fit": inputs.fit(),
        }
        return inputs_

    def sample(
        self,
        pipeline: PipelineHandle,
        positive: list[Any],
        negative: list[Any],
        width: int,
        height: int,
        steps: int,
        guidance_scale: float,
        seed: int,
        scheduler: str,
        precision: str,
        video: torch.Tensor,
        strength: float,
        fit: str,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.run.pictures import fitted
        from ..pipelines.run.sample import SampleSettings

        check_family(self, pipeline)
        frames = fitted(video, width, height, fit)
        settings = SampleSettings(width, height, steps, seed, len(frames), guidance_scale, scheduler, strength)
        return run(pipeline, positive, negative, settings, precision, node_id, video=frames)
