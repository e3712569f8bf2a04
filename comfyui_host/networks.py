"""One of ComfyUI's own networks: what it computes in, its stage, and the profile of its precision overrides."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..precision.accumulation import decide
from ..precision.arch import Architecture, present
from ..precision.dtypes import DTYPES, dtype_name
from ..precision.guard import GuardPolicy, Stage
from ..precision.overrides import Profile
from ..precision.policy import Component, Plan, Precision, unless_failed, with_failure
from ..precision.report import RunReport
from ..precision.self_test import verified_architecture
from ..precision.snapshot import Snapshot
from ..trust.message import BadInput, Message, shown
from . import host
from .calls import OPAQUE


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
    if request is Precision.AUTO:
        dtype, reason = unless_failed(architecture, *_automatic(model, chosen, architecture))
    else:
        dtype, asked = _asked(model, chosen, architecture, request)
        reason = with_failure(architecture, dtype, asked)
    by_us = request is Precision.AUTO and (_best_in_fp16(architecture) or dtype != chosen)
    ours = request is Precision.FP16 or by_us
    overflow_protection = dtype == "fp16" and ours
    plain = request is Precision.FP16_PLAIN
    half = dtype != "fp32"
    on = "on in every layer: products in fp16, scaled to fit, and all else in float32"
    switched = decide(architecture, others=present()) if dtype == "fp16" else None  # the others need none
    guard = "on: the NaN Guard's node" if half else "only watching: fp32 is what it would recompute a step in"
    return Plan(
        component=component,
        dtype=dtype,
        guarded=half and not plain,
        overflow_protection=overflow_protection,
        accumulation=switched.mode.value if switched else "as it is",
        reason=reason,
        source="ComfyUI",
        guard_reason="off: fp16 (plain) is only watched" if plain else guard,
        overflow_protection_reason=on if overflow_protection else "off",
        accumulation_reason=switched.reason_on(architecture) if switched else "ComfyUI's own",
        accumulation_source=switched.source if switched else "ComfyUI",
    )


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
        return "fp16", Message("fp16 (plain), as you chose: no protection, for comparison")
    if request is Precision.BF16 and architecture.bf16 == "none":
        raise BadInput("{} has no bf16, not even emulated. Choose precision 'auto', 'fp16' or 'fp32'.", architecture)
    beside = "" if chosen == request.value else Message("; ComfyUI chose {}", chosen)
    return request.value, Message("{}, as you chose{}", request.value, beside)


def _automatic(model: str, chosen: str, architecture: Architecture) -> tuple[str, str]:
    """Half precision that the card computes natively, or fp16 that every layer keeps in range."""
    if chosen == "bf16" and architecture.native_bf16:
        return "bf16", Message("bf16, which ComfyUI chose for {} and {} computes natively", model, architecture)
    if not _best_in_fp16(architecture):
        lacks = "" if architecture.fast_fp16 else Message(", and {} has no fast fp16", architecture)
        return chosen, Message("{}, which ComfyUI chose for {}{}", chosen, model, lacks)
    why = Message("fp16, since {} has no native bf16", architecture)
    if chosen != "fp32":
        return "fp16", why
    options = host.arguments()
    if any(getattr(options, name, False) for name in ("force_fp32", "fp32_unet")):
        return "fp32", Message("fp32 for {}, as ComfyUI's start options say", model)
    # 3.9 to 4.7 times plain fp16 on a T4, counted: docs/overflow_protection.md
    return "fp16", Message("{} (ComfyUI alone would compute it in fp32, about 4 times as long)", why)


def _best_in_fp16(architecture: Architecture) -> bool:
    return architecture.fast_fp16 and not architecture.native_bf16


_snapshot = partial(Snapshot, opaque=OPAQUE)


@dataclass(frozen=True)
class ComfyNetwork:
    """What one guard guards."""

    model: str  # its name, for people
    component: Component
    network: torch.nn.Module
    dtype: torch.dtype  # it computes in
    device: torch.device
    attempt: Callable[..., Any]
    in_full: Callable[..., Any]  # the same, such that it can be in float32, or in part
    rerun: Callable[..., Any]  # the same, and it is the call that counts
    renew: Callable[..., bool] | None = None  # has its weights loaded anew, where they may be stale
    fp32_alone: bool = False  # ComfyUI computes it in nothing less, on any card
    patched: frozenset[str] = frozenset()  # names of the network's weights that LoRAs and their kind change
    snapshot: Callable[..., Snapshot] = _snapshot  # of what a call is given, and of the network
    calls_others: Callable[..., bool] = lambda *_, **__: False  # whether a call runs other packs' code amid the network

    def stage(self, policy: GuardPolicy, request: Precision | None = None) -> Stage:
        """It, set up to compute as is asked. request: None for what ComfyUI chose. Raises BadInput."""
        architecture = verified_architecture(self.device, host.selftest_directory())
        request = None if self.fp32_alone and request is Precision.AUTO else request
        plan = comfy_plan(self.component, self.model, self.dtype, architecture, request)
        return Stage(plan, RunReport(self.model, str(architecture), plan), architecture, policy)


_VALUES = 16  # of each weight


def profile_of(of: ComfyNetwork, architecture: Architecture, dtype: str) -> Profile:
    """The profile of a network of which nothing is known yet."""
    full = {"torch": torch.__version__, "comfyui": host.version() or "none"}
    versions = {package: ".".join(version.split(".")[:2]) for package, version in full.items()}
    name = of.model if of.component is Component.DENOISER else f"{of.model}, {of.component.words}"
    return Profile(shown(name, 300), _fingerprint(of), (), architecture.name, dtype, versions)


def _fingerprint(of: ComfyNetwork) -> str:
    """A fingerprint of the structure, and of a few values of each weight: not of quantised ones, nor of those that
    LoRAs change, which are what they were or not, as there is room. So a model with LoRAs is another one than without.
    """
    digest = hashlib.sha256(of.component.value.encode())
    sampled: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, weight in of.network.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {name in of.patched};".encode())
        if type(weight.data) is torch.Tensor and not weight.is_meta and name not in of.patched:
            sampled.setdefault(weight.device, {})[name] = weight.detach().flatten()[:_VALUES].float()
    values: dict[str, bytes] = {}
    for here in sampled.values():
        parts = torch.cat([*here.values()]).cpu().split([*map(len, here.values())])
        values |= {name: part.numpy().tobytes() for name, part in zip(here, parts, strict=True)}
    for name in sorted(values):
        digest.update(values[name])
    return digest.hexdigest()[:32]
