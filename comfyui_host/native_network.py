"""One of ComfyUI's own networks: its plan, its stage, and the profile of its precision overrides."""

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
from .model_calls import OPAQUE


def comfy_plan(
    component: Component,
    model: str,
    computes_in: torch.dtype,
    architecture: Architecture,
    request: Precision | None = None,
) -> Plan:
    """Return the plan of a stage that ComfyUI runs.

    model: its name in messages. computes_in: the dtype by ComfyUI's settings. request: None for that dtype.

    Raises BadInput if ComfyUI's dtype is not supported, or the device lacks the requested one.
    """
    chosen = dtype_name(computes_in)
    if chosen not in DTYPES:
        raise BadInput(
            "{} computes in {}. The NaN Guard and the Numerics Probe support {}.", model, chosen, ", ".join(DTYPES)
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
    on = "on in every layer: matrix products in scaled fp16, all else in float32"
    switched = decide(architecture, others=present()) if dtype == "fp16" else None  # the others need none
    guard = "on: the NaN Guard's node" if half else "only watching: steps run in fp32 already"
    return Plan(
        component=component,
        dtype=dtype,
        guarded=half and not plain,
        overflow_protection=overflow_protection,
        accumulation=switched.mode.value if switched else "as it is",
        reason=reason,
        source="ComfyUI",
        guard_reason="off: fp16 (plain) is only checked" if plain else guard,
        overflow_protection_reason=on if overflow_protection else "off",
        accumulation_reason=switched.reason_on(architecture) if switched else "ComfyUI's own",
        accumulation_source=switched.source if switched else "ComfyUI",
    )


def _asked(model: str, chosen: str, architecture: Architecture, request: Precision | None) -> tuple[str, str]:
    if request is None:
        return chosen, Message("{} runs in {}, as set in ComfyUI", model, chosen)
    if request is Precision.FP16_PLAIN:
        if chosen != "fp16":
            raise BadInput(
                "ComfyUI runs {} in {} here, so precision 'fp16 (plain)' is not available. Choose 'fp16', which "
                "multiplies in fp16, or start ComfyUI with --fp16-unet.",
                model,
                chosen,
            )
        return "fp16", Message("fp16 (plain), as you chose: no protection, for comparison")
    if request is Precision.BF16 and architecture.bf16 == "none":
        raise BadInput("{} has no bf16, not even emulated. Choose precision 'auto', 'fp16' or 'fp32'.", architecture)
    beside = "" if chosen == request.value else Message("; ComfyUI chose {}", chosen)
    return request.value, Message("{}, as you chose{}", request.value, beside)


def _automatic(model: str, chosen: str, architecture: Architecture) -> tuple[str, str]:
    """Return the dtype of 'auto' and why: native half precision, fp16 with every layer scaled, or ComfyUI's choice."""
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
        return "fp32", Message("fp32 for {}, as set by ComfyUI's start options", model)
    # 3.9 to 4.7 times plain fp16 on a T4, counted: docs/overflow_protection.md
    return "fp16", Message("{} (without the guard, ComfyUI would use fp32: about 4 times slower)", why)


def _best_in_fp16(architecture: Architecture) -> bool:
    return architecture.fast_fp16 and not architecture.native_bf16


_snapshot = partial(Snapshot, opaque=OPAQUE)


@dataclass(frozen=True)
class ComfyNetwork:
    """The network of one guard."""

    model: str  # its name in messages
    component: Component
    network: torch.nn.Module
    dtype: torch.dtype  # the dtype that it computes in
    device: torch.device
    attempt: Callable[..., Any]
    in_full: Callable[..., Any]  # the same, by layers that take float32
    rerun: Callable[..., Any]  # as `in_full`, for the call that counts
    renew: Callable[..., bool] | None = None  # reloads its weights, which may be stale
    fp32_alone: bool = False  # ComfyUI computes it in fp32 on every card
    patched: frozenset[str] = frozenset()  # names of the network's weights that LoRAs and other patches change
    snapshot: Callable[..., Snapshot] = _snapshot  # of a call's arguments and the network
    calls_others: Callable[..., bool] = lambda *_, **__: False  # whether a call runs other packs' code in the network

    def stage(self, policy: GuardPolicy, request: Precision | None = None) -> Stage:
        """Set the network up as a stage. request: None for ComfyUI's choice. Raises BadInput."""
        architecture = verified_architecture(self.device, host.selftest_directory())
        request = None if self.fp32_alone and request is Precision.AUTO else request
        plan = comfy_plan(self.component, self.model, self.dtype, architecture, request)
        return Stage(plan, RunReport(self.model, str(architecture), plan), architecture, policy)


_VALUES = 16  # sampled of each weight


def profile_of(of: ComfyNetwork, architecture: Architecture, dtype: str) -> Profile:
    """Return a profile of a network, without precision overrides."""
    full = {"torch": torch.__version__, "comfyui": host.version() or "none"}
    versions = {package: ".".join(version.split(".")[:2]) for package, version in full.items()}
    name = of.model if of.component is Component.DENOISER else f"{of.model}, {of.component.words}"
    return Profile(shown(name, 300), _fingerprint(of), (), architecture.name, dtype, versions)


def _fingerprint(of: ComfyNetwork) -> str:
    """Return a fingerprint of the structure and of a few values of each weight, so a model with LoRAs has another one
    than without. Quantised weights are left out, and those that LoRAs change: it depends on free memory whether these
    are patched. Compiled parts have the names that they have without a compiler."""
    digest = hashlib.sha256(of.component.value.encode())
    sampled: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, weight in of.network.named_parameters():
        name = path.replace("_orig_mod.", "")
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
