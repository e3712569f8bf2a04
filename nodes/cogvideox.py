"""CogVideoX: text, an image or a video → video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule


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
        "report says which precision was used and why, and what each step did."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        length = "49 for 2B and 5B, 81 for 1.5. Of a wired video, at most so many frames are used, from the first."
        return {
            **inputs.conditioning(),
            **inputs.pixels(sizes, 720, 480, "720×480 (2B, 5B) and 1360×768 (1.5)"),
            "frames": inputs.frames(sizes, 49, length),
            "steps": inputs.steps(50),
            "guidance_scale": inputs.guidance(6.0),
            "seed": inputs.seed(),
            "scheduler": inputs.choice(inputs.SCHEDULERS, "DPM is advised for 5B and 1.5, DDIM for 2B."),
            "precision": inputs.precision(inherit=True, advanced=True),
        }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = "Of a wired video, how much is made anew: 0.8 runs the last 80 % of the steps; 1 keeps little of it."
        optional = {
            "image": ("IMAGE", {"tooltip": "The first frame. Only for image-to-video models (I2V), which need one."}),
            "video": ("IMAGE", {"tooltip": "Frames of a video to start from. Only for text-to-video models."}),
            "strength": inputs.number(inputs.STRENGTH, 0.01, 1.0, 0.01, strength, advanced=True),
            "fit": inputs.fit(),
        }
        return {**super().INPUT_TYPES(), "optional": optional}
