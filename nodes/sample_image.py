"""The CogView sampler: text → image."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import FROM_ENCODE_PROMPT, NEGATIVE, check_family, guidance, run, seed

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class SampleCogView:
    """Pipeline and prompts → latents of an image, and a report of every step."""

    PIPELINES = ("CogView3PlusPipeline", "CogView4Pipeline")
    CATEGORY = inputs.CATEGORY
    SEARCH_ALIASES = [
        "KSampler",
        "text to image",
        "black image",
        "CogView3",
        "CogView4",
        "fp16",
        "bf16",
        "fp32",
        "precision",
    ]
    DESCRIPTION = (
        "Runs the denoising steps of CogView3-Plus or CogView4. Each step is checked, and computed again in fp32 if it "
        "fails or clips. The report says which precision was used and why, and what each step did."
    )
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latents", "report")
    FUNCTION = "sample"
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..pipelines.families.cogview3plus import COGVIEW3PLUS

        size, (least, most) = COGVIEW3PLUS.sizes.pixel_multiple, COGVIEW3PLUS.sizes.pixels
        size_tip = f"Pixels, a multiple of {size}. The models were trained at 512 to 2048."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "positive": ("CONDITIONING", FROM_ENCODE_PROMPT),
                "negative": ("CONDITIONING", NEGATIVE),
                "width": inputs.size(1024, least, most, size, size_tip),
                "height": inputs.size(1024, least, most, size, size_tip),
                "steps": inputs.integer(50, 1, 1000, 1, "Denoising steps."),
                "guidance_scale": guidance(5.0),
                "seed": seed(),
                "precision": inputs.precision(inherit=True),
            },
            "hidden": inputs.node_id(),
        }

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
        precision: str,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.run.sample import SampleSettings

        check_family(self, pipeline)
        settings = SampleSettings(width, height, steps, seed, guidance_scale=guidance_scale)
        return run(pipeline, positive, negative, settings, precision, node_id)
