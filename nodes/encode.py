"""The node that encodes prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from . import inputs
from .node import Node
from .sample import samplers_of
from .stage_node import counted, requested, running, ui

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class EncodePrompt(Node):
    """Prompt and negative prompt → CONDITIONING."""

    TITLE = "Encode Prompt"
    CATEGORY = inputs.SAMPLE
    SEARCH_ALIASES = ["T5", "GLM", "text encoder", "CLIP text encode", *inputs.PRECISION_WORDS]
    DESCRIPTION = (
        "Encodes a prompt and a negative prompt with the pipeline's text encoder, which is loaded for this and "
        "offloaded afterwards. Results are cached: a new seed or an earlier prompt loads nothing."
    )
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    RETURN_NAMES = ("positive", "negative")
    OUTPUT_TOOLTIPS = (
        "The encoded prompt. Wire it to a sampler of this category; it does not fit KSampler.",
        "The encoded negative prompt. Wire it to a sampler of this category; it does not fit KSampler.",
    )
    FUNCTION = "encode"
    TOGETHER = True
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        text = {"multiline": True, "default": ""}
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "prompt": (
                    "STRING",
                    text | {"tooltip": "What the video or image shows. Long, concrete prompts work best."},
                ),
                "negative_prompt": ("STRING", text | {"tooltip": "What it should not show. May be empty."}),
                "precision": inputs.precision(inherit=True),
            },
            "hidden": inputs.node_id(),
        }

    def encode(
        self, pipeline: PipelineHandle, prompt: str, negative_prompt: str, precision: str, node_id: str | None = None
    ) -> dict[str, Any]:
        from ..comfyui_host.tagged_tensor import prompt_of
        from ..pipelines.run.encode import encode_prompts

        with running(pipeline):
            with host.Progress(0, node_id) as progress:
                embeddings, report = encode_prompts(
                    pipeline, [prompt, negative_prompt], requested(precision), counted(progress)
                )
            shown = ui(report, node_id, *report.notes)
        of = pipeline.store.model.variant.name, samplers_of(pipeline)
        positive, negative = ([[prompt_of(tensor, *of), {}]] for tensor in embeddings)
        return {"ui": shown, "result": (positive, negative)}
