"""The node that decodes latents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from . import inputs
from .node import Node
from .stage_node import counted, requested, running, ui

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle


class DecodeLatents(Node):
    """Latents → frames."""

    TITLE = "Decode Latents"
    CATEGORY = inputs.SAMPLE
    SEARCH_ALIASES = ["VAE decode", "tiled decode", "black image", "black video", *inputs.PRECISION_WORDS]
    DESCRIPTION = "Decodes latents to frames with the pipeline's VAE. A NaN or infinite result is recomputed in fp32."
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("images",)
    OUTPUT_TOOLTIPS = ("The frames or images, for Create Video, Save Image or any node that takes images.",)
    FUNCTION = "decode"
    TOGETHER = "chunk"
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        chunk_tip = "Frames or images decoded at once (SVD, CogView); fewer need less memory. 0: all."
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "latents": ("LATENT", {"tooltip": "From a sampler with the same pipeline."}),
                "tiling": inputs.flag(
                    False,
                    "Decode in overlapping tiles: much less memory, slower. Off: tiles are used only if memory "
                    "runs short.",
                ),
                "slicing": inputs.flag(
                    False, "Decode the videos of a batch one at a time: less memory.", advanced=True
                ),
                "precision": inputs.precision(inherit=True),
            },
            "optional": {
                "chunk": inputs.integer(0, 0, 1024, 1, chunk_tip, advanced=True),
                "backend": inputs.choice(
                    inputs.BACKENDS,
                    "How the VAE is compiled. auto: with the pipeline's backend, once that pays off. eager: not "
                    "compiled. The others: with that backend, at once. Full tiles and full chunks share one graph; "
                    "the rest runs uncompiled.",
                    advanced=True,
                ),
            },
            "hidden": inputs.node_id(),
        }

    def decode(
        self,
        pipeline: PipelineHandle,
        latents: dict[str, Any],
        precision: str,
        node_id: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """options: tiling, slicing, chunk and backend, of `decode`."""
        from ..comfyui_host.tagged_tensor import plain
        from ..pipelines.run.decode import decode

        with running(pipeline), host.Progress(0, node_id) as progress:
            images, report = decode(
                pipeline,
                plain(latents["samples"]),
                **options,
                request=requested(precision),
                made_by=latents.get("made_by"),
                progress=counted(progress),
            )
        return {"ui": ui(report, node_id), "result": (images,)}
