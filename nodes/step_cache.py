"""The node that reuses the denoiser's outputs on predictable steps, within an estimated error."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import inputs
from .node import PipelineChange

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class StepCache(PipelineChange):
    """Pipeline → the same pipeline, with some steps extrapolated."""

    TITLE = "Step Cache"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = ["TeaCache", "FBCache", "First Block Cache", "DeepCache", "TaylorSeer", "cache-dit", "speed up"]
    DESCRIPTION = (
        "Reuses the denoiser's outputs on predictable steps, as long as the estimated change of the result stays "
        "within 'error'. The estimate is no guarantee. The report says which steps were cached, and the estimated "
        "change of the result. Not for Stable Video Diffusion, where the estimate did not hold."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        error_tip = (
            "Quality loss you accept, as a share of the latents' norm. 0.02: barely visible. 0: nothing is cached."
        )
        check_tip = "At least one in this many cacheable steps is computed, and compared with the cache."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "error": inputs.number(0.02, 0.0, 0.5, 0.005, error_tip),
                "check_every": inputs.integer(4, 2, 20, 1, check_tip, advanced=True),
            }
        }

    def apply(self, pipeline: PipelineHandle, error: float, check_every: int) -> tuple[PipelineHandle]:
        from ..precision.error_estimate import CachePolicy

        return (replace(pipeline, step_cache=CachePolicy(error, check_every) if error else None),)
