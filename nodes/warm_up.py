"""The node that compiles a pipeline ahead of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import joined
from . import inputs
from .node import Node
from .stage_node import embeddings, requested, running

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class WarmUp(Node):
    """Pipeline → the same pipeline, compiled for the sizes that are named."""

    TITLE = "Warm Up"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = ["compile ahead", "torch.compile", "precompile"]
    DESCRIPTION = (
        "Compiles the denoiser ahead, by sampling two steps at each size, so that later runs at these sizes start at "
        "once. It may run alone, or stand between a loader and a sampler."
    )
    RETURN_TYPES = ("ONEDIFF_PIPELINE", "STRING")
    RETURN_NAMES = ("pipeline", "report")
    OUTPUT_TOOLTIPS = (inputs.TO_SAMPLER, "A line for each size: what was compiled, and how long that took, as text.")
    FUNCTION = "warm_up"
    TOGETHER = True
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "sizes": (
                    "STRING",
                    {
                        "multiline": True,
                        "default": "",
                        "tooltip": "One a line: width×height, or width×height×frames. Empty: what the model was made "
                        "for.",
                    },
                ),
                "guidance": inputs.flag(True, "On: later runs have a guidance scale above 1. Off: 1 or less."),
                "precision": inputs.precision(inherit=True),
            },
            "optional": {
                "positive": ("CONDITIONING", {"tooltip": f"{inputs.FROM_ENCODE_PROMPT} Else an empty prompt."}),
                "negative": ("CONDITIONING", {"tooltip": f"{inputs.FROM_ENCODE_PROMPT} Else an empty prompt."}),
            },
            "hidden": inputs.node_id(),
        }

    def warm_up(
        self,
        pipeline: PipelineHandle,
        sizes: str,
        guidance: bool,
        precision: str,
        positive: list[Any] | None = None,
        negative: list[Any] | None = None,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.compile.warm_up import STEPS, sizes_of, warm_up
        from ..trust.message import BadInput

        if (positive is None) != (negative is None):
            raise BadInput("Warm Up has one of 'positive' and 'negative'. Wire both, or neither.")
        prompt, without = embeddings(positive, "positive"), embeddings(negative, "negative")
        wanted = sizes_of(pipeline, sizes)
        progress = host.Progress(len(wanted) * STEPS, node_id)
        with running(pipeline), progress:
            warmed = warm_up(
                pipeline,
                wanted,
                embeddings=(prompt, without) if prompt is not None and without is not None else None,
                guidance=guidance,
                request=requested(precision),
                step_done=lambda done, _total, text: progress.update(done, text),
                tell=progress.tell,
            )
        text = joined("\n", map(str, warmed))
        host.say(node_id, text)
        ui = {"text": [translated(text)], "onediff_guard": [each.report.as_dict() for each in warmed]}
        return {"ui": ui, "result": (pipeline, text)}
