"""The Numerics Probe node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..trust.message import Message
from . import inputs
from .node import Node
from .report import THIS_CARD, architecture_of
from .stage_node import embeddings, only_first, running

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.handle import PipelineHandle
    from ..precision.probe import ProbeResult
    from ..precision.report import RunReport


PICTURE = "A heat map of each layer's largest values, by step and by block. Its colour bar marks where dtypes end."
TEXT = "Text: what to set and why, the largest values, and how long the measurement took."


def shown(result: ProbeResult, text: str, node_id: str | None, *more: Any) -> dict[str, Any]:
    """Return the result of a probe's node: picture, text and `more` as outputs, and text and facts to show."""
    import torch

    from ..pipelines.insight.probe_figure import draw

    host.say(node_id, text, as_it_is=True)
    picture = torch.from_numpy(draw(result)).float().div(255)[None]
    ui = {"text": [text], "onediff_guard": [result.as_dict()]}
    return {"ui": ui, "result": (picture, text, *more)}


class NumericsProbe(Node):
    """Pipeline and prompts → a picture of the largest values in every layer, a recommendation, and a profile for it."""

    TITLE = "Numerics Probe"
    CATEGORY = inputs.DIAGNOSE
    SEARCH_ALIASES = [
        *("NaN", "overflow", "black image", "black video", *inputs.PRECISION_WORDS, "dynamic range", "heat map")
    ]
    DESCRIPTION = (
        "Runs a few sampling steps in fp32, and draws every layer's largest values against the ranges of fp16 and "
        "bf16. Recommends precision and overflow protection for this model on this card. Other runs are not changed or "
        "slowed down."
    )
    RETURN_TYPES = ("IMAGE", "STRING", "STRING")
    RETURN_NAMES = ("images", "recommendation", "profile")
    OUTPUT_TOOLTIPS = (
        PICTURE,
        TEXT,
        "Wire it to the NaN Guard's profile, with scope learned. Empty if fp32 is recommended.",
    )
    OUTPUT_NODE = True
    FUNCTION = "probe"
    TOGETHER = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..precision.arch import ARCHITECTURES

        other_tip = "Recommend for another card. The measurement still runs on this one."
        save_tip = "On: also keep the profile for all later runs with scope learned, which is the default."
        size_tip = "Pixels. 0: the model's own size. Smaller is faster and reaches nearly the same values."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "steps": inputs.integer(4, 1, 1000, 1, inputs.PROBED_STEPS),
                "width": inputs.integer(0, 0, 4096, 16, size_tip),
                "height": inputs.integer(0, 0, 4096, 16, size_tip),
                "frames": inputs.integer(0, 0, 1025, 1, "0: the model's own length."),
                "guidance_scale": inputs.guidance(6.0),
                "seed": inputs.seed(),
            },
            "optional": {
                **inputs.conditioning(),
                "image": ("IMAGE", {"tooltip": "For models that start from an image."}),
                "fit": inputs.fit(),
                "architecture": inputs.choice((THIS_CARD, *ARCHITECTURES), other_tip, advanced=True),
                "save": inputs.flag(False, save_tip, advanced=True),
            },
            "hidden": inputs.node_id(),
        }

    def probe(
        self,
        pipeline: PipelineHandle,
        steps: int,
        width: int,
        height: int,
        frames: int,
        guidance_scale: float,
        seed: int,
        positive: list[Any] | None = None,
        negative: list[Any] | None = None,
        image: torch.Tensor | None = None,
        fit: str = "crop",
        architecture: str = THIS_CARD,
        save: bool = False,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.insight.probe import keep_profile, probe, usual_size
        from ..pipelines.run.pictures import fitted
        from ..pipelines.run.sample import SampleSettings

        pipeline = replace(pipeline, architecture=architecture_of(architecture) or pipeline.architecture)
        width, height, frames = usual_size(pipeline, width, height, frames)
        start = fitted(image[:1], width, height, fit)[0] if image is not None else None
        scale = guidance_scale if pipeline.family.prompt else None  # Stable Video Diffusion has a range of its own
        settings = SampleSettings(width, height, steps, seed, frames, scale)
        progress = host.Progress(steps, node_id)

        def step_done(done: int, total: int, _report: RunReport) -> None:
            progress.update(done, Message("step {}/{}, measured in fp32", done, total))

        prompts = embeddings(positive, "positive"), embeddings(negative, "negative")
        with running(pipeline), progress:
            found = probe(pipeline, *prompts, settings, image=start, step_done=step_done, tell=progress.tell)
        unused = only_first(image) if image is not None else ()
        if not pipeline.family.prompt:
            unused += (Message("guidance_scale is not used: {} has its own range of guidance.", pipeline.family.name),)
        text = "\n".join([found.text(), *unused])
        text += f"\nThe profile: {keep_profile(pipeline, found)}" if save else ""
        return shown(found, text, node_id, found.profile_text)
