"""Planned products: run a network in fp16 by a plan, layer by layer, that one earlier step has shown to be safe.

A layer whose input and output have room in fp16 runs in plain fp16. Any other layer divides its input by a constant
power of two and multiplies fp16 into float32. Its output cannot overflow, so no weights are summed and no row maxima
are taken. Residual sums and norms compute in float32, and so does each function that is not known to be safe in fp16.

A value beyond the plan's range becomes infinite, and stays infinite or becomes NaN up to the output, where the guard
sees it. Two things could hide it, and are checked in each step: functions that turn an infinite value into a finite
one, and values that a constant scale flushes to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from ..trust.message import Message
from . import fp16_safe, process_state
from .accumulation import fp16_accumulation
from .fp16_safe import FP16, both_floating, is_bf16, written_tensors
from .scaled_products import (
    LAYER_CALLS,
    MIN_NORMAL,
    KernelOf,
    ScaledHalfMatmulMode,
    absmax,
    has_underflowed,
    no_kernel,
    row_dims,
    scalar,
    scaled_to,
    version_of,
)
from .upcast import Fp32Mode, OneOperation, autocast_off_where_on, storage_of

# functions that neither compute on values nor change a tensor, whatever their arguments
_MOVES_ALONE = fp16_safe.NO_MATH - fp16_safe.POINTERS - {torch.Tensor.view, torch.Tensor.__setitem__, F.dropout}
_MOVES_ALONE -= {func for func in _MOVES_ALONE if func.__name__.endswith("_") and not func.__name__.endswith("__")}
_ALIASES = {torch.Tensor.numpy, torch.Tensor.__array__}
# functions that change no tensor, unless `out` or `inplace` asks for it
_CHANGES_NONE = {torch.Tensor.view, F.dropout} | fp16_safe.KEEPS_RANGE | fp16_safe.COPIES | fp16_safe.PRODUCTS
_CHANGES_NONE |= fp16_safe.NORMS | fp16_safe.SUMS | fp16_safe.QUOTIENTS | fp16_safe.CASTS | fp16_safe.MODULATIONS
_LAYERS_AND_ATTENTION = LAYER_CALLS | {F.scaled_dot_product_attention}
# A call: the id of the last layer's weight (or of the layer), how many other functions were called since, the last one
Key = tuple[int, int, str]
BROADCAST: Key = 0, 0, "sum"  # for all sums of tensors whose shapes differ, or may differ in another call


class PlanMismatch(RuntimeError):
    """A step does something that the first step did not do, so the plan does not cover it."""


class Scale(NamedTuple):
    """How a layer, or another function, is computed from the second step on."""

    exponent: int = 0  # the input is divided by 2 ** exponent
    fp16: bool = False  # the output is fp16, else float32
    weight_scale: float = 1.0  # a power of two: the weight is divided by it before its cast to fp16
    min_product: float = 0.0  # a row whose unscaled product stays below has underflowed
    checked: bool = False  # with `fp16`: each step checks the rows of the output for underflow


@dataclass
class CallPattern:
    """Which calls a network made in the recorded steps, apart from their values."""

    layers: dict[int, Callable[[], Any]] = field(default_factory=dict)  # id → a weak reference to the weight or layer
    call_counts: dict[int, set[int]] = field(default_factory=dict)  # layer → numbers of calls before the next layer
    in_place: set[Key] = field(default_factory=set)  # outputs that are computed on in place: float32 from then on
    writes: bool = False  # it changes tensors in place
    uses_pointers: bool = False  # it passes a tensor's address to a kernel that PyTorch does not see


@dataclass
class _Fp16Input:
    """A layer's input, cast to fp16, for the layers that share it."""

    given: torch.Tensor
    version: tuple[int, int]
    values: torch.Tensor
    checked: bool = False  # its rows were checked for underflow


