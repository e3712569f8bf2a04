"""The node that lets a pipeline skip what its steps have in common, as far as an error budget allows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import inputs
from .node import Node

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class StepCache(Node):
    """Pipeline → the same pipeline, of whose steps some are extrapolated."""

    TITLE = "Step Cache"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = ["TeaCache", "FBCache", "First Block Cache", "DeepCache", "TaylorSeer", "cache-dit", "speed up"]
    DESCRIPTION = (
        "Skips most of the denoiser in steps that can be foreseen from those before them, as long as the result stays "
        "within 'error' of that of all steps, as it is reckoned. The report says which steps were cached, and how far "
        "the result has drifted. Without this node every step is computed."
    )
    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    OUTPUT_TOOLTIPS = (inputs.TO_SAMPLER,)
    FUNCTION = "apply"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "error": inputs.number(
                    0.02,
                    0.0,
                    0.5,
                    0.005,
                    "Most that the latents may drift from those without a cache, in parts of their norm. 0.02: hardly "
                    "to be seen. 0: nothing is cached.",
                ),
                "check_every": inputs.advanced(
                    inputs.integer(
                        4,
                        2,
                        20,
                        1,
                        "Of the steps that could be cached, at least every so many-th is computed and compared.",
                    )
                ),
            }
        }

    def apply(self, pipeline: PipelineHandle, error: float, check_every: int) -> tuple[PipelineHandle]:
        from ..precision.drift import CachePolicy

        return (replace(pipeline, step_cache=CachePolicy(error, check_every) if error else None),)
