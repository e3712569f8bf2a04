"""Which dtype each component runs in on which architecture, and why: pure functions over tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ..trust.message import Message, Told, joined
from .accumulation import Accumulation, decide
from .arch import Architecture


class Precision(str, Enum):
    """The precision selector's values. They are saved in users' workflow files: never rename, add at the end."""

    AUTO = "auto"
    BF16 = "bf16"
    FP16 = "fp16"
    FP16_PLAIN = "fp16 (plain)"
    FP32 = "fp32"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def quantises(self) -> bool:
        """Whether it quantises the denoiser's large linear layers; all else is in half precision."""
        return self in (Precision.FP8, Precision.INT8)


class Component(str, Enum):
    """A part of a pipeline with its own plan. Its value is its name in reports."""

    TEXT_ENCODER = "text_encoder"
    IMAGE_ENCODER = "image_encoder"
    VAE_ENCODE = "vae_encode"
    DENOISER = "denoiser"
    VAE_DECODE = "vae_decode"

    @property
    def words(self) -> str:
        return _WORDS[self.value]


_WORDS = {
    "text_encoder": Message("text encoder"),
    "image_encoder": Message("image encoder"),
    "vae_encode": Message("VAE encoder"),
    "denoiser": Message("denoiser"),
    "vae_decode": Message("VAE decoder"),
}


class PlanImpossible(Told, ValueError):
    """A request cannot run; the message says what to choose instead."""


@dataclass(frozen=True)
class Variant:
    """A model as its authors trained it."""

    name: str
    trained_in: str  # "fp16" or "bf16": the dtype that its authors ran it in
    leaves_fp16: bool  # the denoiser's activations are known to overflow fp16
    protected: bool  # in fp16, its denoiser runs with overflow protection from the start
    components: tuple[Component, ...]
    source: str
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the published denoiser, to recognise fine-tunes
    fact: str = ""  # the evidence for its dtype, if it is not its authors' word

    @property
    def said(self) -> str:
        return self.fact or Message("{} was trained in {}", self.name, self.trained_in)


@dataclass(frozen=True)
class Plan:
    """How one component runs, and why."""

    component: Component
    dtype: str  # "fp16", "bf16" or "fp32"
    guarded: bool  # checked, and rerun in fp32 if it fails
    overflow_protection: bool  # every layer scaled: products in half precision, all else in float32
    accumulation: str  # half-precision accumulation in attention: "off", "on", or on with scores in fp32
    reason: str  # of the dtype
    source: str
    guard_reason: str
    overflow_protection_reason: str
    accumulation_reason: str
    accumulation_source: str
    quantised: str = ""  # the format of its large linear layers: "int8", "fp8"; "": not quantised
    quantised_reason: str = ""  # "" without a request to quantise
    fp16_sums: bool = False  # fp16 products accumulate in fp16, if the first step shows that to be accurate
    fp16_sums_reason: str = ""  # "" without a request

    @property
    def half(self) -> bool:
        return self.dtype != "fp32"

    @property
    def numerics(self) -> str:
        """The part of the plan that changes the computed numbers: "int8", "fp8", or the dtype."""
        return self.quantised or self.dtype

    @property
    def unquantised(self) -> Plan:
        """The same plan without quantisation."""
        return replace(self, quantised="", quantised_reason="")


def as_stored(variant: Variant, stored_dtype: str) -> Variant:
    """Return the variant corrected by its stored weights: a fine-tune may have been trained in another dtype.

    stored_dtype: safetensors' name, "F16", "BF16" or "F32". Weights in bf16 are evidence of training in bf16, so that
        activations may overflow fp16. Weights in fp16 are no evidence against it, since converting does not change
        activations; weights in fp32 say nothing.
    """
    if variant.trained_in == "fp16" and stored_dtype == "BF16":
        fact = Message("{}, but these weights are stored in bf16: a fine-tune trained in bf16", variant.said)
        return replace(variant, trained_in="bf16", leaves_fp16=True, fact=fact)
    return variant


