"""The step cache of one run, as its handle and its settings ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...precision.course import Course, Guidance
from ..parallel.group import here

if TYPE_CHECKING:
    from ..run.handle import PipelineHandle


def begun(handle: PipelineHandle, settings: Any) -> Course | None:
    """Return what a run's step cache is counted in; None where every step is computed. settings: SampleSettings.

    Each of several GPUs measures its part of the tokens. They decide by the largest of what they found.
    """
    policy = handle.step_cache
    if policy is None or not policy.error or handle.family.skipped is None:
        return None
    return Course(policy, settings.computed_steps, here().worst)


def guidances(handle: PipelineHandle, settings: Any) -> tuple[Guidance, ...]:
    """Return what guidance multiplies the outputs of a step by, for each denoiser: both halves of a batch, of which the
    first one has the negative prompt, or two calls, of which the first one has the positive prompt."""
    family = handle.family
    scale = settings.scale(family)
    if scale <= 1:
        return ((1.0,),) * len(family.denoisers)
    scales = [scale, settings.guidance_scale_2 or scale][: len(family.denoisers)]
    return tuple((1 - each, each) if family.guidance.calls == 1 else (each, 1 - each) for each in scales)
