"""One stage of ComfyUI's own models: what a guard guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..precision.policy import Component


@dataclass(frozen=True)
class Stage:
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
