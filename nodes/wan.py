"""Wan 2.1 and 2.2: text → video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule
    from ..pipelines.run.handle import PipelineHandle


class SampleWan(Sampler):
    TITLE = "Sample Wan"
    PIPELINES = ("WanPipeline",)
    SEARCH_ALIASES = ["KSampler", "text to video", "black video", "Wan2.1", "Wan2.2", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs the denoising steps of Wan 2.1 or 2.2. Each step is checked, and recomputed in fp32 if it fails. "
        "The report says which precision was used and why, and what each step did."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        return {
            **inputs.conditioning(),
            **inputs.pixels(sizes, 832, 480, "832×480 (2.1; 14B up to 1280×720) and 1280×704 (2.2 5B)"),
            "frames": inputs.frames(sizes, 81, "81 for 2.1, 121 for 2.2 5B."),
            "steps": inputs.steps(50),
            "guidance_scale": inputs.guidance(5.0),
            "seed": inputs.seed(),
            "precision": inputs.precision(inherit=True),
        }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "Of the second transformer, for low noise, of 2.2 A14B. 0: the same as the first one's."
        scale = inputs.number(0.0, 0.0, 100.0, 0.1, tip, advanced=True)
        return {**super().INPUT_TYPES(), "optional": {"guidance_scale_2": scale}}

    def sample(self, pipeline: PipelineHandle, *, guidance_scale_2: float = 0.0, **settings: Any) -> dict[str, Any]:
        return super().sample(pipeline, guidance_scale_2=guidance_scale_2 or None, **settings)
