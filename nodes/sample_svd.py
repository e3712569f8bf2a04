"""The Stable Video Diffusion sampler: image → video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import check_family, run, seed

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.handle import PipelineHandle


class SampleStableVideoDiffusion:
    """Pipeline and image → latents of a video, and a report of every step."""

    PIPELINES = ("StableVideoDiffusionPipeline",)
    CATEGORY = inputs.CATEGORY
    SEARCH_ALIASES = [
        "SVD",
        "SVD-XT",
        "KSampler",
        "image to video",
        "img2vid",
        "black video",
        "fp16",
        "bf16",
        "fp32",
        "precision",
    ]
    DESCRIPTION = (
        "Makes a video from an image with Stable Video Diffusion. Image encoder, VAE encoder and every step are "
        "checked, and computed again in fp32 if they fail. The report says which precision was used and why."
    )
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latents", "report")
    FUNCTION = "sample"
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..pipelines.families.svd import SVD

        size, (least, most) = SVD.sizes.pixel_multiple, SVD.sizes.pixels
        size_tip = f"Pixels, a multiple of {size}. The models were trained at 1024×576."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "image": ("IMAGE", {"tooltip": "What the video starts from."}),
                "width": inputs.size(1024, least, most, size, size_tip),
                "height": inputs.size(576, least, most, size, size_tip),
                "frames": inputs.integer(25, *SVD.sizes.frames, 1, "14 for SVD, 25 for SVD-XT."),
                "steps": inputs.integer(25, 1, 1000, 1, "Denoising steps."),
                "min_guidance_scale": (
                    "FLOAT",
                    {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1, "tooltip": "Of the first frame."},
                ),
                "max_guidance_scale": (
                    "FLOAT",
                    {
                        "default": 3.0, "min": 0.0, "max": 100.0, "step": 0.1,
                        "tooltip": "Of the last frame. 1 or less: no guidance, half the work.",
                    },
                ),
                "fps": inputs.integer(7, 1, 120, 1, "Frames per second that the motion is made for."),
                "motion_bucket_id": inputs.integer(127, 1, 1023, 1, "More makes more motion."),
                "noise_augmentation": (
                    "FLOAT",
                    {
                        "default": 0.02, "min": 0.0, "max": 10.0, "step": 0.01,
                        "tooltip": "Noise added to the image. More makes it less like the image, with more motion.",
                    },
                ),
                "seed": seed(),
                "fit": inputs.fit(),
                "precision": inputs.precision(inherit=True),
            },
            "hidden": inputs.node_id(),
        }  # fmt: skip

    def sample(
        self,
        pipeline: PipelineHandle,
        image: torch.Tensor,
        width: int,
        height: int,
        frames: int,
        steps: int,
        min_guidance_scale: float,
        max_guidance_scale: float,
        fps: int,
        motion_bucket_id: int,
        noise_augmentation: float,
        seed: int,
        fit: str,
        precision: str,
        node_id: str | None = None,
    ) -> dict[str, Any]:
        from ..pipelines.run.pictures import fitted
        from ..pipelines.run.sample import SampleSettings

        check_family(self, pipeline)
        more = {
            "min_guidance_scale": min_guidance_scale,
            "max_guidance_scale": max_guidance_scale,
            "fps": fps,
            "motion_bucket_id": motion_bucket_id,
            "noise_aug_strength": noise_augmentation,
        }
        settings = SampleSettings(width, height, steps, seed, frames, more=more)
        start = fitted(image[:1], width, height, fit)[0]
        return run(pipeline, None, None, settings, precision, node_id, image=start)
