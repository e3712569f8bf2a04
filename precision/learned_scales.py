"""Learned scales: one recorded step gives a plan by which the next steps cost about as much as plain fp16.

The first step scales each row of each layer's input separately, and records input and output peaks on the device. They
are read once, at the end of the step, and give each layer its plan (planned_products.py). A step that leaves the plan's
range is recomputed like the first one, and a new plan is made from the peaks of both.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ..trust.message import Message
from . import fp16_safe, process_state
from .fp16_safe import FP16, ROOM, both_floating, written_tensors
from .layer_peaks import Agree, alone
from .planned_products import (
    BROADCAST,
    CallPattern,
    Key,
    LayerTrackingMode,
    PlanMismatch,
    PlannedMode,
    Scale,
    has_float32_products,
    scaled_by_rows,
)
from .scaled_products import (
    LAYER_CALLS,
    MIN_CHANNELS,
    MIN_NORMAL,
    UNDERFLOW,
    KernelOf,
    ScaledHalfMatmulMode,
    WeightBounds,
    absmax,
    no_kernel,
    row_dims,
)
from .upcast import TF32, RerunUnsupported, autocast_off_where_on, device_types, is_quantised, run_in, storage_of

if TYPE_CHECKING:
    from .planned_layers import LayeredNetwork

Result = TypeVar("Result")
MIN_BITS = 12  # a row maximum in fp16 may be 2 ** -MIN_BITS: below, fp16 has fewer digits than bf16
CHECK_BITS = 3  # rows whose maximum is below 2 ** -CHECK_BITS, or may become so, are checked in each step
FLUSH = 2.0**-10  # share of the usual output below which a row is flushed to 0 although its input passed the check
_MAX_RATIO = 2.0**7  # the largest product, in multiples of the usual one (which grows with the root of the addends)
MAX_RENEWALS = 3  # failed plans in a run, after which each row is scaled separately


class LayerPeaks(NamedTuple):
    """Peaks of a layer in a step: over several calls, the largest of each field."""

    input: float  # max |x|
    output: float  # max |x|
    min_output_inv: float  # 1 / the smallest row maximum of the output, without rows of zeros
    spread: float  # `min_output_inv` times the usual size of an output for inputs of 1
    weight_scale: float = 1.0  # the power of two that the weight was divided by
    min_input_inv: float = 0.0  # 1 / (smallest row maximum of the input · weight_scale), of divided weights

    def merged(self, other: LayerPeaks) -> LayerPeaks:
        both = LayerPeaks(*(max(a, b) if a == a and b == b else math.nan for a, b in zip(self, other, strict=True)))
        return both._replace(weight_scale=other.weight_scale)  # the weight's latest


def choose_scale(seen: LayerPeaks, *, convolves: bool, float32_products: bool, summed: bool = False) -> Scale | None:
    """Choose a layer's scale from its peaks; None where each row has to be scaled separately.

    convolves: the product itself is fp16, so that the scale has to cover the output too.
    float32_products: whether the device multiplies fp16 into float32.
    summed: the network adds to the output in place, so the output has to be float32.
    """
    if not (all(map(math.isfinite, seen)) and seen.input > 0):
        return None
    exponent = math.floor(math.log2(seen.input)) + 1 - ROOM
    fits = not summed and -16 < exponent <= 0 and seen.output < 2.0**ROOM and seen.min_output_inv < 2.0**MIN_BITS
    flushes = 0 < seen.spread < seen.min_output_inv * FLUSH
    if (
        fits
        and not flushes
        and seen.min_input_inv < 2.0**MIN_BITS
        and seen.spread < 2.0**MIN_BITS * seen.weight_scale <= 2.0**MIN_BITS
    ):
        looks = seen.min_output_inv > 2.0**CHECK_BITS or seen.spread <= seen.min_output_inv * 2.0**-CHECK_BITS
        return Scale(fp16=True, weight_scale=seen.weight_scale, checked=looks)
    if not seen.min_output_inv:  # nothing comes out
        return None
    faint = seen.min_input_inv * seen.weight_scale  # 1 / the smallest row maximum that enters the product
    if convolves:  # its product is fp16, and its output has the bias as well
        usual = seen.input * seen.spread / seen.min_output_inv
        most = min(seen.output, usual * _MAX_RATIO) or seen.output
        exponent = max(exponent, math.floor(math.log2(most / seen.weight_scale)) + 1 - (ROOM + 2))
        faint = seen.weight_scale * max(seen.min_output_inv, 1 / usual if usual else 0.0)
    if max(seen.spread, faint) > 2.0 ** (MIN_BITS - exponent) or not (convolves or float32_products):
        return None
    least = seen.spread / seen.min_output_inv / seen.weight_scale * UNDERFLOW
    return Scale(
        exponent, weight_scale=seen.weight_scale, min_product=max(least, MIN_NORMAL) if convolves and least else least
    )


@dataclass
class _PeakLog:
    """The peaks of a step, on the device until its end."""

    values: list[torch.Tensor] = field(default_factory=list)  # float32 [6]: the fields of LayerPeaks
    calls: list[tuple[Key, bool]] = field(default_factory=list)  # for each of them: the call, and whether it convolves

    def add(self, key: Key, *values: Any, convolves: bool = False) -> None:
        device = next(value.device for value in values if isinstance(value, torch.Tensor))
        values = (*values, 1.0, 0.0)[:6]
        found = [torch.as_tensor(value, dtype=torch.float32, device=device).reshape(()) for value in values]
        with process_state.lasting():
            self.values.append(torch.stack(found))
        self.calls.append((key, convolves))

    def read(self, agree: Agree) -> dict[Key, tuple[LayerPeaks, bool]]:
        """Read the peaks. Waits for the device."""
        if not self.values or self.values[0].is_meta:
            return {}
        device = self.values[0].device
        numbers = agree(torch.stack([value.to(device) for value in self.values]).flatten()).view(-1, 6).tolist()
        seen: dict[Key, tuple[LayerPeaks, bool]] = {}
        for (key, convolves), values in zip(self.calls, numbers, strict=True):
            now = LayerPeaks(*values)
            seen[key] = (seen[key][0].merged(now) if key in seen else now, convolves)
        return seen


class LearningMode(LayerTrackingMode):
    """Scales every layer row by row, and records its peaks."""

    def __init__(self, kernel_of: KernelOf = no_kernel):
        super().__init__(kernel_of)
        self.pattern = CallPattern()
        self.peaks = _PeakLog()
        self._current_layer: Any = None  # the current layer's weight, or the layer
        self._producers: dict[int, Key | None] = {}  # storage → the call that made it

    def begin(self, inputs: Any) -> None:
        super().begin(inputs)
        self.peaks = _PeakLog()
        self._producers.clear()

    def rollback_point(self) -> Callable[[], None]:
        above, pattern, values, of = super().rollback_point(), self.pattern, [*self.peaks.values], [*self.peaks.calls]
        writes, points, summed = pattern.writes, pattern.uses_pointers, {*pattern.in_place}

        def back() -> None:
            above()
            self.peaks.values, self.peaks.calls = [*values], [*of]
            pattern.writes, pattern.uses_pointers, pattern.in_place = writes, points, {*summed}

        return back

    def end(self) -> None:
        super().end()
        self._current_layer = None

    def on_layer_end(self, layer: int, since: int) -> None:
        self.pattern.call_counts.setdefault(layer, set()).add(since)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if changed := written_tensors(func, args, kwargs):
            self.pattern.writes = True
            if getattr(func, "__name__", "") not in _OVERWRITING or not all(map(fp16_safe.is_exact, args[1:])):
                makers = (self._producers.get(storage_of(each)) for each in changed)
                self.pattern.in_place |= {maker for maker in makers if maker}
        # reading bytes shows a tensor's real dtype, as a write does
        self.pattern.writes |= fp16_safe.reads_bytes(func, args, kwargs)
        self.pattern.uses_pointers |= func in fp16_safe.POINTERS
        made = self.compute(func, args, kwargs)
        if func in LAYER_CALLS:
            self._producers[storage_of(made)] = id(self._current_layer), 0, ""
        elif func in fp16_safe.COPIES:
            self._producers[storage_of(made)] = self.next_key(func)
        elif fp16_safe.is_recorded(func, args):
            key, is_gate = self.next_key(func), self._is_gate(func, args)
            for each in made if isinstance(made, tuple) else (made,):
                if is_gate:
                    self._producers[storage_of(each)] = None
                else:
                    self._note_output(key, each)
        elif func is F.scaled_dot_product_attention:
            self._note_attention(made, *args, **kwargs)
        elif func in fp16_safe.SUMS and both_floating(args) and (args[0].shape != args[1].shape or 1 in args[0].shape):
            self._producers[storage_of(made)] = BROADCAST
        elif not changed and _is_floating(made):
            given = next((each for each in args if isinstance(each, torch.Tensor)), kwargs.get("input"))
            of, own = storage_of(given) if isinstance(given, torch.Tensor) else None, storage_of(made)
            if of != own:  # the address may be that of an earlier storage
                self._producers[own] = self._producers.get(of) if of is not None and func in _STAYS_FP16 else None
        return made

    def _is_gate(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return whether a function multiplies anything but a norm's output by a few numbers. Such a product stays
        float32: in a quieter step it may underflow although neither factor does."""
        if func not in fp16_safe.PRODUCTS or args[0].shape == args[1].shape:
            return False
        of = self._producers.get(storage_of(max(args[:2], key=torch.Tensor.numel)))
        return of is None or of[2] not in _NORMS

    def _note_output(self, key: Key, made: torch.Tensor) -> None:
        self._producers[storage_of(made)] = key
        if made.numel():
            rows = absmax(made, (-1,)) if made.ndim else made.abs()
            self.peaks.add(key, rows.amax(), rows.amax(), _min_inv(rows), 0.0)

    def before_layer(self, weight: torch.Tensor) -> None:
        self._current_layer = self.enter_layer(weight)

    def note(self, weight: torch.Tensor, x: torch.Tensor, made: torch.Tensor, of_weight: WeightBounds) -> None:
        anchor = self._current_layer
        if anchor is None or is_quantised(weight) or not made.numel() or not x.numel():
            return
        spatial = weight.ndim - 2
        if x.shape[-1 - spatial] < MIN_CHANNELS:  # all may be near 0 by chance: such layers are always scaled by rows
            return
        rows = absmax(made, row_dims(made, spatial) if spatial else (-1,))
        faint = _min_inv(rows)
        loudness = 1.0 if of_weight.weight_scale is None else of_weight.weight_scale
        strain = faint * (of_weight.min_product / UNDERFLOW) * loudness
        quiet = 0.0
        if of_weight.weight_scale is not None:  # rows of its input are multiplied by it in fp16, and checked
            quiet = _min_inv(absmax(x, (-1 - spatial,))) / loudness
        self.pattern.layers[id(anchor)] = weakref.ref(anchor)
        found = _peak(x), rows.amax(), faint, strain, loudness, quiet
        self.peaks.add((id(anchor), 0, ""), *found, convolves=bool(spatial))

    def _note_attention(self, made: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        at = self._producers[storage_of(made)] = self.next_key(F.scaled_dot_product_attention)
        if all(each.numel() for each in (query, key, value)):
            peaks = [_peak(each) for each in (query, key, value)]
            scale = args[3] if len(args) > 3 else kwargs.get("scale")
            size = query.shape[-1] ** -0.5 if scale is None else abs(scale)
            channels = [absmax(each, tuple(range(each.ndim - 1))) for each in (query, key)]
            logits = (channels[0].flatten() * channels[1].flatten()).sum() * size
            peak = torch.stack([*peaks, logits / 16]).amax()  # logits may reach more: they are not kept
            self.peaks.add(at, peak, peak, _min_inv(absmax(value, (-1,))), 0.0)


@dataclass(eq=False)
class LearnedProducts:
    """Computes one network in one run with products in half precision and all else in float32. In fp16 its layers are
    scaled: row by row in the first call, by learned scales from then on.

    in_layers: the network, where its blocks are compiled; without it, a function mode follows the plan.
    float32_products: whether fp16 may be multiplied into float32, where the device can: not with fp16 accumulation.
    """

    dtype: torch.dtype = FP16
    agree: Agree = alone  # all-reduces peaks over the processes that compute the network together
    in_layers: LayeredNetwork | None = None
    kernel_of: KernelOf = no_kernel  # for quantised weights; those without a kernel are dequantised
    float32_products: bool = True

    def __post_init__(self) -> None:
        is_fp16, kernel_of = self.dtype is FP16, self.kernel_of
        self._by_rows = LearningMode(kernel_of) if is_fp16 else ScaledHalfMatmulMode(self.dtype, kernel_of)
        self._planned: PlannedMode | None = None
        self._peaks: dict[Key, tuple[LayerPeaks, bool]] = {}
        self._renewals, self._calls = 0, 0
        self._used_plan = False  # the latest call used a plan
        self._slower = ""

    @property
    def slower(self) -> str:
        """Why layers are scaled row by row that could have a constant scale; "" where none are."""
        if self._renewals >= MAX_RENEWALS:
            return Message(
                "every layer is scaled row by row from now on (slower): learned scales failed {} times",
                self._renewals,
            )
        return self.in_layers.slower if self.in_layers else self._slower

    def run(self, function: Callable[..., Result], *args: Any, tf32: bool = False, **kwargs: Any) -> Result:
        """Call `function` (a module or any callable that runs modules), with the arguments and errors of
        `run_in_fp32`."""
        self._used_plan = self._planned is not None
        if self.in_layers and self.in_layers.is_planned:
            with torch.no_grad(), autocast_off_where_on(device_types()), TF32.held(tf32):
                made = pytree.tree_map_only(torch.Tensor, widened, function(*args, **kwargs))
            self._used_plan = True  # set after the call: an error is the compiler's or the network's, not the plan's
            return made
        if self._planned:
            try:
                made = run_in(self._planned, function, args, kwargs, tf32=tf32)
                if not _can_be_marked(made):
                    raise PlanMismatch("the network returns something else than in the first step")
                return pytree.tree_map_only(torch.Tensor, self._planned.nan_if_failed, made)
            except RerunUnsupported as error:  # of a tensor that the plan made fp16
                raise PlanMismatch(str(error)) from error
            finally:
                self._planned.clear()
        made = run_in(self._by_rows, function, args, kwargs, tf32=tf32)
        if isinstance(self._by_rows, LearningMode) and self._renewals < MAX_RENEWALS and _can_be_marked(made):
            self._calls += 1
            planned = self._plan(self._by_rows.peaks, self._by_rows.pattern)
            self._planned = planned if self._calls > self._renewals else None
        return made

    def run_by_rows(self, function: Callable[..., Result], *args: Any, tf32: bool = False, **kwargs: Any) -> Result:
        """Compute as in a first call, whatever was learned."""
        return run_in(self._by_rows, function, args, kwargs, tf32=tf32)

    def renew(self) -> bool:
        """Drop the plan after a call that failed: the next call scales row by row and makes a new plan. It reads all
        weights again: ComfyUI's hooks change them in place, on a device unnoticed. Returns whether the failed call had
        used a plan."""
        self._by_rows.forget_bounds()
        if not self._used_plan:
            return False
        self._planned, self._used_plan = None, False
        if self.in_layers:
            self.in_layers.forget(for_good=self._renewals + 1 >= MAX_RENEWALS)
        self._renewals += 1
        self._calls = 0  # the next plan is made from one more call than the last: a step may make several calls
        return True

    def _plan(self, notes: _PeakLog, pattern: CallPattern) -> PlannedMode | None:
        found = notes.read(self.agree)
        if self.in_layers and not all(math.isfinite(now.output) for now, _ in found.values()):
            return None  # a failed call: later runs would start from its peaks
        for key, (now, convolves) in found.items():
            if key[2] in _PRODUCTS and not now.output:  # all zeros now; in fp16, a later call might underflow
                pattern.in_place.add(key)
            known = self._peaks.get(key)
            self._peaks[key] = (known[0].merged(now) if known else now, convolves)
        if not notes.values or pattern.uses_pointers or (self.agree is not alone and not self.in_layers):
            return None  # a rank that leaves the plan would do so alone, and the others would wait for it
        if self.in_layers:
            self.in_layers.learn(self._peaks, pattern)
            if self._calls > self._renewals:
                self.in_layers.begin()
            return None
        float32_products = self.float32_products and has_float32_products(notes.values[0].device)
        plan: dict[Key, Scale] = {}
        by_rows = 0
        for key, (seen, convolves) in self._peaks.items():
            how = {"convolves": convolves, "summed": key in pattern.in_place}
            if not (key[0] in pattern.layers or key[0] == 0):
                continue
            if scale := choose_scale(seen, float32_products=float32_products, **how):
                plan[key] = scale
            elif not float32_products and key[1:] == (0, "") and choose_scale(seen, float32_products=True, **how):
                by_rows += 1
        self._slower = scaled_by_rows(by_rows, notes.values[0].device)
        return PlannedMode(plan, pattern, self.kernel_of) if plan else None


def widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is FP16 else tensor


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _can_be_marked(made: Any) -> bool:
    """Return whether a failed check can mark a call's result with NaN: it has float tensors, and besides only plain
    numbers and strings."""
    leaves = pytree.tree_leaves(made)
    plain = all(isinstance(leaf, (torch.Tensor, int, float, str, type(None))) for leaf in leaves)
    return plain and any(map(_is_floating, leaves))


def _min_inv(rows: torch.Tensor) -> torch.Tensor:
    """Return 1 / the smallest row maximum that is not 0; 0 where all are 0."""
    return torch.where(rows > 0, rows, torch.inf).amin().reciprocal()


def _peak(x: torch.Tensor) -> torch.Tensor:
    return absmax(x, tuple(range(x.ndim))).reshape(())


# functions that return fp16 for fp16 and have no plan of their own: a write to their output counts for its producer
_STAYS_FP16 = fp16_safe.NO_MATH | fp16_safe.KEEPS_RANGE | fp16_safe.CASTS | fp16_safe.CASTS_LIKE
_STAYS_FP16 |= fp16_safe.PRODUCTS | fp16_safe.QUOTIENTS
_PRODUCTS = {func.__name__ for func in fp16_safe.PRODUCTS}
_NORMS = {func.__name__ for func in fp16_safe.NORMS}
_OVERWRITING = frozenset({"__setitem__", "copy_", "fill_", "zero_", "masked_fill_"})
