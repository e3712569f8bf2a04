"""How much room a stage needs on its device beside its weights, counted before the call for which it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.activations import META, ActivationMemoryMode, counting, on_meta, shapes_of
from ...precision.dtypes import DTYPES
from ...precision.fallback import build_half_precision_forward
from ...precision.kernels import LEAN, Kernels, kernels_of
from ...precision.memory import size
from ...precision.overrides import NOTHING, ModuleStructure, PrecisionOverrides
from ...precision.policy import Component
from ...precision.shallow_copy import with_identity_memo
from ...precision.snapshot import copies
from ...precision.step_cache import block_names, with_most_memory
from .quantising import quantised_on_meta

if TYPE_CHECKING:
    from ..run.stage import ComponentStage


def estimate_activation_bytes(
    stage: ComponentStage, inputs: Mapping[str, Any], learned: PrecisionOverrides = NOTHING, cached: int = 0
) -> int:
    """Return the bytes that one call of a stage's component takes, made in the plan's dtype as `learned` asks for.

    inputs: its arguments, of which the shapes and dtypes count.
    cached: how many calls of a step have values in a step cache, which stay on the device; 0: there is none.
    """

    def prepare() -> Callable[[ActivationMemoryMode], object]:
        call = attempt_on_meta(stage, stage.module, stage.anatomy, learned, cached)
        given = on_meta(dict(inputs))
        return lambda _: call(**given)

    return counted(stage, (learned, shapes_of(dict(inputs)), cached), prepare)


def counted(
    stage: ComponentStage, what: Hashable, prepare: Callable[[], Callable[[ActivationMemoryMode], object]]
) -> int:
    """Return the bytes that are made at once by what `prepare` returns, on "meta". The report says where its device has
    no lean kernel for that.

    what: tells a component's calls apart. They are counted once.
    """
    store = stage.handle.store
    key = (stage.name, stage.plan, what, stage.channels_last)
    if key not in store.room:
        store.room[key], lacks = _most(prepare, kernels_of(store.placement.device))
        if lacks:
            store.lacks[key] = (_most(prepare, LEAN)[0], " ".join(lacks))
    if key in store.lacks:
        lean, why = store.lacks[key]
        takes = f"{stage.plan.component.words} takes "
        stage.report.note(
            f"{takes}{size(store.room[key])} beside its weights, where {size(lean)} would do: {why}", instead_of=takes
        )
    return store.room[key]


def _most(
    prepare: Callable[[], Callable[[ActivationMemoryMode], object]], kernels: Kernels
) -> tuple[int, Collection[str]]:
    """Return the most bytes at once, and why they are more than they have to be."""
    call = prepare()
    with counting(kernels) as memory:
        call(memory)
    return memory.most, memory.lacks


def attempt_on_meta(
    stage: ComponentStage,
    network: torch.nn.Module,
    anatomy: ModuleStructure,
    learned: PrecisionOverrides = NOTHING,
    cached: int = 0,
) -> Callable[..., Any]:
    """Return what a stage's guard would call of a network, on "meta". cached: as `estimate_activation_bytes` has it."""
    bare = on_meta(network)
    blocks = block_names(bare, stage.handle.family.cached_blocks) if cached else []

    def kept(run: Any) -> Any:
        return with_most_memory(run, blocks, cached) if blocks else run

    once = stage.handle.family.of_prompt if stage.plan.component is Component.DENOISER else ()
    copying = partial(_copying, bare)
    if not stage.plan.half:
        bare, _ = with_identity_memo(bare, once)
        return copying(kept(stage.in_fp32(bare)))
    wide, whole = stage.plan.wide, stage.plan.component is not Component.DENOISER
    made = build_half_precision_forward(
        bare,
        anatomy,
        learned,
        stage.plan.dtype,
        wide=wide and not whole,
        everything=wide and whole,
        quantised=quantised_on_meta(bare, anatomy, stage.plan),
        device=META,
    )
    if made.everything:
        return copying(kept(made.run))
    run, _ = with_identity_memo(made.run, once)
    return copying(partial(_narrowed, kept(run), stage.inputs, DTYPES[stage.plan.dtype]))


def _copying(network: torch.nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that has copies of what the guard would put back."""

    def made(*args: Any, **kwargs: Any) -> Any:
        before = copies(args, kwargs, network)
        output = call(*args, **kwargs)
        del before
        return output

    return made


def _narrowed(call: Callable[..., Any], names: Collection[str], dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """Make a call with what the guard casts to half precision before."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    narrow = partial(pytree.tree_map_only, torch.Tensor, cast)
    return call(*narrow(args), **{name: narrow(value) if name in names else value for name, value in kwargs.items()})
