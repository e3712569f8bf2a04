"""Loader nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import host, inputs

if TYPE_CHECKING:
    from ..pipelines.handle import PipelineHandle


class _Loader:
    """A diffusers-format folder of one of `PIPELINES` → pipeline."""

    PIPELINES: tuple[str, ...] = ()  # diffusers classes that model_index.json may name
    CATEGORY = inputs.CATEGORY
    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        models = list(host.model_folders())
        return {
            "required": {
                "model": (models, {"tooltip": "A folder with model_index.json below models/diffusers."}),
                "precision": inputs.precision(),
                "backend": inputs.choice(
                    inputs.BACKENDS,
                    "What OneDiff compiles with. auto: the first that works here, named in the report. eager: nothing.",
                ),
                "offload": inputs.choice(
                    inputs.OFFLOADS,
                    "none: the model stays on the card between nodes. model: it rests in main memory until needed.",
                ),
            },
            "optional": {
                "accumulation": inputs.choice(
                    inputs.ACCUMULATIONS,
                    "Half-precision accumulation in attention. auto: only on cards where it is reported right. fast: "
                    "on, with attention scores in fp32 (OneFlow); if frames turn black, choose auto.",
                ),
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, model: str | None = None) -> bool | str:
        folders = host.model_folders()
        if model is None or model in folders:
            return True
        known = ", ".join(folders) or "none"
        return f"No folder '{model}' with a model_index.json. Found: {known}. Looked in: {host.model_roots_text()}."

    @classmethod
    def IS_CHANGED(cls, model: str, **_: Any) -> str:
        from ..pipelines.folder import fingerprint

        folder = host.model_folders().get(model)
        return fingerprint(folder) if folder else ""

    def load(
        self, model: str, precision: str, backend: str, offload: str, accumulation: str = "auto"
    ) -> tuple[PipelineHandle]:
        from ..pipelines.errors import BadFolder
        from ..pipelines.families import FAMILIES
        from ..pipelines.folder import family_of
        from ..pipelines.handle import load
        from ..precision.accumulation import Accumulation
        from ..precision.policy import Precision

        folder = host.model_folders().get(model)
        if folder is None:
            raise BadFolder(f"The folder '{model}' is gone. Looked in: {host.model_roots_text()}.")
        family = family_of(folder)
        handle = load(
            folder,
            family if family.pipeline in self.PIPELINES else FAMILIES[self.PIPELINES[0]],
            precision=Precision(precision),
            backend=backend,
            offload=offload,
            placement=host.placement(),
            accumulation=Accumulation(accumulation),
        )
        host.linger(handle.store)
        return (handle,)


class LoadCogVideoX(_Loader):
    PIPELINES = ("CogVideoXPipeline", "CogVideoXImageToVideoPipeline")
    DESCRIPTION = (
        "Opens a CogVideoX folder (diffusers format, safetensors) and chooses precision and compile backend for this "
        "card. Weights are read when a later node first needs them."
    )
    OUTPUT_TOOLTIPS = ("Wire it to Encode Prompt, NaN Guard, a CogVideoX sampler and Decode Latents.",)


class LoadCogView3Plus(_Loader):
    PIPELINES = ("CogView3PlusPipeline",)
    DESCRIPTION = (
        "Opens a CogView3-Plus folder (diffusers format, safetensors) and chooses precision and compile backend for "
        "this card. Weights are read when a later node first needs them."
    )
    OUTPUT_TOOLTIPS = ("Wire it to Encode Prompt, NaN Guard, Sample CogView and Decode Latents.",)


class LoadCogView4(_Loader):
    PIPELINES = ("CogView4Pipeline",)
    DESCRIPTION = (
        "Opens a CogView4 folder (diffusers format, safetensors) and chooses precision and compile backend for this "
        "card. Weights are read when a later node first needs them."
    )
    OUTPUT_TOOLTIPS = LoadCogView3Plus.OUTPUT_TOOLTIPS


class LoadStableVideoDiffusion(_Loader):
    PIPELINES = ("StableVideoDiffusionPipeline",)
    DESCRIPTION = (
        "Opens a Stable Video Diffusion folder (diffusers format, safetensors) and chooses precision and compile "
        "backend for this card. Weights are read when a later node first needs them."
    )
    OUTPUT_TOOLTIPS = ("Wire it to NaN Guard, Sample Stable Video Diffusion and Decode Latents.",)
