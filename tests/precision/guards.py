"""Guards around small modules, and helpers to compare their results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.guard import GuardPolicy, StageGuard
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport


def report_of(
    precision: str = "fp16",
    model: str = "CogVideoX-5B",
    card: str = "cpu",
    component: Component = Component.DENOISER,
    **more: Any,
) -> RunReport:
    """more: arguments of `choose`."""
    plan = choose(ARCHITECTURES[card], VARIANTS[model], component, Precision(precision), **more)
    return RunReport(model, str(ARCHITECTURES[card]), plan)


def guarded(
    attempt: Callable[..., Any], dtype: str = "fp16", *, report: RunReport | None = None, **more: Any
) -> StageGuard:
    """more: arguments of GuardPolicy and StageGuard."""
    policy = {field.name: more.pop(field.name) for field in fields(GuardPolicy) if field.name in more}
    made = report or report_of(dtype)
    return StageGuard("denoiser", attempt, dtype=dtype, policy=GuardPolicy(**policy), report=made, **more)


def in_fp32(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The first output of a float32 copy of the module."""
    return copy.deepcopy(module).float()(x.float())[0]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error: norm of the difference over the norm of the exact result."""
    return float((found.float() - exact).norm() / exact.norm())


def outcomes(guard: StageGuard) -> list[str]:
    return [step.outcome for step in guard.report.steps]
