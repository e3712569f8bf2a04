"""The samplers of each family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule
    from ..pipelines.run.handle import PipelineHandle


class SampleCogVideoX(Sampler):
    TITLE = "Sample CogVideoX"
    PIPELINES = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    SEARCH_ALIASES = [
        *("KSampler", "text to video", "image to video", "img2vid", "video to video", "vid2vid", "black video"),
        *inputs.PRECISION_WORDS,
    ]
    DESCRIPTION = (
        "Runs CogVideoX's denoising steps: from a prompt, from a start image (with an image-to-video model, I2V), or "
        "from a video (with a text-to-video model). Each step is checked, and recomputed in fp32 if it fails. The "
        "report says which precision was used and why, and how each step went."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        length = "49 for 2B and 5B, 81 for 1.5. A longer wired video is cut to this length."
        return {
            **inputs.conditioning(),
            **inputs.pixels(sizes, 720, 480, "720×480 (2B, 5B) and 1360×768 (1.5)"),
            "frames": inputs.frames(sizes, 49, length),
            "steps": inputs.steps(50),
            "guidance_scale": inputs.guidance(6.0),
            "seed": inputs.seed(),
            "scheduler": inputs.choice(inputs.SCHEDULERS, "DPM is recommended for 5B and 1.5, DDIM for 2B."),
            "precision": inputs.precision(inherit=True, advanced=True),
        }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = "How much of a wired video is redone. 0.8 runs the last 80 % of the steps; 1 keeps little of it."
        optional = {
            "image": ("IMAGE", {"tooltip": "The first frame. Only for image-to-video models (I2V), which need one."}),
            "video": ("IMAGE", {"tooltip": "Frames of a video to start from. Only for text-to-video models."}),
            "strength": inputs.number(inputs.STRENGTH, 0.01, 1.0, 0.01, strength, advanced=True),
            "fit": inputs.fit(),
        }
        return {**super().INPUT_TYPES(), "optional": optional}


class SampleCogView(Sampler):
    TITLE = "Sample CogView"
    PIPELINES = ("CogView3PlusPipeline", "CogView4Pipeline")
    SEARCH_ALIASES = ["KSampler", "text to image", "black image", "CogView3", "CogView4", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs the denoising steps of CogView3-Plus or CogView4. Each step is checked, and recomputed in fp32 if it "
        "fails or clips. The report says which precision was used and why, and how each step went."
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


class SampleStableVideoDiffusion(Sampler):
    TITLE = "Sample Stable Video Diffusion (SVD)"
    PIPELINES = ("StableVideoDiffusionPipeline",)
    DIFFUSERS = {"noise_augmentation": "noise_aug_strength"}
    SEARCH_ALIASES = ["SVD", "SVD-XT", "KSampler", "image to video", "img2vid", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Makes a video from an image with Stable Video Diffusion. The image encoder, the VAE encoder and every step "
        "are checked, and recomputed in fp32 if they fail. The report says which precision was used and why."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        last_tip = "Guidance of the last frame. 1 or less: no guidance, half the compute."
        noise_tip = "Noise added to the image. More noise: less like the image, more motion."
        return {
            "image": ("IMAGE", {"tooltip": "The image that the video starts from."}),
            **inputs.pixels(sizes, 1024, 576, "1024×576"),
            "frames": inputs.frames(sizes, 25, "14 for SVD, 25 for SVD-XT."),
            "steps": inputs.steps(25),
            "min_guidance_scale": inputs.number(1.0, 0.0, 100.0, 0.1, "Guidance of the first frame.", advanced=True),
            "max_guidance_scale": inputs.number(3.0, 0.0, 100.0, 0.1, last_tip),
            "fps": inputs.integer(7, 1, 120, 1, "Frames per second that the motion is made for.", advanced=True),
            "motion_bucket_id": inputs.integer(127, 1, 1023, 1, "A larger value makes more motion."),
            "noise_augmentation": inputs.number(0.02, 0.0, 10.0, 0.01, noise_tip, advanced=True),
            "seed": inputs.seed(),
            "fit": inputs.fit(),
            "precision": inputs.precision(inherit=True, advanced=True),
        }


class SampleWan(Sampler):
    TITLE = "Sample Wan"
    PIPELINES = ("WanPipeline",)
    SEARCH_ALIASES = ["KSampler", "text to video", "black video", "Wan2.1", "Wan2.2", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs the denoising steps of Wan 2.1 or 2.2. Each step is checked, and recomputed in fp32 if it fails. "
        "The report says which precision was used and why, and how each step went."
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
        tip = "For 2.2 A14B: guidance of the second transformer (low noise). 0: the same as the first."
        scale = inputs.number(0.0, 0.0, 100.0, 0.1, tip, advanced=True)
        return {**super().INPUT_TYPES(), "optional": {"guidance_scale_2": scale}}

    def sample(self, pipeline: PipelineHandle, *, guidance_scale_2: float = 0.0, **settings: Any) -> dict[str, Any]:
        return super().sample(pipeline, guidance_scale_2=guidance_scale_2 or None, **settings)
