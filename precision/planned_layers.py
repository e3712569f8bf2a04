"""Planned layers: a network whose layers follow its plan themselves, without a mode, so that a compiler can trace it.

A layer with room multiplies in fp16 and returns fp16. Any other divides its input by a constant power of two and
multiplies into float32; where a constant does not do, each row has its own scale. Norms, and sums and products of two
tensors, are float32. Scales are tensors, so that blocks share one graph.

It is for blocks that compute by layers, norms, attention, activations, sums and products, as those of the families here
do. A root, a softmax or a matrix product that a block writes out would stay fp16, and a sigmoid would hide infinity.

A value beyond the plan's range becomes infinite, and stays infinite or becomes NaN up to the output, where the guard
sees it. What could hide that is made NaN row by row, which compiled code does at no extra pass: rows that are too small
for fp16, rows that underflow when they are scaled, and queries and keys that are infinite.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from .dtypes import FP16_MAX, HALF_DTYPES
from .fp16_safe import CASTS, COPIES, FP16, KEEPS_RANGE, NO_MATH
from .learned_scales import LayerPeaks, choose_scale, widened
from .overrides import covered, covers, outermost
from .planned_products import CallPattern, Key, Scale, float32_product, has_float32_products, scaled_by_rows
from .scaled_products import (
    LAYER_CALLS,
    LAYERS,
    MIN_NORMAL,
    NORMS,
    absmax,
    has_underflowed,
    row_dims,
    scaled_attention,
    scaled_product,
    scaled_to,
    weight_bounds,
)
from .shallow_copy import KeptInFp32, Make, copy_with_base, replace_submodules, with_forward
from .upcast import TraceableMode, fp32_dtype

_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)  # which are not called


@dataclass
class KnownPeaks:
    """Peaks of a network's layers by name, which later runs start with."""

    layers: dict[str, tuple[LayerPeaks, bool, bool]] = field(default_factory=dict)  # peaks; convolves; summed
    safe_attention: bool = True  # attention's inputs have room in fp16

    def add(self, names: Mapping[int, str], seen: Mapping[Key, tuple[LayerPeaks, bool]], pattern: CallPattern) -> None:
        """names: of layers, by the ids of their weights."""
        for key, (now, convolves) in seen.items():
            if key[2] == F.scaled_dot_product_attention.__name__:
                how = choose_scale(now, convolves=False, float32_products=True, summed=key in pattern.in_place)
                self.safe_attention &= how is not None and how.fp16
            elif key[1:] == (0, "") and (name := names.get(key[0])):
                known = self.layers.get(name, (now, convolves, False))
                self.layers[name] = known[0].merged(now), convolves, known[2] or key in pattern.in_place

    def clear(self) -> None:
        self.layers, self.safe_attention = {}, True

    def plan(self, *, float32_products: bool) -> dict[str, Scale]:
        """Return the scale of each layer. Layers in the same place of repeated blocks are computed in the same way, so
        that the blocks share one graph: all in plain fp16, all by constant scales, or all row by row."""

        def scales(names: list[str], *, summed: bool) -> list[Scale | None]:
            how = {"float32_products": float32_products}
            seen = (of[name] for name in names)
            return [
                choose_scale(each, convolves=convolves, summed=summed or own, **how) for each, convolves, own in seen
            ]

        made: dict[str, Scale] = {}
        same: dict[str, list[str]] = {}
        of = dict(self.layers)  # another run may add to it
        for name in of:
            same.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name), []).append(name)
        for names in same.values():
            loud = [name for name in names if of[name][0].input and of[name][0].min_output_inv]
            found = scales(loud, summed=False)
            if not all(how and how.fp16 for how in found):
                found = scales(loud, summed=True)
            if loud and all(found):
                looks = any(how.checked for how in found if how)
                scaled = [how._replace(checked=looks) for how in found if how]
                for name in names:  # a layer without input so far keeps its check; one without output cannot have one
                    made[name] = max(scaled)._replace(**({"min_product": 0.0} if of[name][0].input else {}))
                made |= dict(zip(loud, scaled, strict=True))
        return made


