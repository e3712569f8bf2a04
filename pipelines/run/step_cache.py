"""The step cache of one run, as its handle and settings ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...precision.step_cache import GuidanceWeights, StepCache, StepCacheController, block_names
from ..parallel.group import here

if TYPE_CHECKING:
    from .handle import PipelineHandle
    from .stage import ComponentStage


def make_step_cache_controller(handle: PipelineHandle, settings: Any) -> StepCacheController | None:
    """Return the controller of a run's step cache; None where every step is computed. settings: SampleSettings."""
    policy = handle.step_cache
    if policy is None or not policy.error or not handle.family.cached_blocks:
        return None
    return StepCacheController(policy, settings.computed_steps)


def guidance_weights(handle: PipelineHandle, settings: Any) -> tuple[GuidanceWeights, ...]:
    """Return what guidance multiplies the outputs of a step by, for each denoiser: both halves of a batch, of which the
    first one has the negative prompt, or two calls, of which the first one has the positive prompt."""
    family = handle.family
    scale = settings.scale(family)
    if scale <= 1:
        return ((1.0,),) * len(family.denoisers)
    scales = [scale, settings.guidance_scale_2 or scale][: len(family.denoisers)]
    return tuple((1 - each, each) if family.guidance.calls == 1 else (each, 1 - each) for each in scales)


def make_step_cache(stage: ComponentStage) -> StepCache | None:
    """Return a new cache for a denoiser in a run; None where nothing is cached."""
    family, context, sharing = stage.handle.family, stage.context, stage.sharing
    if stage.cache_controller is None:
        return None
    blocks = block_names(stage.module, family.cached_blocks)
    if not blocks:
        stage.report.note("no step is cached: the denoiser has nothing that a cached step could leave out")
        return None

    def own_share(hidden: torch.Tensor) -> torch.Tensor:
        if context.alone or family.context is None:
            return hidden
        from ..parallel.exchange import share_of

        return share_of(hidden, family.context.first[family.context.picture], context)

    def of_both_halves(made: torch.Tensor) -> torch.Tensor:
        if not sharing.halves:
            return made
        from ..parallel.exchange import from_each

        return torch.cat(from_each(made, sharing.first_of_halves, here()))

    return StepCache(blocks, stage.cache_controller, stage.guidance_weights, own_share, of_both_halves)
