"""The step cache of one run: as its handle and its settings ask for it, and what its scheduler makes of outputs."""

from __future__ import annotations

import copy
import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.course import Course, Guidance

if TYPE_CHECKING:
    from ..run.handle import PipelineHandle


def begun(handle: PipelineHandle, settings: Any) -> Course | None:
    """Return what a run's step cache is counted in; None where every step is computed. settings: SampleSettings."""
    policy = handle.step_cache
    if policy is None or not policy.error or handle.family.skipped is None:
        return None
    return Course(policy, settings.computed_steps)


def guidances(handle: PipelineHandle, settings: Any) -> tuple[Guidance, ...]:
    """Return what guidance multiplies the outputs of a step by, for each denoiser: both halves of a batch, of which the
    first one has the negative prompt, or two calls, of which the first one has the positive prompt."""
    family = handle.family
    scale = settings.scale(family)
    if scale <= 1:
        return ((1.0,),) * len(family.denoisers)
    scales = [scale, settings.guidance_scale_2 or scale][: len(family.denoisers)]
    return tuple((1 - each, each) if family.guidance.calls == 1 else (each, 1 - each) for each in scales)


def follow(scheduler: Any, course: Course) -> None:
    """Have a run's course told, after each of a scheduler's steps, by how much the new latents change for each unit of
    the denoiser's output, and the new latents.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    signature = inspect.signature(step)
    beside: Any = None  # made at the first step, when the scheduler knows the run's timesteps

    @wraps(step)
    def followed(*args: Any, **kwargs: Any) -> Any:
        nonlocal beside
        beside = beside or Beside(scheduler)
        slope = beside.slope(signature.bind(*args, **kwargs).arguments)
        made = step(*args, **kwargs)
        course.stepped(slope, made[0] if isinstance(made, tuple) else made.prev_sample)
        return made

    scheduler.step = followed


class Beside:
    """A scheduler that takes the steps of another one beside it, of single numbers on the CPU: it waits for no device,
    but once to copy the scheduler's tables. The numbers are not the run's, and need not be, since the steps of all
    samplers here are linear in the output."""

    def __init__(self, scheduler: Any):
        self._timesteps: torch.Tensor = scheduler.timesteps  # of the scheduler: its steps are given parts of them
        own = {name: value for name, value in vars(scheduler).items() if name != "step"}
        self._scheduler = copy.copy(scheduler)
        self._scheduler.__dict__ = copy.deepcopy(pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, own))
        self._draws = "generator" in inspect.signature(type(scheduler).step).parameters

    def slope(self, given: dict[str, Any]) -> float:
        """Take a step. Returns |d latents / d output| of it. given: the arguments of the scheduler's own, by name."""
        shape = [1] * given["sample"].ndim
        mine = {name: self._mine(value, shape) for name, value in given.items()}
        changed = self._tried(copy.deepcopy(self._scheduler), mine, torch.ones(shape))
        return abs(float(changed - self._tried(self._scheduler, mine, torch.zeros(shape))))

    def _mine(self, value: Any, shape: list[int]) -> Any:
        """Return a number in place of the run's tensors, and a timestep by its place among the scheduler's."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.ndim == len(shape):
            return torch.zeros(shape)
        place = value.storage_offset() - self._timesteps.storage_offset()
        if value.data_ptr() == self._timesteps[place : place + 1].data_ptr():
            return self._scheduler.timesteps[place]
        return value.cpu()

    def _tried(self, scheduler: Any, given: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
        """Return what a scheduler makes of an output. Noise is drawn alike."""
        drawn = {"generator": torch.Generator().manual_seed(0)} if self._draws else {}
        made = type(scheduler).step(scheduler, **{**given, **drawn, "model_output": output})
        return made[0] if isinstance(made, tuple) else made.prev_sample
