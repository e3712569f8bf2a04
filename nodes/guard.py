"""The NaN Guard's settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import inputs

if TYPE_CHECKING:
    from ..pipelines.handle import PipelineHandle


class NaNGuard:
    """Pipeline → the same pipeline with another guard policy."""

    CATEGORY = inputs.CATEGORY
    DESCRIPTION = (
        "Says what happens when a step comes out NaN or infinite. Pipelines are guarded without this node too "
        "(rerun); it is here to change the policy. It does not apply to precision 'fp16 (plain)'."
    )
    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "on_failure": inputs.choice(
                    inputs.ON_FAILURE,
                    "rerun: compute the failing step again in fp32 and go on. stop: end the run with the reason. "
                    "off: only watch and report.",
                ),
                "strict": (
                    "BOOLEAN",
                    {
                        "default": False,
                        "tooltip": "Rerun in plain fp32 instead of TF32 on cards that have TF32. Slower.",
                    },
                ),
            }
        }

    def apply(self, pipeline: PipelineHandle, on_failure: str, strict: bool) -> tuple[PipelineHandle]:
        from ..precision.guard import GuardPolicy, OnFailure

        return (replace(pipeline, policy=GuardPolicy(OnFailure(on_failure), strict)),)
