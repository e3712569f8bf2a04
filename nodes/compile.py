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
        "Sets how OneDiff compiles the denoiser. Pipelines without this node are compiled too, with the loader's "
        "backend. Compiling starts when a step first needs it."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "pipeline": inputs.pipeline(),
                "backend": inputs.choice(
                    (inputs.INHERIT, *inputs.BACKENDS),
                    "inherit: the loader's backend. auto: the first that works here, once compiling pays off. eager: "
                    "not compiled.",
                ),
                "dynamic": inputs.choice(
                    tuple(DYNAMIC),
                    "auto: fine for most. on: one graph for all sizes; compiles longer, but only once. off: one "
                    "graph for each size; fastest if the size never changes.",
                    advanced=True,
                ),
                "mode": inputs.choice(
                    inputs.COMPILE_MODES,
                    "For inductor. max-autotune-no-cudagraphs: tries more kernels, which takes minutes, once.",
                    advanced=True,
                ),
            },
            "optional": {
                "attention": inputs.choice(
                    inputs.ATTENTIONS,
                    "auto: PyTorch's choice; measured, from earlier versions, means the same. The others: that "
                    "kernel, wherever it supports the call. sage must be installed, and rounds more.",
                    advanced=True,
                ),
                "layout": inputs.choice(
                    inputs.LAYOUTS,
                    "Memory layout of 2D convolutions in the UNet and the VAE. channels-last: the layout of tensor "
                    "cores; may be faster and take more memory. auto: unchanged, or channels-last with ComfyUI's "
                    "--force-channels-last.",
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
