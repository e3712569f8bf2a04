"""The step cache of one run, as its handle and its settings ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...precision.step_cache import Course
from ..parallel.group import here

if TYPE_CHECKING:
    from ..run.handle import PipelineHandle


def begun(handle: PipelineHandle, settings: Any) -> Course | None:
    """Return what a run's step cache is counted in; None where every step is computed. settings: SampleSettings.

    Each of several GPUs measures its part of the tokens. They decide by the largest of what they found.
    """
    policy = handle.step_cache
    if policy is None or not policy.error:
        return None
    return Course(policy, settings.computed_steps, _parts(handle, settings), here().worst)


def _parts(handle: PipelineHandle, settings: Any) -> tuple[float, ...]:
    """Return what guidance multiplies the outputs of a step by: both halves of a batch, of which the first one has the
    negative prompt, or two calls, of which the first one has the positive prompt. Where its scale changes in a run,
    the largest one counts."""
    scale = max(settings.scale(handle.family), settings.guidance_scale_2 or 1.0)
    if scale <= 1:
        return (1.0,)
    return (1 - scale, scale) if handle.family.guidance.calls == 1 else (scale, 1 - scale)
