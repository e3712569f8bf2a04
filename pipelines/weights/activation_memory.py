"""Estimates the activation memory of a stage's calls, before they run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.activation_estimate import META, ActivationMemoryMode, counting, on_meta, shapes_of
from ...precision.after_failure import HalfPrecisionForward, build_half_precision_forward
from ...precision.dtypes import DTYPES
from ...precision.kernels import kernels_of
from ...precision.machine import first_line
from ...precision.memory import size
from ...precision.overrides import NOTHING, PrecisionOverrides
from ...precision.snapshot import copies
from ..run.feature import CallFeature, DenoiserSetup, Feature, options_of, wrapped

if TYPE_CHECKING:
    from ..run.stage import ComponentStage

logger = logging.getLogger(__name__)


def estimate_activation_bytes(
    setup: DenoiserSetup, learned: PrecisionOverrides = NOTHING, features: Sequence[Feature] = ()
) -> int:
    """Return the activation memory, in bytes, of one call of a stage's component, by the plan and the overrides.

    setup: the calls' setup; only shapes and dtypes of its inputs count. features: of the run.
    """
    stage, inputs = setup.stage, dict(setup.calls[0])
    made = [each for feature in features if (each := feature.on_meta(setup))]

    def prepare() -> Callable[[ActivationMemoryMode], object]:
        call = attempt_on_meta(stage, stage.module, learned, made)
        given = on_meta(inputs)
        return lambda _: call(**given)

    told_apart = (len(setup.calls), stage.report.calls_per_step, stage.shared_by, *(type(each) for each in made))
    return counted(stage, (learned, shapes_of(inputs), told_apart), prepare)


def counted(
    stage: ComponentStage, what: Hashable, prepare: Callable[[], Callable[[ActivationMemoryMode], object]]
) -> int:
    """Return the peak bytes of activations in a call of `prepare`'s result, on "meta"; 0 if it cannot be counted. The
    report says so, and if the device lacks a memory-efficient kernel.

    what: key of the component's call. Each key is counted once.
    """
    store = stage.handle.store
    key = (stage.name, stage.plan, what, stage.channels_last)
    try:
        if key not in store.room:
            call = prepare()
            with counting(kernels_of(store.placement.device)) as memory:
                call(memory)
            store.room[key] = memory.most, " ".join(memory.lacks)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:  # e.g. from a network that reads values
        logger.warning("the memory of %s could not be estimated: %s", stage.name, error, exc_info=True)
        stage.report.note(f"its memory could not be estimated ({first_line(error)})")
        return 0
    n_bytes, why = store.room[key]
    if why:
        takes = f"{stage.plan.component.words} takes "
        stage.report.note(f"{takes}{size(n_bytes)} of activations: {why}", instead_of=takes)
    return n_bytes


def attempt_on_meta(
    stage: ComponentStage,
    network: torch.nn.Module,
    learned: PrecisionOverrides = NOTHING,
    features: Sequence[CallFeature] = (),
) -> Callable[..., Any]:
    """Return the guard's attempt of a network, on "meta". features: of a denoiser's calls, from `Feature.on_meta`."""
    bare = on_meta(network)
    if stage.plan.half:
        options = options_of(features) | stage.numerics
        made = build_half_precision_forward(bare, learned, stage.plan.dtype, device=META, **options)
        made = wrapped(made, features)
        narrowed = partial(_narrowed, made.run, stage.inputs, DTYPES[stage.plan.dtype])
        run = made.run if made.all_layers_scaled else narrowed
    else:
        run = stage.in_fp32(wrapped(HalfPrecisionForward(bare, bare), features).run)

    def call(*args: Any, **kwargs: Any) -> Any:
        before = copies(args, kwargs, bare)  # the guard's copies, to restore after a failure
        output = run(*args, **kwargs)
        del before
        return output

    return call


def _narrowed(call: Callable[..., Any], names: Collection[str], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Make a call with arguments cast to half precision, as the guard does. names: keyword arguments to cast."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    narrow = partial(pytree.tree_map_only, torch.Tensor, cast)
    return call(*narrow(args), **{name: narrow(value) if name in names else value for name, value in kwargs.items()})
