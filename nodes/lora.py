"""The node that adds a LoRA to a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import Message, shown
from . import inputs
from .node import PipelineChange

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class LoadLoRA(PipelineChange):
    """Pipeline → the same pipeline with a LoRA added to its denoiser."""

    TITLE = "Load LoRA"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = ["adapter", "fine-tune", "CogVideoX LoRA", "Wan LoRA", "CogView4 LoRA"]
    DESCRIPTION = (
        "Adds a LoRA to CogVideoX, Wan or CogView4. Several of these nodes in a row add up. The model's weights are "
        "not changed, so nothing is reloaded when you remove this node."
    )
    FUNCTION = "add"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        files = list(host.weight_files("loras")) or [inputs.none_found("loras")]
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "lora": (files, {"tooltip": "A .safetensors file in models/loras, trained on this model."}),
                "strength": inputs.number(  # some need 1/rank, as 0.0039, and pages round to the step's digits
                    1.0, -10.0, 10.0, 0.0001, "1: as trained. 0: no effect."
                ),
            },
            "optional": {
                "transformer": inputs.choice(
                    tuple(inputs.TRANSFORMERS),
                    "For models with two transformers, such as Wan 2.2 A14B. Its LoRAs come in pairs, for high noise "
                    "and for low noise: use a node for each.",
                )
            },
        }

    @classmethod
    def VALIDATE_INPUTS(cls, lora: str | None = None) -> bool | str:
        files = host.weight_files("loras")
        if lora is None or inputs.entry(files, lora):
            return True
        what = "" if inputs.is_none_found(lora) else f" '{shown(lora, 200)}'"
        return translated(
            Message(
                "No LoRA{}. Found: {}. Looked in: {}. Put a .safetensors file there.",
                what,
                ", ".join(files) or "none",
                host.roots_text("loras"),
            )
        )

    @classmethod
    def IS_CHANGED(cls, lora: str, **_: Any) -> str:
        from ..pipelines.models.folder import fingerprint
        from ..pipelines.models.lora_layouts import files_of

        path = inputs.entry(host.weight_files("loras"), lora)
        return " ".join(map(fingerprint, files_of(path))) if path else ""

    def add(
        self, pipeline: PipelineHandle, lora: str, strength: float, transformer: str = "both"
    ) -> tuple[PipelineHandle]:
        from ..pipelines.errors import BadLora
        from ..pipelines.models.lora import Lora
        from ..pipelines.run.handle import add_lora

        path = inputs.entry(host.weight_files("loras"), lora)
        if path is None:
            raise BadLora("LoRA '{}' was not found in {}. Choose another.", shown(lora, 200), host.roots_text("loras"))
        return (add_lora(pipeline, Lora(path, strength, inputs.TRANSFORMERS[transformer])),)
