"""The node that sets how a pipeline is compiled, its attention kernel, and the memory layout of its convolutions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from . import inputs
from .node import PipelineChange

if TYPE_CHECKING:
    from ..pipelines.run.handle import PipelineHandle

DYNAMIC = {"auto": None, "on": True, "off": False}  # the names are saved in users' workflow files


class Compile(PipelineChange):
    """Pipeline → the same pipeline with other compile options."""

    TITLE = "OneDiff Compile"
    CATEGORY = inputs.LOAD
    SEARCH_ALIASES = ["torch.compile", "inductor", "OneFlow", "nexfort", "speed up", "attention"]
    DESCRIPTION = (
        "Says how OneDiff compiles the denoiser. Pipelines are compiled without this node too, as their loader's "
        "backend says; it is here to change how. Nothing is compiled before a step needs it."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "backend": inputs.choice(
                    (inputs.INHERIT, *inputs.BACKENDS),
                    "inherit: as the loader says. auto: the first that works here, where compiling pays. eager: not "
                    "compiled.",
                ),
                "dynamic": inputs.choice(
                    tuple(DYNAMIC),
                    "auto: fine for most. on: one graph for all sizes; takes longer to compile, once. off: one "
                    "graph for each size; fastest if the size never changes.",
                    advanced=True,
                ),
                "mode": inputs.choice(
                    inputs.COMPILE_MODES,
                    "inductor's. max-autotune-no-cudagraphs: tries more kernels, which takes minutes, once.",
                    advanced=True,
                ),
            },
            "optional": {
                "attention": inputs.choice(
                    inputs.ATTENTIONS,
                    "auto: PyTorch's own choice; measured, of earlier versions, is the same. The others: that one, "
                    "wherever it takes the call. sage has to be installed, and rounds more.",
                    advanced=True,
                ),
                "layout": inputs.choice(
                    inputs.LAYOUTS,
                    "Of 2D convolutions, in the UNet and the VAE. channels-last: as tensor cores compute them; may "
                    "be faster and take more memory. auto: as they were read, or as ComfyUI's "
                    "--force-channels-last says.",
                    advanced=True,
                ),
            },
        }

    def apply(
        self,
        pipeline: PipelineHandle,
        backend: str,
        dynamic: str,
        mode: str,
        attention: str = inputs.ATTENTIONS[0],
        layout: str = inputs.LAYOUTS[0],
    ) -> tuple[PipelineHandle]:
        from ..pipelines.compile.backends import CompileOptions, check_attention, choose_backend

        placement = pipeline.store.placement
        kernel = "" if attention in inputs.ATTENTIONS[:2] else attention
        check_attention(kernel, placement.device)
        chosen = pipeline.backend if backend == inputs.INHERIT else choose_backend(backend, placement.device)
        channels_last = placement.channels_last or layout != inputs.LAYOUTS[0]
        options = CompileOptions(DYNAMIC[dynamic], mode, kernel, channels_last)
        return (replace(pipeline, backend=chosen, compile_options=options),)
