"""The catalogue of nodes, from which ComfyUI's two dictionaries are made."""

from __future__ import annotations

from . import cogvideox, cogview, decode, encode, guard, lora, native, probe, report, svd, warm_up
from . import compile as compiling
from .node import Node

NODES: tuple[type[Node], ...] = (
    cogvideox.LoadCogVideoX,
    encode.EncodePrompt,
    guard.NaNGuard,
    cogvideox.SampleCogVideoX,
    decode.DecodeLatents,
    report.PrecisionReport,
    cogvideox.SampleCogVideoXFromImage,
    cogvideox.SampleCogVideoXFromVideo,
    cogview.LoadCogView3Plus,
    cogview.LoadCogView4,
    cogview.SampleCogView,
    svd.LoadStableVideoDiffusion,
    svd.SampleStableVideoDiffusion,
    lora.LoadLoRA,
    probe.NumericsProbe,
    native.NaNGuardModel,
    native.NaNGuardVAE,
    native.NumericsProbeModel,
    compiling.Compile,
    warm_up.WarmUp,
)

NODE_CLASS_MAPPINGS: dict[str, type] = {f"OneDiffGuard{node.__name__}": node for node in NODES}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {key: node.TITLE for key, node in NODE_CLASS_MAPPINGS.items()}