@dataclass(eq=False)
class LayeredNetwork:
    """A network with compiled blocks that runs as it is until there is a plan, and by planned layers from then on.
    Parts outside of the blocks then return float32, as blocks do, so that the first block shares the others' graph.

    build: makes a shallow copy with planned layers, given the plan and whether attention is safe in fp16.
    shell: the shallow copy to call. It may be wrapped, and its blocks may be replaced.
    """

    network: torch.nn.Module
    blocks: Sequence[str]  # names of the blocks, each of which is compiled as a whole
    build: Callable[[dict[str, Scale], bool], torch.nn.Module]
    known: KnownPeaks  # peaks of earlier runs; extended by this one
    device: torch.device | None = None  # the device that computes, if the weights are elsewhere between calls
    float32_products: bool = True  # see LearnedProducts

    def __post_init__(self) -> None:
        network, blocks = self.network, self.blocks
        self._device = self.device or next(network.parameters()).device
        self._planned_parts: dict[str, torch.nn.Module] | None = None  # blocks, and the modules outside of them
        called = ((name, part) for name, part in network.named_modules() if not isinstance(part, _LISTS))
        names = (name for name, _ in called if not any(covers(name, block) for block in ("", *blocks)))
        self._outside = outermost(name for name in names if not covered(name, blocks))
        parts = (*blocks, *self._outside)
        self.shell = replace_submodules(network, {name: partial(self._switch, name) for name in parts})
        self.slower = ""  # see LearnedProducts
        self.begin()

    @property
    def is_planned(self) -> bool:
        return self._planned_parts is not None

    def begin(self) -> None:
        """Use the plan of the known peaks, if there are any."""
        if self.known.layers:
            can = self.float32_products and has_float32_products(self._device)
            plan, best = (self.known.plan(float32_products=which) for which in (can, True))
            self.slower = scaled_by_rows(len(best.keys() - plan.keys()), self._device)
            shell, inside = self.build(plan, safe := self.known.safe_attention), self._outside
            parts = {name: InPlannedBlock(shell.get_submodule(name), safe_attention=safe) for name in inside}
            self._planned_parts = parts | {name: shell.get_submodule(name) for name in self.blocks}

    def learn(self, seen: Mapping[Key, tuple[LayerPeaks, bool]], pattern: CallPattern) -> None:
        layers = ((name, layer) for name, layer in self.network.named_modules() if isinstance(layer, LAYERS))
        self.known.add({id(layer.weight): name for name, layer in layers}, seen, pattern)

    def forget(self, *, for_good: bool) -> None:
        """Run without a plan. for_good: drop the known peaks too, so that later runs start without."""
        self._planned_parts, self.slower = None, ""
        if for_good:
            self.known.clear()

    def _switch(self, name: str, part: torch.nn.Module) -> torch.nn.Module:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if (by_plan := self._planned_parts) is None:
                return part(*args, **kwargs)
            made = by_plan[name](*args, **kwargs)
            return made if name in self.blocks else pytree.tree_map_only(torch.Tensor, widened, made)

        return with_forward(part, forward)


def with_planned_layers(
    module: torch.nn.Module, plan: Mapping[str, Scale], device: torch.device | None = None
) -> torch.nn.Module:
    """Return a shallow copy of `module` whose layers follow a plan, and whose norms are float32. It shares the weights;
    `module` itself is not changed.

    plan: the scales of layers by name. Layers that it lacks are scaled row by row.
    device: the device that computes, if the weights are elsewhere between calls.
    """
    made: dict[str, Make] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if isinstance(layer, NORMS):
            made[name] = partial(copy_with_base, base=_Float32Norm)
        elif isinstance(layer, LAYERS) and layer.weight.dtype is FP16 and not isinstance(layer, KeptInFp32):
            made[name] = partial(copy_with_base, base=_PlannedLayer, **_state(layer, plan.get(name), device))
    return replace_submodules(module, made)


def _state(layer: Any, how: Scale | None, device: torch.device | None) -> dict[str, Any]:
    """Return the attributes of a planned layer."""
    kind, numbers = "room", torch.zeros(0)
    if how is None:
        kind, found = "rows", weight_bounds(layer.weight, FP16, transposed=False)
        numbers = torch.stack([found.limit, found.min_product])
    elif how.checked:
        kind = "looked at"
    elif not how.fp16:
        kind, numbers = "scaled", torch.tensor([2.0**-how.exponent, 2.0**how.exponent, how.min_product])
    return {"planned": kind, "planned_numbers": numbers.to(device or layer.weight.device)}


# By name: dynamo replaces Tensor.__rsub__ by another function, and a guard on its membership in a set then fails.
_LAYER_NAMES = frozenset(func.__name__ for func in LAYER_CALLS)
_WRITES = {name for name in dir(torch.Tensor) if name.startswith("__i") or (name[-1] == "_" != name[-2])}
_KEEP_RANGE = {func.__name__ for func in NO_MATH | KEEPS_RANGE | COPIES | CASTS}
# functions that may get fp16: they keep its range, or write in place
_SAFE_IN_FP16 = frozenset({*_KEEP_RANGE, *_WRITES, "where", "masked_fill", "amax", "amin", "type_as"})


class InPlannedBlock(torch.nn.Module):
    """A part of a network with planned layers: its sums, its casts to half precision, and functions that are not known
    to be safe in fp16 are float32.

    safe_attention: queries, keys and values have room in fp16.
    """

    def __init__(self, block: Callable[..., Any], *, safe_attention: bool):
        super().__init__()
        self.block = block
        self.mode = _PlannedBlockMode(safe_attention=safe_attention)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.mode:
            return self.block(*args, **kwargs)


