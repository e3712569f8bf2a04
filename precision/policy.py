"""Which dtype each component runs in on which architecture, and why: pure functions over tables."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .arch import Architecture


class Precision(str, Enum):
    """The precision selector's values. They stand in people's workflow files: never rename, add at the end."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP16_PLAIN = "fp16 (plain)"
    FP32 = "fp32"


class Component(str, Enum):
    TEXT_ENCODER = "text_encoder"
    DENOISER = "denoiser"
    VAE_DECODE = "vae_decode"


@dataclass(frozen=True)
class Variant:
    """A model as its authors trained it."""

    name: str
    trained_in: str  # "fp16" or "bf16"
    leaves_fp16: bool  # activations are known to leave fp16's range
    source: str


@dataclass(frozen=True)
class Plan:
    """How one component runs, and why."""

    component: Component
    dtype: str  # "fp16", "bf16" or "fp32"
    guarded: bool  # checked, and rerun in fp32 where it fails
    folded: bool  # its residual stream is scaled into fp16's range
    reason: str
    source: str

    @property
    def half(self) -> bool:
        return self.dtype != "fp32"


_CARD = "https://huggingface.co/zai-org"
VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant("CogVideoX-2B", "fp16", False, f"{_CARD}/CogVideoX-2b"),
        Variant("CogVideoX-5B", "bf16", True, f"{_CARD}/CogVideoX-5b"),
        Variant("CogVideoX-5B-I2V", "bf16", True, f"{_CARD}/CogVideoX-5b-I2V"),
        Variant("CogVideoX-1.5-5B", "bf16", True, f"{_CARD}/CogVideoX1.5-5B"),
        Variant("CogVideoX-1.5-5B-I2V", "bf16", True, f"{_CARD}/CogVideoX1.5-5B-I2V"),
    )
}


def choose(architecture: Architecture, variant: Variant, component: Component, request: Precision) -> Plan:
    """The plan for one component. An unsafe request is honoured in the safe way, and the reason says so."""
    dtype, reason = _automatic(architecture, variant) if request is Precision.AUTO else _asked(architecture, request)
    guarded = dtype != "fp32" and request is not Precision.FP16_PLAIN
    folded = guarded and dtype == "fp16" and component is Component.DENOISER and variant.leaves_fp16
    if folded and request is Precision.FP16:
        reason += f"; {variant.name} overflows plain fp16"
    return Plan(component, dtype, guarded, folded, reason, variant.source)


def _automatic(architecture: Architecture, variant: Variant) -> tuple[str, str]:
    if variant.trained_in == "bf16":
        if architecture.native_bf16:
            return "bf16", f"{variant.name} was trained in bf16, which {architecture} computes natively → bf16"
        if architecture.fast_fp16:
            return "fp16", f"{architecture} has no native bf16 → fp16"
        return "fp32", f"{architecture} has neither native bf16 nor fast fp16 → fp32"
    if architecture.fast_fp16:
        return "fp16", f"{variant.name} was trained in fp16 → fp16"
    return "fp32", f"{variant.name} was trained in fp16, which is slow on {architecture} → fp32"


def _asked(architecture: Architecture, request: Precision) -> tuple[str, str]:
    if request is Precision.FP32:
        return "fp32", "asked for fp32"
    if request is Precision.BF16:
        if architecture.native_bf16:
            return "bf16", "asked for bf16"
        return "bf16", f"asked for bf16, which {architecture} only emulates: slow; 'auto' is faster here"
    if request is Precision.FP16:
        return "fp16", "asked for fp16"
    return "fp16", "asked for fp16 (plain): neither guarded nor made safe, for comparison"
