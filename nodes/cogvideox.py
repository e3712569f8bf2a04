"""CogVideoX: text, an image or a video → video."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import inputs
from .load import WORDS, Loader, opens, wire_to
from .sample import Sampler

if TYPE_CHECKING:
    from ..pipelines.families.spec import SizeRule


class LoadCogVideoX(Loader):
    TITLE = "Load CogVideoX"
    PIPELINES = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    SEARCH_ALIASES = [*WORDS, "text to video", "image to video", "black video"]
    DESCRIPTION = opens("a CogVideoX folder (diffusers format, safetensors)")
    OUTPUT_TOOLTIPS = wire_to("Encode Prompt, NaN Guard, a CogVideoX sampler")


class SampleCogVideoX(Sampler):
    TITLE = "Sample CogVideoX"
    PIPELINES = ("CogVideoXPipeline",)
    SEARCH_ALIASES = ["KSampler", "text to video", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs CogVideoX's denoising steps. Each step is checked, and computed again in fp32 if it fails. "
        "The report says which precision was used and why, and what each step did."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        return {
            **inputs.conditioning(),
            **inputs.pixels(sizes, 720, 480, "720×480 (2B, 5B) and 1360×768 (1.5)"),
            "frames": inputs.frames(sizes, 49, "49 for 2B and 5B, 81 for 1.5."),
            "steps": inputs.steps(50),
            "guidance_scale": inputs.guidance(6.0),
            "seed": inputs.seed(),
            "scheduler": inputs.choice(inputs.SCHEDULERS, "DPM is advised for 5B and 1.5, DDIM for 2B."),
            "precision": inputs.precision(inherit=True),
        }


class SampleCogVideoXFromImage(SampleCogVideoX):
    TITLE = "Sample CogVideoX from Image"
    PIPELINES = ("CogVideoXImageToVideoPipeline",)
    SEARCH_ALIASES = ["KSampler", "image to video", "img2vid", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Runs the denoising steps of a CogVideoX image-to-video model. The image becomes the first frame. Each step is "
        "checked, and computed again in fp32 if it fails. The report says which precision was used and why."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        return {
            **super().settings(sizes),
            "image": ("IMAGE", {"tooltip": "The first frame."}),
            "fit": inputs.fit(),
        }


class SampleCogVideoXFromVideo(SampleCogVideoX):
    TITLE = "Sample CogVideoX from Video"
    PIPELINES = ("CogVideoXPipeline",)
    SEARCH_ALIASES = ["KSampler", "video to video", "vid2vid", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Makes a video from a video and a prompt, with a CogVideoX text-to-video model. Each step is checked, and "
        "computed again in fp32 if it fails. The report says which precision was used and why."
    )

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        settings = super().settings(sizes)
        del settings["frames"]  # there are as many as the video has
        tip = "How much of it is made anew: 0.8 runs the last 80 % of the steps; 1 keeps little more than its length."
        return {
            **settings,
            "video": ("IMAGE", {"tooltip": f"Its frames, {sizes.frame_multiple}·k + 1 of them."}),
            "strength": inputs.number(0.8, 0.01, 1.0, 0.01, tip),
            "fit": inputs.fit(),
        }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        tip = "At most so many of its frames are used, from the first, cut to a length that the model takes. 0: all."
        return {**super().INPUT_TYPES(), "optional": {"frames": inputs.integer(0, 0, 10_000, 1, tip)}}
