"""Stable Video Diffusion: image → video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule


class SampleStableVideoDiffusion(Sampler):
    TITLE = "Sample Stable Video Diffusion (SVD)"
    PIPELINES = ("StableVideoDiffusionPipeline",)
    DIFFUSERS = {"noise_augmentation": "noise_aug_strength"}
    SEARCH_ALIASES = ["SVD", "SVD-XT", "KSampler", "image to video", "img2vid", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Makes a video from an image with Stable Video Diffusion. Image encoder, VAE encoder and every step are "
        "checked, and recomputed in fp32 if they fail. The report says which precision was used and why."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        last_tip = "Of the last frame. 1 or less: no guidance, half the work."
        noise_tip = "Noise added to the image. More makes it less like the image, with more motion."
        return {
            "image": ("IMAGE", {"tooltip": "What the video starts from."}),
            **inputs.pixels(sizes, 1024, 576, "1024×576"),
            "frames": inputs.frames(sizes, 25, "14 for SVD, 25 for SVD-XT."),
            "steps": inputs.steps(25),
            "min_guidance_scale": inputs.number(1.0, 0.0, 100.0, 0.1, "Of the first frame.", advanced=True),
            "max_guidance_scale": inputs.number(3.0, 0.0, 100.0, 0.1, last_tip),
            "fps": inputs.integer(7, 1, 120, 1, "Frames per second that the motion is made for.", advanced=True),
            "motion_bucket_id": inputs.integer(127, 1, 1023, 1, "More makes more motion."),
            "noise_augmentation": inputs.number(0.02, 0.0, 10.0, 0.01, noise_tip, advanced=True),
            "seed": inputs.seed(),
            "fit": inputs.fit(),
            "precision": inputs.precision(inherit=True, advanced=True),
        }
