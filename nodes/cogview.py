"""CogView3-Plus and CogView4: text → image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule


class SampleCogView(Sampler):
    TITLE = "Sample CogView"
    PIPELINES = ("CogView3PlusPipeline", "CogView4Pipeline")
    SEARCH_ALIASES = ["KSampler", "text to image", "black image", "CogView3", "CogView4", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs the denoising steps of CogView3-Plus or CogView4. Each step is checked, and recomputed in fp32 if it "
        "fails or clips. The report says which precision was used and why, and what each step did."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        return {
            **inputs.conditioning(),
            **inputs.pixels(sizes, 1024, 1024, "512 to 2048"),
            "steps": inputs.steps(50),
            "guidance_scale": inputs.guidance(5.0),
            "seed": inputs.seed(),
            "precision": inputs.precision(inherit=True),
        }