class _PlannedBlockMode(TraceableMode):
    def __init__(self, *, safe_attention: bool):
        super().__init__()
        self._safe_attention = safe_attention

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs) if self._safe_attention else scaled_attention(*args, **kwargs)
        if func is torch.Tensor.type_as and args[0].dtype is torch.float32 and args[1].dtype in HALF_DTYPES:
            return args[0]
        if func is torch.Tensor.to and args[0].dtype is torch.float32:
            args = tuple(map(fp32_dtype, args))
            kwargs = {name: fp32_dtype(value) for name, value in kwargs.items()}
        elif not _takes_fp16(getattr(func, "__name__", ""), args, kwargs):
            args = tuple(map(_in_float32, args))
            kwargs = {name: _in_float32(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _takes_fp16(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _LAYER_NAMES:
        return all(each.dtype is FP16 for each in args if isinstance(each, torch.Tensor))
    return name in _SAFE_IN_FP16 or "out" in kwargs or "out_dtype" in kwargs


def _in_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return widened(value)
    return type(value)(map(_in_float32, value)) if type(value) in (tuple, list) else value


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute attention in fp16. NaN replaces what does not fit: a kernel may take an infinite key for a masked one."""
    mask = args[0] if args else kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        return scaled_attention(query, key, value, *args, **kwargs)
    return F.scaled_dot_product_attention(_to_fp16(query), _to_fp16(key), _fp16_rows(value), *args, **kwargs)


def _to_fp16(x: torch.Tensor) -> torch.Tensor:
    """Cast to fp16, with NaN for values that do not fit. Inside a kernel, a compiler may leave out the rounding to
    infinity."""
    return torch.where(x.abs() <= FP16_MAX, x, torch.nan).half()


def _fp16_rows(x: torch.Tensor, spatial: int = 0) -> torch.Tensor:
    """Cast a layer's input to fp16, with NaN for rows that are too small for it. An input that is fp16 is not
    checked."""
    return x if x.dtype is FP16 else torch.where(_underflow(x, row_dims(x, spatial)), torch.nan, x).half()


def _underflow(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return which rows have fewer digits in fp16 than in bf16. dims: of a row, kept with size 1. bool."""
    rows = absmax(x, dims)
    return (rows < MIN_NORMAL) & (rows > 0)


class _PlannedLayer(torch.nn.Module):
    """A mixin for a linear layer or a convolution that follows its plan."""

    planned: str  # "room" (plain fp16), "looked at" (and rows of the output are checked), "scaled" or "rows"
    planned_numbers: torch.Tensor  # "scaled": factors of input and output, `min_product`; "rows": a weight's bounds
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spatial = self.weight.ndim - 2
        if self.planned in ("room", "looked at"):
            fused = not spatial and x.dtype is not FP16
            made = super().forward(x.half() if fused else _fp16_rows(x, spatial))  # pyright: ignore[reportAttributeAccessIssue]
            if self.planned == "looked at":
                made = torch.where(_underflow(made, row_dims(made, spatial)), torch.nan, made)
            if fused:  # by a compiler, with what comes after
                made = torch.where(_underflow(x, row_dims(x, 0)), torch.nan, made)
            return made
        if self.planned == "rows":
            of_rows, least = self.planned_numbers.split(1)

            def product(scaled: torch.Tensor) -> torch.Tensor:
                return _nan_where_underflowed(self._product(scaled), x, scaled, least, spatial)

            return scaled_product(product, x, FP16, of_rows, spatial, self.bias)
        quieter, louder, least = self.planned_numbers.split(1)
        half = scaled_to(x, quieter, FP16)
        made = self._product(half).float() if spatial else float32_product(half, self.weight)
        made = _nan_where_underflowed(made, x, half, least, spatial)
        if self.bias is None:
            return made * louder
        return torch.addcmul(self.bias.float().view(-1, *[1] * spatial), made, louder)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product without the bias."""
        convolve = getattr(self, "_conv_forward", None)
        return convolve(x, self.weight, None) if convolve else F.linear(x, self.weight)


def _nan_where_underflowed(
    made: torch.Tensor, given: torch.Tensor, scaled: torch.Tensor, least: torch.Tensor, spatial: int
) -> torch.Tensor:
    """Return a product with NaN for rows that underflowed when they were scaled."""
    if spatial:
        return torch.where(has_underflowed(made, given, scaled, least, spatial), torch.nan, made)
    size = absmax(made, (-1,))
    return torch.where(~((size >= least) & (size < torch.inf)) & (absmax(given, (-1,)) != 0), torch.nan, made)


class _Float32Norm(torch.nn.Module):
    """A mixin for a norm that computes in float32 and returns float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm: Any = self
        given = {name: self._parameters.get(name) for name in ("weight", "bias")}
        weight, bias = (None if each is None else each.float() for each in given.values())
        if isinstance(norm, torch.nn.GroupNorm):
            return F.group_norm(x.float(), norm.num_groups, weight, bias, norm.eps)
        if isinstance(norm, torch.nn.RMSNorm):
            return F.rms_norm(x.float(), list(norm.normalized_shape), weight, norm.eps)
        return F.layer_norm(x.float(), list(norm.normalized_shape), weight, bias, norm.eps)
