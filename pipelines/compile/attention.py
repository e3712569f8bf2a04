"""The attention kernel of a run: named, or measured on this device at the run's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.attention import Choice, attention_calls, measure
from ...precision.dtypes import DTYPES
from ..models.lora import skeleton
from ..weights.components import ComponentStore
from .backends import MEASURED, CompileOptions, uses_torch_attention


def with_attention(
    how: CompileOptions, store: ComponentStore, backend: str, dtype: str, inputs: Mapping[str, Any]
) -> tuple[CompileOptions, str]:
    """The options with a kernel in place of 'measured', and what to say about it.

    inputs: of one call of the denoiser, by keyword. Measured once for each dtype and size, as long as the model lives.
    """
    if how.attention != MEASURED:
        return how, ""
    if not uses_torch_attention(backend):
        return replace(how, attention=""), f"attention: not measured, {backend} has its own"
    sizes = tuple(t.shape for t in pytree.tree_leaves(dict(inputs)) if isinstance(t, torch.Tensor))
    known = store.attention
    if (dtype, sizes) not in known:
        known[dtype, sizes] = _measured(store, dtype, inputs)
    choice = known[dtype, sizes]
    return replace(how, attention=choice.kernel), str(choice)


def _measured(store: ComponentStore, dtype: str, inputs: Mapping[str, Any]) -> Choice:
    """The shapes are those of a denoiser without weights, which computes nothing."""
    denoiser, half = skeleton(store.model), store.model.family.denoiser_inputs

    def without_numbers(name: str, value: Any) -> Any:
        cast = DTYPES[dtype] if name in half else None
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta", cast), value)

    with torch.inference_mode():
        given = {name: without_numbers(name, value) for name, value in inputs.items()}
        torch.nn.Module.to(denoiser, torch.device("meta"), DTYPES[dtype])
        calls = attention_calls(lambda: denoiser(**given))
    return measure(calls, store.placement.device)