class LayerTrackingMode(ScaledHalfMatmulMode):
    """Tracks which layer a call belongs to: by its weight, or by the layer that a weight was last cast for."""

    def __init__(self, kernel_of: KernelOf = no_kernel):
        super().__init__(FP16, kernel_of)
        self._cast_layer: Any = None
        self.position = 0, 0  # the latest layer; how many other functions were called since

    def before_cast(self, layer: Any) -> None:
        self._cast_layer = layer

    def begin(self, inputs: Any) -> None:
        super().begin(inputs)
        self._cast_layer, self.position = None, (0, 0)

    def enter_layer(self, weight: torch.Tensor) -> Any:
        """Note that a layer begins. Returns the object that identifies it."""
        anchor = weight if isinstance(weight, torch.nn.Parameter) else self._cast_layer
        self._cast_layer = None
        self.on_layer_end(*self.position)
        self.position = id(anchor), 0
        return anchor

    def next_key(self, func: Any) -> Key:
        layer, since = self.position
        self._cast_layer, self.position = None, (layer, since + 1)
        return layer, since + 1, func.__name__

    def end(self) -> None:
        self._cast_layer = None
        self.on_layer_end(*self.position)

    def rollback_point(self) -> Callable[[], None]:
        """Return a function that undoes, once, all that is recorded from here on."""
        position = self.position

        def back() -> None:
            self.position = position

        return back

    def clear(self) -> None:
        """Drop all references to the call's tensors."""

    def on_layer_end(self, layer: int, since: int) -> None:
        """Called at the end of each layer, with the number of other calls up to the next layer."""


def rollback_point() -> Callable[[], None]:
    """Return a function that undoes all that the active mode records from here on in this call."""
    mode = active_mode()
    return mode.rollback_point() if mode else lambda: None


def active_mode() -> LayerTrackingMode | None:
    """Return such a mode that computes a network now; None where none does."""
    stack = _get_current_function_mode_stack()
    return next((mode for mode in reversed(stack) if isinstance(mode, LayerTrackingMode)), None)