def choose(
    architecture: Architecture,
    variant: Variant,
    component: Component,
    request: Precision,
    accumulation: Accumulation = Accumulation.AUTO,
    beside: Iterable[Architecture] = (),
) -> Plan:
    """Return the plan for one component. An unsafe request is honoured in the safe way, and the reasons say so.

    beside: the architectures of other devices that this process computes on.

    Raises PlanImpossible if the variant has no such component, or the device no such dtype.
    """
    if component not in variant.components:
        has = joined(", ", (part.words for part in variant.components))
        raise PlanImpossible("{} has no {}. It has: {}.", variant.name, component.words, has)
    if request is Precision.BF16 and architecture.bf16 == "none":
        raise PlanImpossible(
            "{} has no bf16, not even emulated. Choose precision 'auto', 'fp16' or 'fp32'.", architecture
        )
    if request.quantises and request.value not in architecture.quantises:
        raise PlanImpossible(_not_quantised(architecture, request))
    dtype, reason = _dtype(architecture, variant, request)
    guarded, guard_reason = _guard(variant, dtype, request)
    protects, overflow_protection_reason = _overflow_protection(variant, component, dtype, request)
    quantised, quantised_reason = _quantised(component, dtype, request)
    sums, sums_reason = _fp16_sums(architecture, component, dtype, request, accumulation)
    switched = decide(architecture, accumulation, beside)
    return Plan(
        component=component,
        dtype=dtype,
        guarded=guarded,
        overflow_protection=protects,
        accumulation=switched.mode.value,
        reason=reason,
        source=variant.source,
        guard_reason=guard_reason,
        overflow_protection_reason=overflow_protection_reason,
        accumulation_reason=switched.reason_on(architecture),
        accumulation_source=switched.source,
        quantised=quantised,
        quantised_reason=quantised_reason,
        fp16_sums=sums,
        fp16_sums_reason=sums_reason,
    )


def unless_failed(architecture: Architecture, dtype: str, reason: str) -> tuple[str, str]:
    """Return the dtype that 'auto' takes in place of one, and why: the same unless the card's self-test found it wrong,
    else the next best, and fp32 if all are wrong."""
    has = ("bf16", architecture.native_bf16), ("fp16", architecture.fast_fp16)
    right = [other for other, is_there in has if is_there and other not in architecture.failed]
    taken = dtype if dtype not in architecture.failed else (*right, "fp32")[0]
    why = reason if taken == dtype else Message("{}, since {}", taken, failure(architecture, dtype))
    return taken, with_failure(architecture, taken, why)


def with_failure(architecture: Architecture, dtype: str, reason: str) -> str:
    """Return the reason for a requested dtype, with its failure in the card's self-test, if any."""
    return Message("{}, but {}", reason, failure(architecture, dtype)) if dtype in architecture.failed else reason


def failure(architecture: Architecture, what: str) -> str:
    """Say that the card's self-test found a dtype or a compiler wrong."""
    return Message("{} failed this card's self-test of {}", what, architecture.tested)


def _dtype(architecture: Architecture, variant: Variant, request: Precision) -> tuple[str, str]:
    if request is Precision.AUTO:
        return unless_failed(architecture, *_automatic(architecture, variant))
    dtype, reason = _asked(architecture, variant, request)
    return dtype, with_failure(architecture, dtype, reason)


def _automatic(architecture: Architecture, variant: Variant) -> tuple[str, str]:
    if variant.trained_in == "bf16":
        if architecture.native_bf16:
            return "bf16", Message("bf16, since {}, which {} computes natively", variant.said, architecture)
        if architecture.fast_fp16:
            return "fp16", Message("fp16, since {} has no native bf16", architecture)
        return "fp32", Message("fp32, since {} has neither native bf16 nor fast fp16", architecture)
    if architecture.fast_fp16:
        return "fp16", Message("fp16, since {}", variant.said)
    return "fp32", Message("fp32, since {}, which {} on {}", variant.said, _in_fp16(architecture), architecture)


