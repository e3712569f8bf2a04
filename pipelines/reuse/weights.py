"""What a diffusers scheduler makes of a denoiser's output, in numbers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def weigh(scheduler: Any, stepped: Callable[[float], None]) -> None:
    """Have `stepped` told, after each of a scheduler's steps, by how much the new latents change for each unit of the
    denoiser's output, in parts of the latents' norm.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    signature = inspect.signature(step)

    @wraps(step)
    def weighed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        slope = slope_of(scheduler, given)
        made = step(*args, **kwargs)
        latents = made[0] if isinstance(made, tuple) else made.prev_sample
        stepped(float(slope / latents.norm()))
        return made

    scheduler.step = weighed


def slope_of(scheduler: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return |d latents / d output| of one step, which is the same for each value: the steps of all samplers here are
    linear in the output. given: the step's arguments, by name."""
    return (_latents(scheduler, given, 1.0) - _latents(scheduler, given, 0.0)).abs().mean()


def _latents(scheduler: Any, given: dict[str, Any], output: float) -> torch.Tensor:
    """Return what a copy of the scheduler makes of an output that is the same everywhere. Noise is drawn alike."""
    tried = copy.deepcopy(scheduler)
    takes = "generator" in inspect.signature(type(scheduler).step).parameters
    drawn = {"generator": torch.Generator().manual_seed(0)} if takes else {}
    made = type(scheduler).step(
        tried, **{**given, **drawn, "model_output": torch.full_like(given["model_output"], output)}
    )
    return made[0] if isinstance(made, tuple) else made.prev_sample
