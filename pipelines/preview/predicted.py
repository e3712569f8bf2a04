"""What a diffusers scheduler takes the finished latents to be, after each of its steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch


def watch(scheduler: Any, seen: Callable[[torch.Tensor], None]) -> None:
    """Have `seen` given the finished latents that a scheduler predicts at each step, in the shape of its samples.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    signature = inspect.signature(step)

    @wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        seen(_finished(scheduler, made, signature.bind(*args, **kwargs).arguments))
        return made

    scheduler.step = stepped


def _finished(scheduler: Any, made: Any, given: Mapping[str, Any]) -> torch.Tensor:
    """made: by its step, as a tuple or an output of diffusers. given: to its step, by name."""
    told = made[1:] if isinstance(made, tuple) else [getattr(made, "pred_original_sample", None)]
    if told and told[0] is not None:
        return told[0]
    if scheduler.config.get("predict_x0"):  # UniPC, which solves for it
        return scheduler.model_outputs[-1]
    sigma = scheduler.sigmas[scheduler.step_index - 1]  # of a flow
    return given["sample"] - sigma * given["model_output"]