def _asked(architecture: Architecture, variant: Variant, request: Precision) -> tuple[str, str]:
    if request is Precision.FP32:
        return "fp32", Message("fp32, as you chose")
    if request.quantises:
        return "bf16", Message(
            "{}, as you chose: the denoiser's large linear layers multiply in it, all else is bf16", request.value
        )
    if request is Precision.BF16:
        reason = Message("bf16, as you chose")
        if not architecture.native_bf16:
            reason += Message(", which {} only emulates: slow, with more memory; 'auto' is faster here", architecture)
        elif variant.trained_in == "fp16":
            reason += Message("; {}, which has 3 more bits: 'auto' is closer to fp32", variant.said)
        return "bf16", reason
    if request is Precision.FP16_PLAIN:
        return "fp16", Message("fp16 (plain), as you chose: no protection, for comparison")
    reason = Message("fp16, as you chose")
    if not architecture.fast_fp16:
        reason += Message(" (which {} on {})", _in_fp16(architecture), architecture)
    return "fp16", Message("{}; {} overflows plain fp16", reason, variant.name) if variant.leaves_fp16 else reason


def _in_fp16(architecture: Architecture) -> str:
    """Say how fp16 performs on an architecture without fast fp16."""
    return Message("gives wrong results") if architecture.fp16_wrong else Message("is slow")


def _guard(variant: Variant, dtype: str, request: Precision) -> tuple[bool, str]:
    if dtype == "fp32":
        return False, "not needed: steps run in fp32 already; NaN or infinite values end the run"
    if request is Precision.FP16_PLAIN:
        return False, "off: fp16 (plain) is only checked"
    if dtype == "bf16":
        return True, "on: bf16 has fp32's range, so reruns are not expected; the check costs almost nothing"
    if variant.leaves_fp16:
        return True, f"on, and needed: {variant.name} leaves fp16's range"
    return True, f"on: a LoRA or a prompt can push {variant.name} out of fp16's range"


def _overflow_protection(variant: Variant, component: Component, dtype: str, request: Precision) -> tuple[bool, str]:
    if dtype != "fp16":
        return False, f"off{' until a call fails' * (dtype == 'bf16')}: {dtype} has enough range"
    if request is Precision.FP16_PLAIN:
        return False, "off: fp16 (plain) has none"
    if component in (Component.IMAGE_ENCODER, Component.VAE_DECODE):
        return False, "off: the guard is enough here"
    if component is Component.DENOISER and not variant.protected:
        return False, "off: the model was trained in fp16, so the guard is enough"
    return True, "on in every layer: matrix products in scaled fp16, all else in float32"


def _quantised(component: Component, dtype: str, request: Precision) -> tuple[str, str]:
    """Decide the format of quantised linear layers. All else is bf16: every card that can quantise has it natively, it
    needs no overflow protection, and torchao's fp8 accepts nothing else. In fp16, its int8 product may overflow, since
    the weight's scale comes last."""
    if not request.quantises:
        return "", ""
    if component is not Component.DENOISER:
        return "", f"nothing: {request.value} is for the denoiser, and the {component.words} is {dtype}"
    how = "one scale per row of inputs and weights, computed in each call; the half-precision weights stay for reruns"
    return request.value, f"the large linear layers of its blocks, to {request.value}: {how}"


def _fp16_sums(
    architecture: Architecture, component: Component, dtype: str, request: Precision, accumulation: Accumulation
) -> tuple[bool, str]:
    """Decide whether fp16 products may accumulate in fp16. It costs digits, so only if it can gain speed."""
    if accumulation is not Accumulation.FP16 or component is not Component.DENOISER:
        return False, ""
    if dtype != "fp16":
        return False, f"off: {dtype} products always accumulate in fp32; it needs precision 'fp16'"
    if request is Precision.FP16_PLAIN:
        return False, "off: fp16 (plain) is not checked"
    if architecture.fp16_sums == "same":
        return False, f"off: it is faster only on GeForce RTX, and this is {architecture}"
    return True, "on if the first step is accurate with it; GeForce cards multiply twice as fast"


def _not_quantised(architecture: Architecture, request: Precision) -> str:
    """Say why linear layers are not quantised on an architecture, and what to choose."""
    takes, instead = {
        Precision.FP8: (
            Message("an RTX 40 or 50, L4, H100 or B200 (compute capability 8.9 or newer)"),
            "'auto', or 'int8' from compute capability 8.0 on",
        ),
        Precision.INT8: (
            Message(
                "an RTX 30, 40 or 50, A100, H100 or B200 (compute capability 8.0 or newer), or a CPU that has bf16"
            ),
            "'auto'",
        ),
    }[request]
    return Message("{} needs {}; this is {}. Choose precision {}.", request.value, takes, architecture, instead)
