"""Which kernel computes attention: named, or measured on this device at the shapes of a run.

PyTorch chooses by a fixed order of what can take a call, not by speed. Which kernel is the fastest depends on the card,
its driver, the head size and the length.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.overrides import _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from .attention_kernels import KERNELS, Errors, Kernel, Measured, offered, over_budget, sdpa
from .modes import Mode
from .shared import NO_WARNINGS, TURNS

logger = logging.getLogger(__name__)

_ROUNDS = 5
_CHECKED = 64  # queries whose result is compared with fp32's
_SCALED = 2.0**-40  # by which bf16's largest values, a million million of them, sum up to a finite float32
MARGIN = 1.05  # by which another kernel must be faster than PyTorch's own choice: less is noise


@dataclass(frozen=True)
class Call:
    """One call of scaled dot-product attention."""

    query: tuple[int, ...]  # [batch, heads, tokens, channels]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: tuple[tuple[int, ...], torch.dtype] | None = None
    causal: bool = False
    scale: float | None = None

    def with_queries(self, number: int) -> Call:
        """Return the call with `number` of its queries alone. A mask with a row for each query is cut alike."""
        tokens = min(number, self.query[-2])
        mask = self.mask and ((*self.mask[0][:-2], min(tokens, self.mask[0][-2]), self.mask[0][-1]), self.mask[1])
        return replace(self, query=(*self.query[:-2], tokens, self.query[-1]), mask=mask)


@dataclass(frozen=True)
class Timing:
    """How fast and how exact one kernel is."""

    seconds: float  # for all attention of a step
    error: float  # max |difference| to fp32
    share: float = 0.0  # of the norm, that the difference is


@dataclass(frozen=True)
class Choice:
    """The fastest kernel whose results are right."""

    kernel: str  # "" where that is PyTorch's own choice
    timings: Mapping[str, Timing]  # with "auto": PyTorch's own choice. Empty where there was nothing to choose from
    left_out: Mapping[str, str] = field(default_factory=dict)  # kernels beyond their error budget, and by how much

    def __str__(self) -> str:
        if not self.timings:
            return "attention: PyTorch's own choice, the only one here"
        if not self.kernel:
            said = "attention: PyTorch's own choice, measured the fastest here"
        else:
            ratio = self.timings["auto"].seconds / self.timings[self.kernel].seconds
            said = f"attention: {self.kernel}, measured {ratio:.2f} times as fast here as PyTorch's own choice"
            said += f", {share:.2g} of the norm from fp32" if (share := self.timings[self.kernel].share) else ""
        return "; ".join([said, *(f"not {name}: {why}" for name, why in self.left_out.items())])


def preferring(kernel: str) -> AbstractContextManager[Any]:
    """Return a context in which attention uses the kernel wherever it takes a call, else another one. Dynamo can trace
    it."""
    return KERNELS[kernel].preferring()


class Attended(torch.nn.Module):
    """A block whose attention is computed by one kernel, wherever it takes the call."""

    def __init__(self, block: torch.nn.Module, kernel: str):
        super().__init__()
        self.block = block
        self.kernel = kernel

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # who compiles is alone already
            return self._preferring(*args, **kwargs)
        with TURNS.alone():  # the choice of kernels is the process's
            return self._preferring(*args, **kwargs)

    def _preferring(self, *args: Any, **kwargs: Any) -> Any:
        with preferring(self.kernel):
            return self.block(*args, **kwargs)


def showing_what_is_broken(inputs: Any) -> AbstractContextManager[Any]:
    """Return a context in which attention on the CPU gives NaN where a query or a key is not finite.

    PyTorch's kernel there gives 0 for a row whose scores are all NaN, where there are fewer keys than a vector register
    holds (16, or 8): finite, and wrong. Right results stay as they are, to the bit. On other devices the context does
    nothing.

    inputs: a nest of what the call inside will be given; its tensors tell the device.
    """
    on_cpu = {leaf.device.type for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)} == {"cpu"}
    return _ShowingWhatIsBroken() if on_cpu else nullcontext()


class ShownInside(torch.nn.Module):
    """A block for a compiler to trace, on the CPU: what is broken is shown in it where the caller's context does so.

    That context is a mode, which would look at what compiled code calls as well, each product of matrices. `run` makes
    the call without it.
    """

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block

    def forward(self, shown: bool, *args: Any, **kwargs: Any) -> Any:
        with _ShowingWhatIsBroken() if shown else nullcontext():
            return self.block(*args, **kwargs)

    @staticmethod
    def run(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what was compiled of one."""
        if not isinstance(_get_current_function_mode(), _ShowingWhatIsBroken):
            return compiled(False, *args, **kwargs)
        with _pop_mode_temporarily():
            return compiled(True, *args, **kwargs)


class _ShowingWhatIsBroken(Mode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **(kwargs or {}))
        made = func(*args, **(kwargs or {}))
        return _broken_where_they_are(made, *args, **(kwargs or {})) if func is sdpa else made