class PlannedMode(LayerTrackingMode):
    """Computes each layer as its plan says."""

    is_first = False

    def __init__(self, plan: dict[Key, Scale], pattern: CallPattern, kernel_of: KernelOf = no_kernel):
        super().__init__(kernel_of)
        self._plan, self._pattern = plan, pattern
        self._mismatch = ""  # why the plan does not cover this call, once that is known
        self._fp16_storages: set[int] = set()  # storages of this call's fp16 tensors, for networks that write in place
        self._underflows: list[torch.Tensor] = []  # bool []: a constant scale underflowed
        self._row_peaks: list[torch.Tensor] = []  # row maxima of tensors that were cast to fp16
        self._gate_peaks: list[torch.Tensor] = []  # row maxima of products of two layer outputs
        self._extremes: list[tuple[torch.Tensor, torch.Tensor]] = []  # (min, max) of inputs that may hide overflow
        self._on_device = False
        self._inputs: set[int] = set()  # ids of the tensors that the call is given
        self._shared_inputs: dict[tuple[int, float], _Fp16Input] = {}  # by the input's id, and the factor
        self._may_share = True  # False once foreign code may hold a tensor's memory

    def begin(self, inputs: Any) -> None:
        super().begin(inputs)
        self.clear()
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
        self._on_device = any(tensor.device.type != "cpu" for tensor in tensors)
        self._inputs, self._may_share = set(map(id, tensors)), True

    def _mismatch_error(self, why: str) -> PlanMismatch:
        """Return the error to raise. A network may catch it (ComfyUI's does around ControlNet residuals), so `end`
        raises it again."""
        self._mismatch = why
        return PlanMismatch(why)

    def end(self) -> None:
        super().end()
        if self._mismatch:
            raise PlanMismatch(self._mismatch)

    def rollback_point(self) -> Callable[[], None]:
        above, mismatch = super().rollback_point(), self._mismatch
        checks = [*self._underflows], [*self._row_peaks], [*self._gate_peaks], [*self._extremes]

        def back() -> None:
            above()
            self._mismatch = mismatch
            self._underflows, self._row_peaks, self._gate_peaks, self._extremes = checks

        return back

    def clear(self) -> None:
        self._mismatch = ""
        self._underflows, self._row_peaks, self._gate_peaks, self._extremes = [], [], [], []
        self._fp16_storages.clear()
        self._shared_inputs.clear()

    def on_layer_end(self, layer: int, since: int) -> None:
        if since not in self._pattern.call_counts.get(layer, (since,)):
            raise self._mismatch_error("the network goes another way than in the first step")

    def nan_if_failed(self, made: torch.Tensor) -> torch.Tensor:
        """Return an output in float32, all NaN where a check of this call failed."""
        made = made.float() if made.dtype is FP16 else made
        if not (made.is_floating_point() or made.is_complex()):
            return made
        if self._row_peaks:
            rows = torch.cat([each.flatten().to(made.device) for each in self._row_peaks])
            made = made.masked_fill(((rows < MIN_NORMAL) & (rows > 0)).any(), torch.nan)
        if self._gate_peaks:
            peaks = torch._foreach_norm(self._gate_peaks, torch.inf)
            made = made.masked_fill(~_stacked(peaks, made).bool().all(), torch.nan)
        if self._underflows:
            made = made.masked_fill(_stacked(self._underflows, made).bool().any(), torch.nan)
        if self._extremes:
            least, most = (_stacked(ends, made) for ends in zip(*self._extremes, strict=True))
            masks = (least == -torch.inf) & (most <= 0)  # which are -inf in fp32 too
            made = made.masked_fill(~(((most - least) < torch.inf) | masks).all(), torch.nan)
        return made

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs) if func in _MOVES_ALONE else self.compute(func, args, kwargs)
        if self._pattern.writes:
            for each in [made] if isinstance(made, torch.Tensor) else made if fp16_safe.is_rope_kernel(func) else ():
                of = storage_of(each)
                is_view = bool(args) and isinstance(args[0], torch.Tensor) and storage_of(args[0]) == of
                if each.dtype is FP16 and not is_view:  # a view of a weight is not this call's
                    self._fp16_storages.add(of)
        return made

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _LAYERS_AND_ATTENTION:
            return super().compute(func, args, kwargs)
        if getattr(func, "__name__", "") == "__get__":  # a dtype, most often
            return Fp32Mode.compute(self, func, args, kwargs)
        if self._shared_inputs and (kwargs or not (func in _CHANGES_NONE or fp16_safe.is_rope_kernel(func))):
            self._drop_changed_inputs(func, args, kwargs)
        if kwargs.get("out") is not None and not self._pattern.writes and written_tensors(func, args, kwargs):
            raise self._mismatch_error("the network changes a tensor in place")
        if func in fp16_safe.NO_MATH or (func in fp16_safe.KEEPS_RANGE and fp16_safe.keeps_range(func, args, kwargs)):
            return self._move(func, args, kwargs)
        if func in fp16_safe.COPIES:
            made, summed = func(*args, **kwargs), self.next_key(func) in self._pattern.in_place
            return made.float() if summed and made.dtype is FP16 else made
        if func in fp16_safe.PRODUCTS:
            return self._product(func, args, kwargs)
        if func in fp16_safe.NORMS:
            return self._norm(func, args, kwargs)
        if func in fp16_safe.MODULATIONS:
            return self._modulation(func, args, kwargs)
        if func in fp16_safe.SUMS and both_floating(args) and not kwargs:
            return self._sum(func, *args)
        if func in fp16_safe.SUMS and not kwargs and fp16_safe.is_fp16_and_number(args):
            return self._plus_number(func, *args)
        if fp16_safe.is_rope_kernel(func):
            rotated = args[: 1 if func.__name__.endswith("1") else 2]
            in_fp16 = self._fits_fp16(func) and rotated and all(each.dtype is FP16 for each in rotated)
            return func(*args, **kwargs) if in_fp16 else Fp32Mode.compute(self, func, args, kwargs)
        if func in fp16_safe.QUOTIENTS and fp16_safe.is_safe_quotient(args, kwargs):
            return func(*args)
        if func in fp16_safe.CASTS_LIKE and not kwargs and both_floating(args) and args[0].device == args[1].device:
            func, args = torch.Tensor.to, (args[0], self._dtype_seen(args[1]), *args[2:])
        if func in fp16_safe.CASTS and fp16_safe.is_plain_cast(args, kwargs):
            return self._cast(func, args, kwargs)
        if func is torch.view_as_complex:
            return func(args[0].float())
        if not self._pattern.writes and written_tensors(func, args, kwargs):
            raise self._mismatch_error("the network changes a tensor in place")
        if func in fp16_safe.SUMS_IN_PLACE and args[0].dtype is torch.float32 and not any(map(_is_wider, args)):
            return func(*args, **kwargs)
        self._may_share &= func not in _ALIASES
        looked_at, may_be_masks = fp16_safe.inputs_to_check(func, args, kwargs)
        for given in looked_at:
            self._record_extremes(given, may_be_mask=may_be_masks)
        return super().compute(func, args, kwargs)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function that moves values, or keeps their range."""
        if func in fp16_safe.POINTERS:
            raise self._mismatch_error("the network starts a kernel that the first step did not start")
        sets = func is torch.Tensor.__setitem__
        if not self._pattern.writes and (sets or fp16_safe.is_in_place(func, args, kwargs)):
            raise self._mismatch_error("the network changes a tensor in place")
        if sets and isinstance(args[2], torch.Tensor) and args[2].dtype is FP16:
            args = *args[:2], args[2].to(args[0].dtype)  # which a slice does by itself, and a mask or an index does not
        if fp16_safe.reads_bytes(func, args, kwargs):
            if not self._pattern.writes:
                raise self._mismatch_error("the network reads a tensor's bytes")
            made_here = args[0].dtype is FP16 and self._dtype_seen(args[0]) is torch.float32
            return func(args[0].float() if made_here else args[0], *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Cast between fp16 and float32. A network that writes nothing in place cannot tell a cast from an alias, so
        it gets an alias. Else tensors of this call count as float32 and earlier ones as fp16: a cast to the dtype that
        a tensor counts as is an alias, any other a copy."""
        if not self._pattern.writes:
            return args[0]
        to_float32 = func is torch.Tensor.float or torch.float32 in (*args[1:], *kwargs.values())
        if to_float32 == (self._dtype_seen(args[0]) is torch.float32):
            return args[0]
        return args[0].float() if to_float32 else args[0].clone()

    def _dtype_seen(self, of: torch.Tensor) -> torch.dtype:
        """Return the dtype that a tensor counts as, for networks that write in place."""
        return torch.float32 if storage_of(of) in self._fp16_storages else of.dtype

    def _record_extremes(self, given: Any, *, may_be_mask: bool = True) -> None:
        """Record a tensor's extremes. Skips host tensors of a network that runs on a device: they come from numbers."""
        if not (isinstance(given, torch.Tensor) and given.is_floating_point() and given.numel()):
            return
        if given.device.type != "cpu" or not self._on_device:
            with process_state.lasting():
                if may_be_mask:
                    self._extremes.append(torch.aminmax(given))
                else:
                    on_cpu = given.device.type == "cpu"  # where a norm takes 30 times as long; float64 stays that
                    peak = given.abs().amax() if on_cpu else torch.linalg.vector_norm(given, torch.inf)
                    self._extremes.append((peak, peak))

    def _record_query_and_key(self, *given: torch.Tensor) -> None:
        """Record whether attention's query and key are finite: by one kernel on a device."""
        if given[0].device.type == "cpu" or given[0].dtype is not given[1].dtype:
            for each in given:
                self._record_extremes(each, may_be_mask=False)
        elif all(each.numel() for each in given):
            with process_state.lasting():
                self._extremes += [(norm, norm) for norm in torch._foreach_norm(given, torch.inf)]

    def _record_rows(self, given: torch.Tensor, spatial: int = 0, factor: float = 1.0) -> None:
        """Record row maxima, which may be too small for fp16."""
        with process_state.lasting():
            rows = absmax(given, row_dims(given, spatial))
            self._row_peaks.append(rows if factor == 1 else rows * factor)

    def _record_gated_rows(self, made: torch.Tensor) -> None:
        """Record row maxima of a product of two outputs (a gate): it may underflow although neither factor does. All
        zeros mean that it did; single rows of zeros may be right."""
        if made.ndim and made.numel():
            with process_state.lasting():
                self._gate_peaks.append(absmax(made, (-1,)))
                self._row_peaks.append(self._gate_peaks[-1])

    def _record_factor(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Record row maxima of the smaller factor of a product, which may be small enough to underflow it."""
        few = min(one, other, key=torch.Tensor.numel)
        if few.ndim:
            self._record_rows(few)

    def _layer(self, func: Any, input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        anchor = self.enter_layer(weight)
        scale = self._plan.get((id(anchor), 0, ""))
        if scale is None or self._pattern.layers[id(anchor)]() is not anchor or not isinstance(input, torch.Tensor):
            return super()._layer(func, input, weight, bias, *args, **kwargs)
        with autocast_off_where_on((input.device.type,)):
            if scale.weight_scale != 1 or weight.dtype is not FP16:
                weight = scaled_to(weight, 1 / scale.weight_scale, FP16)
            if scale.fp16:
                made = self._fp16_input(func, input, scale.weight_scale)
                bias = bias if bias is None else bias.to(FP16)
                spatial = weight.ndim - 2
                if not made.checked:
                    self._record_rows(input, spatial, scale.weight_scale)
                    made.checked = True
                made = func(made.values, weight, bias, *args, **kwargs)
                if scale.checked:
                    self._record_rows(made, spatial)
                return made
            half, factor = (
                self._fp16_input(func, input, 2.0**-scale.exponent).values,
                2.0**scale.exponent * scale.weight_scale,
            )
            if func is F.linear:
                made = float32_product(half, weight)
            else:
                made = func(half, weight, None, *args, **kwargs)
            spatial = weight.ndim - 2
            with process_state.lasting():
                self._underflows.append(has_underflowed(made, input, half, scale.min_product, spatial))
            if bias is None:
                return made.float().mul_(factor)
            return torch.add(bias.float().view(-1, *[1] * spatial), made, alpha=factor)

    def _fp16_input(self, func: Any, x: torch.Tensor, factor: float) -> _Fp16Input:
        """Return x · factor in fp16 for a layer. Consecutive linear layers share it (query and key), and so do all
        layers that read one of the network's inputs (a prompt)."""
        if x.dtype is FP16 and factor == 1:
            return _Fp16Input(x, (0, 0), x, checked=True)  # nothing to check: it is fp16 already
        found, state = self._shared_inputs.get((id(x), factor)), version_of(x)
        if found and found.version == state:
            return found
        self._drop_shared_inputs()
        if self._pattern.writes or not self._may_share or func is not F.linear or type(x) is not torch.Tensor:
            return _Fp16Input(x, state, scaled_to(x, factor, FP16))
        with process_state.lasting():
            made = self._shared_inputs[id(x), factor] = _Fp16Input(x, state, scaled_to(x, factor, FP16))
        return made

    def _drop_shared_inputs(self) -> None:
        """Drop shared inputs, but those of the network's own inputs."""
        for key in [key for key in self._shared_inputs if key[0] not in self._inputs]:
            del self._shared_inputs[key]

    def _drop_changed_inputs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Drop shared inputs that a function may have changed: tensors of inference mode have no version counter."""
        if isinstance(func, OneOperation):  # of weights
            return
        if func not in _CHANGES_NONE or kwargs.get("out") is not None or fp16_safe.is_in_place(func, args, kwargs):
            self._shared_inputs.clear()

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._drop_shared_inputs()
        mask = args[0] if args else kwargs.get("attn_mask")
        unfit = torch.float64 in (query.dtype, key.dtype, value.dtype)
        unfit |= mask is not None and mask.is_floating_point()
        if not self._fits_fp16(F.scaled_dot_product_attention) or unfit:
            return super()._attention(query, key, value, *args, **kwargs)
        self._record_query_and_key(query, key)  # a row of logits that are all -inf is 0 in some kernels
        if value.dtype is not FP16:
            rows = absmax(value, (-1,))  # of each head: the least alone is kept
            with process_state.lasting():
                self._row_peaks.append(torch.where(rows > 0, rows, 1).amin())
        with autocast_off_where_on((query.device.type,)):
            return F.scaled_dot_product_attention(query.to(FP16), key.to(FP16), value.to(FP16), *args, **kwargs)

    def _fits_fp16(self, func: Any) -> bool:
        """Return whether the plan says that this function's output fits fp16."""
        at = self.next_key(func)
        scale = self._plan.get(at)
        if scale is None or not scale.fp16 or at in self._pattern.in_place:
            return False
        return at[0] == 0 or self._pattern.layers[at[0]]() is not None

    def _norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Compute a norm in float32, and apply its weights together with the cast to fp16."""
        safe = self._fits_fp16(func)
        x, shape, weight, bias, eps = fp16_safe.NORM_ARGUMENTS[func](*args, **kwargs)
        held = [each for each in (x, weight, bias) if each is not None]
        if any(each.dtype is torch.float64 for each in held):
            return Fp32Mode.compute(self, func, args, kwargs)
        if safe and func is not F.rms_norm and all(each.dtype is FP16 for each in held):
            return func(*args, **kwargs)
        made = func(x.float(), shape, eps=eps)
        if func is F.group_norm:
            weight, bias = (None if each is None else each.view(-1, *[1] * (x.ndim - 2)) for each in (weight, bias))
        return _affine(made, weight, bias, FP16 if safe else torch.float32)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not both_floating(args):
            plain = not kwargs and len(args) == 2 and all(fp16_safe.is_small_factor(each) for each in args)
            return func(*args) if plain else Fp32Mode.compute(self, func, args, kwargs)
        if is_bf16(args[0]) or is_bf16(args[1]):
            self.next_key(func)
            return Fp32Mode.compute(self, func, args, kwargs)
        safe = self._fits_fp16(func) and args[0] is not args[1]  # a square may leave the range where its root does not
        halves = [each.dtype is FP16 for each in args[:2]]
        if all(halves) and not kwargs:
            if not safe:
                return torch.addcmul(scalar(0.0, args[0].device), *args)
            made = func(*args)
            if args[0].shape == args[1].shape:
                self._record_gated_rows(made)
            return made
        if safe and not kwargs and any(halves) and _is_modulated(*args):
            self._record_factor(*args)
            return _product_in_fp16(*args)
        if not kwargs and not (any(halves) and 0 in (args[0].ndim, args[1].ndim)):  # else a number's dtype would count
            return func(*args)
        return Fp32Mode.compute(self, func, args, kwargs)

    def _modulation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """Compute a + b · c in float32. The result is fp16 where the plan allows it and `a` is a broadcast shift, as
        after a norm, and not a residual stream. Its rows are checked as a layer's input is."""
        safe = self._fits_fp16(func)
        plain = len(args) == 3 and not kwargs.keys() - {"value"}
        if not plain or any(_is_wider(each) or not each.ndim for each in args):
            return Fp32Mode.compute(self, func, args, kwargs)
        full = torch.broadcast_tensors(*args)[0]
        if safe and FP16 in (args[1].dtype, args[2].dtype) and 8 * args[0].numel() <= full.numel():
            out = torch.empty(full.shape, dtype=FP16, device=full.device)
            made = torch.addcmul(*args, **kwargs, out=out)
            self._record_rows(made)
            self._record_factor(*args[1:])
            return made
        if all(each.dtype is FP16 for each in args):
            args = args[0].float(), *args[1:]
        return func(*args, **kwargs)

    def _plus_number(self, func: Any, *args: Any) -> torch.Tensor:
        """Return the sum of a tensor in fp16 and a number, in float32."""
        if func in fp16_safe.REVERSED or not isinstance(args[0], torch.Tensor):
            return Fp32Mode.compute(self, func, args, {})
        one = scalar(1.0, args[0].device)
        return torch.addcmul(args[0], one, one, value=-args[1] if func in fp16_safe.DIFFERENCES else args[1])

    def _sum(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype is b.dtype is FP16 and (a.shape == b.shape or BROADCAST in self._pattern.in_place):
            if func in fp16_safe.REVERSED:
                a, b = b, a
            return torch.addcmul(a, b, scalar(1.0, a.device), value=-1 if func in fp16_safe.DIFFERENCES else 1)
        to_widen = FP16 in (a.dtype, b.dtype) and 0 in (a.ndim, b.ndim)  # which a number's dtype does not
        if to_widen or is_bf16(a) or is_bf16(b):
            return Fp32Mode.compute(self, func, (a, b), {})
        return func(a, b)


def has_float32_products(device: torch.device) -> bool:
    """Return whether a device multiplies fp16 matrices into float32 as PyTorch is set now: not with fp16
    accumulation."""
    return _has_float32_products(device) and not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)


def scaled_by_rows(layers: int, device: torch.device) -> str:
    """Say why that many layers are scaled by rows where a device has no such products, in words; "" of none."""
    if not layers:
        return ""
    why = Message("PyTorch has no fp16 matrix product with a float32 result for this device")
    if _has_float32_products(device):
        why = Message("fp16 accumulation is on")
    elif TorchVersion(torch.__version__) < "2.8":
        why = Message("PyTorch {} has no fp16 matrix product with a float32 result (2.8 has)", torch.__version__)
    return Message("{} layers are scaled row by row in each step (slower): {}", layers, why)


@cache
def _has_float32_products(device: torch.device) -> bool:
    """Return whether a device multiplies fp16 matrices into float32: NVIDIA's, by PyTorch 2.8 or later. The CPU has no
    such kernel, and computes the same numbers from float32 operands."""
    if device.type in ("cpu", "meta"):
        return True
    matrix = torch.zeros(8, 8, dtype=FP16, device=device)
    try:
        with fp16_accumulation(False):  # with which it refuses
            torch.mm(matrix, matrix, out_dtype=torch.float32)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):  # no such kernel, or no such argument
        return False
    return True


