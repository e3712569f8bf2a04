"""What a step cache asks of a diffusers scheduler: what it makes of a denoiser's output, in numbers, and to take steps
again with better outputs."""

from __future__ import annotations

import copy
import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ...precision.course import Course

_BEFORE = "old_pred_original_sample"  # of the step before: CogVideoX's DPM leaves it to the pipeline


def follow(scheduler: Any, course: Course) -> None:
    """Have a run's course told, after each of a scheduler's steps, by how much the new latents change for each unit of
    the denoiser's output, in parts of the latents' norm. Where a comparison finds what cached steps were off by, they
    are taken again without it, from the latents before them, and the compared step goes on from there.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    signature = inspect.signature(step)
    cached = _Steps()

    @wraps(step)
    def followed(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if course.reuses:
            cached.add(scheduler, given)
        else:
            if cached and (missed := course.take_back()):
                given = {**given, **cached.again(scheduler, missed)}
            cached.clear()
        slope = slope_of(scheduler, given)
        made = step(**given)
        course.stepped(float(slope / _latents(made).norm()))
        return made

    scheduler.step = followed


class _Steps:
    """Steps in a row, and what it takes to take them again."""

    def __init__(self) -> None:
        self._given: list[dict[str, Any]] = []  # to a scheduler's `step`
        self._scheduler: Any = None  # as it was before them
        self._noise: Any = None

    def __bool__(self) -> bool:
        return bool(self._given)

    def add(self, scheduler: Any, given: dict[str, Any]) -> None:
        """Note a step that is about to be taken."""
        if not self._given:
            self._scheduler = copy.deepcopy(scheduler)
            self._noise = _state(given)
        self._given.append(dict(given))

    def again(self, scheduler: Any, missed: Iterable[torch.Tensor]) -> dict[str, Any]:
        """Take them again, with the same noise, and have the scheduler as it is after them. Returns what they leave to
        the next one, by the names of its arguments.

        missed: what to take away from the denoiser's output, of each.
        """
        kind, tried = type(scheduler), self._scheduler
        if self._noise is not None:
            self._given[0]["generator"].set_state(self._noise)
        left: dict[str, Any] = {}
        for given, off in zip(self._given, missed, strict=True):
            output = given["model_output"]
            better = (output.float() - off).to(output.dtype)
            made = kind.step(tried, **{**given, **left, "model_output": better})
            left = {"sample": _latents(made)} | ({_BEFORE: made[1]} if _BEFORE in given else {})
        vars(scheduler).update({name: value for name, value in vars(tried).items() if name != "step"})
        return left

    def clear(self) -> None:
        self._given.clear()


def _state(given: dict[str, Any]) -> torch.Tensor | None:
    generator = given.get("generator")
    return generator.get_state() if isinstance(generator, torch.Generator) else None


def slope_of(scheduler: Any, given: dict[str, Any]) -> torch.Tensor:
    """Return |d latents / d output| of one step, which is the same for each value: the steps of all samplers here are
    linear in the output. given: the step's arguments, by name."""
    return (_tried(scheduler, given, 1.0) - _tried(scheduler, given, 0.0)).abs().mean()


def _tried(scheduler: Any, given: dict[str, Any], output: float) -> torch.Tensor:
    """Return what a copy of the scheduler makes of an output that is the same everywhere. Noise is drawn alike."""
    tried = copy.deepcopy(scheduler)
    takes = "generator" in inspect.signature(type(scheduler).step).parameters
    drawn = {"generator": torch.Generator().manual_seed(0)} if takes else {}
    made = type(scheduler).step(
        tried, **{**given, **drawn, "model_output": torch.full_like(given["model_output"], output)}
    )
    return _latents(made)


def _latents(made: Any) -> torch.Tensor:
    return made[0] if isinstance(made, tuple) else made.prev_sample