def _broken_where_they_are(
    made: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Return what attention made, NaN throughout where a query or a key is not finite.

    A sum tells: it is finite only where all values are, and the other way round unless it leaves the range itself. So
    compiled code scales values first, and eager code, which can look at a number, looks again at one that is not.
    """
    if torch.compiler.is_compiling():
        total = (query.float() * _SCALED).sum(-1).sum() + (key.float() * _SCALED).sum(-1).sum()
        return made + torch.where(total.isfinite(), 0.0, torch.nan).to(made.dtype)  # inductor takes `total * 0` for 0
    if math.isfinite((query.detach().sum() + key.detach().sum()).item()):
        return made
    bounds = [bound for tensor in (query, key) if tensor.numel() for bound in torch.aminmax(tensor)]
    return made + sum(bound * 0 for bound in bounds)


def attention_calls(run: Callable[[], object]) -> Counter[Call]:
    """Count the calls of attention that are made while `run` runs, which may be on the meta device."""
    seen: Counter[Call] = Counter()

    class Recording(Mode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is sdpa:
                seen[_call(*args, **(kwargs or {}))] += 1
            return func(*args, **(kwargs or {}))

    with Recording():
        run()
    return seen


def measure(calls: Mapping[Call, int], device: torch.device) -> Choice:
    """Time the kernels on random numbers, interleaved, check each against fp32, and return the fastest that is right.

    A kernel is left out where it does not take one of the calls, where it fails in one, or where its error is beyond
    its budget. Where there is none but PyTorch's own choice, nothing is timed. Raises RuntimeError where that one fails
    too, as where memory runs out.

    calls: how often each call comes in a step.
    """
    with torch.inference_mode(), TURNS.alone():
        others = [kernel for kernel in offered(device) if all(_takes(kernel, call, device) for call in calls)]
        own = {_own(call, device) for call in calls} if others else set[SDPBackend]()
        if all({kernel.torch} == own for kernel in others) or not calls:
            return Choice("", {})
        tried = {kernel.name: _errors_or_why_not(kernel.name, calls, device) for kernel in others}
        over = {name: found for name, found in tried.items() if isinstance(found, str)}
        errors = {"auto": _errors("auto", calls, device)}
        errors |= {name: found for name, found in tried.items() if isinstance(found, Measured)}
        names = [*errors]
        seconds = dict.fromkeys(names, 0.0)
        for call, count in calls.items():
            for name, each in _seconds(names, call, device).items():
                seconds[name] += count * each
    least = min(error.largest for error in errors.values())
    kinds = {"auto": Errors.ROUNDING, **{kernel.name: kernel.errors for kernel in others}}
    over |= {name: why for name in names if (why := over_budget(kinds[name], errors[name], least))}
    handicapped = {name: seconds[name] * (1 if name == "auto" else MARGIN) for name in names}
    fastest = min((name for name in names if name not in over), key=handicapped.__getitem__, default="auto")
    timings = {name: Timing(seconds[name], errors[name].largest, errors[name].share) for name in names}
    chosen_anyway = fastest == "auto" or {KERNELS[fastest].torch} == own
    return Choice("" if chosen_anyway else fastest, timings, over)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Call:
    del dropout_p
    mask = None if attn_mask is None else (tuple(attn_mask.shape), attn_mask.dtype)
    return Call(tuple(query.shape), tuple(key.shape), tuple(value.shape), query.dtype, mask, is_causal, scale)


def _tensors(call: Call, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(0)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    made = {name: random(getattr(call, name), call.dtype) for name in ("query", "key", "value")}
    if call.mask:
        shape, dtype = call.mask
        mask = random(shape, torch.float32)
        made["attn_mask"] = mask > -1 if dtype is torch.bool else mask.to(dtype)
    return made | {"is_causal": call.causal, "scale": call.scale}


def _run(name: str, given: Mapping[str, Any]) -> torch.Tensor:
    return sdpa(**given) if name == "auto" else KERNELS[name].run(given)


def _takes(kernel: Kernel, call: Call, device: torch.device) -> bool:
    try:
        with NO_WARNINGS.held():  # of why it does not
            _run(kernel.name, _tensors(call.with_queries(_CHECKED), device))
    except Exception as error:  # noqa: BLE001 - PyTorch's is a RuntimeError; what another library raises is its own
        logger.debug("%s does not take %s: %s", kernel.name, call, error)
        return False
    return True


def _own(call: Call, device: torch.device) -> SDPBackend:
    """Return the kernel that PyTorch would choose."""
    with torch.inference_mode():
        return SDPBackend(torch._fused_sdp_choice(**_tensors(call.with_queries(_CHECKED), device)))


def _errors(name: str, calls: Iterable[Call], device: torch.device) -> Measured:
    found = [_error(name, call, device) for call in calls]
    return Measured(max(error.largest for error in found), max(error.share for error in found))


def _errors_or_why_not(name: str, calls: Iterable[Call], device: torch.device) -> Measured | str:
    try:
        return _errors(name, calls, device)
    except Exception as error:  # noqa: BLE001 - PyTorch's is a RuntimeError; what another library raises is its own
        return f"it failed ({type(error).__name__})"


def _error(name: str, call: Call, device: torch.device) -> Measured:
    """Make the whole call by a kernel, and compare some of its queries with fp32's result for these."""
    given = _tensors(call, device)
    rows = _rows(call)
    made = _run(name, given)[..., rows, :].float()
    some = given | {"query": given["query"][..., rows, :]}
    if call.mask and call.mask[0][-2] > 1:
        some["attn_mask"] = given["attn_mask"][..., rows, :]
    right = _run("math", {key: value.float() if _is_floating(value) else value for key, value in some.items()})
    difference = made - right
    largest, share = difference.abs().max().item(), (difference.norm() / right.norm()).item()
    return Measured(*(math.inf if math.isnan(value) else value for value in (largest, share)))


def _rows(call: Call) -> list[int]:
    """Return the queries that are compared, from all over the call. A causal one's are the first: what they attend to
    does not hang on how many there are."""
    tokens = call.query[-2]
    number = min(_CHECKED, tokens)
    return [*range(number)] if call.causal else [tokens * row // number for row in range(number)]


def _seconds(names: Sequence[str], call: Call, device: torch.device) -> dict[str, float]:
    given = _tensors(call, device)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(1 + _ROUNDS):
        for name in names:
            _wait(device)
            started = time.perf_counter()
            _run(name, given)
            _wait(device)
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
