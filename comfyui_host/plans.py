"""What ComfyUI's own models compute in: what ComfyUI chose, or what the guard's user asks for; and why."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ..precision.accumulation import decide
from ..precision.arch import Architecture, present
from ..precision.dtypes import DTYPES, dtype_name
from ..precision.policy import Component, Plan, Precision, unless_failed, with_failure
from ..trust.message import BadInput, Message


def comfy_plan(
    component: Component,
    model: str,
    computes_in: torch.dtype,
    architecture: Architecture,
    request: Precision | None = None,
) -> Plan:
    """The plan of a stage that ComfyUI runs.

    model: its name, for people. computes_in: by ComfyUI's settings. request: None for that.

    Raises BadInput where ComfyUI computes in something that is none of ours, or the device has no such dtype.
    """
    chosen = dtype_name(computes_in)
    if chosen not in DTYPES:
        raise BadInput(
            "{} computes in {}. The NaN Guard and the Numerics Probe know {}.", model, chosen, ", ".join(DTYPES)
        )
    dtype, reason = _dtype(model, chosen, architecture, request)
    by_us = request is Precision.AUTO and (_best_in_fp16(architecture) or dtype != chosen)
    ours = request is Precision.FP16 or by_us
    wide = dtype == "fp16" and ours
    plain = request is Precision.FP16_PLAIN
    half = dtype != "fp32"
    switched = decide(architecture, others=present()) if dtype == "fp16" else None  # the others need none
    guard = "on: the NaN Guard's node" if half else "only watching: fp32 is what it would rerun in"
    return Plan(
        component=component,
        dtype=dtype,
        guarded=half and not plain,
        wide=wide,
        accumulation=switched.mode.value if switched else "as it is",
        reason=reason,
        source="ComfyUI",
        guard_reason="off: asked for fp16 (plain), only watched" if plain else guard,
        wide_reason="every layer: products in fp16, scaled to fit, and all else in float32" if wide else "nothing",
        accumulation_reason=switched.reason_on(architecture) if switched else "ComfyUI's own",
        accumulation_source=switched.source if switched else "ComfyUI",
    )


def _dtype(model: str, chosen: str, architecture: Architecture, request: Precision | None) -> tuple[str, str]:
    if request is Precision.AUTO:
        return unless_failed(architecture, *_automatic(model, chosen, architecture))
    dtype, reason = _asked(model, chosen, architecture, request)
    return dtype, with_failure(architecture, dtype, reason)


def _asked(model: str, chosen: str, architecture: Architecture, request: Precision | None) -> tuple[str, str]:
    if request is None:
        return chosen, Message("{} computes in {} here, by ComfyUI's settings", model, chosen)
    if request is Precision.FP16_PLAIN:
        if chosen != "fp16":
            raise BadInput(
                "ComfyUI computes {} in {} here, so there is no plain fp16 of it to compare with. Choose precision "
                "'fp16', which computes its products in fp16, or start ComfyUI with --fp16-unet.",
                model,
                chosen,
            )
        return "fp16", Message("asked for fp16 (plain): neither guarded nor made safe, for comparison")
    if request is Precision.BF16 and architecture.bf16 == "none":
        raise BadInput("{} has no bf16, not even emulated. Choose precision 'auto', 'fp16' or 'fp32'.", architecture)
    beside = "" if chosen == request.value else Message("; ComfyUI chose {}", chosen)
    return request.value, Message("asked for {}{}", request.value, beside)


def _automatic(model: str, chosen: str, architecture: Architecture) -> tuple[str, str]:
    """Half precision that the card computes natively, or fp16 that every layer keeps in range."""
    if chosen == "bf16" and architecture.native_bf16:
        return "bf16", Message("{} computes bf16 natively, which ComfyUI chose for {} → bf16", architecture, model)
    if not _best_in_fp16(architecture):
        lacks = "" if architecture.fast_fp16 else Message(", and {} has no fast fp16", architecture)
        return chosen, Message("ComfyUI chose {} for {}{} → {}", chosen, model, lacks, chosen)
    if chosen == "fp32" and _fp32_is_asked_for():
        return "fp32", Message("ComfyUI was started with fp32 for {} → fp32", model)
    return "fp16", Message("{} has no native bf16 → fp16", architecture)


def _best_in_fp16(architecture: Architecture) -> bool:
    return architecture.fast_fp16 and not architecture.native_bf16


def _fp32_is_asked_for() -> bool:
    options: Any = getattr(sys.modules.get("comfy.cli_args"), "args", None)
    return any(getattr(options, name, False) for name in ("force_fp32", "fp32_unet"))