def float32_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x · weightᵀ in float32, without rounding it to fp16.

    x: [..., inputs] fp16. weight: [outputs, inputs] fp16.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu":
        made = rows.float() @ weight.float().t()
    else:
        made = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    return made.view(*x.shape[:-1], len(weight))


def _stacked(numbers: Iterable[torch.Tensor], beside: torch.Tensor) -> torch.Tensor:
    """Return tensors [] as one [n] on the device of another."""
    return torch.stack([each.to(beside.device) for each in numbers]).float()


def _affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return x · weight + bias in a dtype, computed in float32."""
    if weight is None:
        return (x if bias is None else x + bias.float()).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    return torch.mul(x, weight, out=out) if bias is None else torch.addcmul(bias, x, weight, out=out)


def _is_wider(value: Any) -> bool:
    """Return whether a value is a tensor, and neither fp16 nor float32."""
    return isinstance(value, torch.Tensor) and value.dtype not in (FP16, torch.float32)


def _is_modulated(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether one of two factors is fp16, and the other a few numbers for all of its rows or channels."""
    half, other = (a, b) if a.dtype is FP16 else (b, a)
    return half.ndim == other.ndim > 0 and 8 * other.numel() <= half.numel()


def _product_in_fp16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a · b in fp16, computed in float32. Both have as many dimensions."""
    return torch.mul(a, b, out=torch.empty(tuple(map(max, a.shape, b.shape)), dtype=FP16, device=a.device))
