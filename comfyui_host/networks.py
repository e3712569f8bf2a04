"""One of ComfyUI's own networks: how it is called, and a stage made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..precision.guard import GuardPolicy
from ..precision.policy import Component, Precision
from ..precision.report import RunReport
from ..precision.self_test import verified_architecture
from ..precision.snapshot import Snapshot
from ..precision.stage import Stage
from .host import selftest_directory
from .memory import OPAQUE
from .plans import comfy_plan

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
    patched: frozenset[str] = frozenset()  # names of the network's weights that LoRAs and their kind change
    snapshot: Callable[..., Snapshot] = _snapshot  # of what a call is given, and of the network

    def stage(self, policy: GuardPolicy, request: Precision | None = None) -> Stage:
        """It, set up to compute as is asked. request: None for what ComfyUI chose. Raises BadInput."""
        architecture = verified_architecture(self.device, selftest_directory())
        plan = comfy_plan(self.component, self.model, self.dtype, architecture, request)
        return Stage(plan, RunReport(self.model, str(architecture), plan), architecture, policy)
