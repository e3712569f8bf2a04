"""Sees what a model clips in fp16: a clipped value is finite, and wrong, so no look at the output finds it.

Flux, Lumina2 and Z-Image hide what overflowed by `nan_to_num`, ACE-Step by `clip`, transformers' T5 by `clamp`, some of
them in helpers. A function mode sees each such call wherever it is. PyTorch traces it into what is compiled, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .dtypes import FP16_MAX
from .observe import floating, largest

EDGE = 6e4  # an upper bound from here on is there for fp16's sake: T5's is 64504, others' is 65504
BEYOND = 65520.0  # what rounds to infinity in fp16: a bound from here on clips nothing
FP8_END = 448.0  # float8_e4m3fn's. ComfyUI clamps to it what its fp8 products take: values, and infinities with them

_T = torch.Tensor
_NAN_TO_NUM = frozenset({torch.nan_to_num, torch.nan_to_num_, _T.nan_to_num, _T.nan_to_num_})
_CLAMP = frozenset({torch.clamp, torch.clamp_, torch.clip, torch.clip_, _T.clamp, _T.clamp_, _T.clip, _T.clip_})
_CLAMP_MAX = frozenset({torch.clamp_max, torch.clamp_max_, _T.clamp_max, _T.clamp_max_})
_ASKS = frozenset({torch.isinf, torch.isnan, torch.isfinite, _T.isinf, _T.isnan, _T.isfinite})  # and clips where it is


class Clips(TorchFunctionMode):
    """The largest |x| that a stage handed to what clips in fp16, of each call. Waits for no device.

    dtype: of the stage's plan; only "fp16" is watched.
    A mode costs about 3 µs of Python for each function that the stage calls. So where the first call neither clipped
    nor asked for infinities, the next ones run without it. Compiled code has none of that cost, and would be made anew.
    """

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self._peak = torch.zeros(())  # one tensor, since compiled code would be made anew for each length of a list
        self._needed = False
        self._idle = dtype != "fp16"

    def watched(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*args: Any, **kwargs: Any) -> Any:
            if self._idle:
                return stage(*args, **kwargs)
            self._peak = torch.zeros((), device=_device_of((args, kwargs)))
            with self:
                made = stage(*args, **kwargs)
            self._idle = not self._needed and not _compiled_something()
            return made

        return attempt

    def take(self) -> torch.Tensor | None:
        """Of the latest call, as a float32 scalar; 65504 or more, inf or NaN: it was clipped. None: nothing clips."""
        return self._peak if self._needed else None

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is _T.unflatten:  # it calls super(), which dynamo cannot follow from here
            return args[0].unflatten(*args[1:], **named)
        if func in _ASKS:
            self._needed = True
        if func in _NAN_TO_NUM:
            self._see(_given(args, named), FP16_MAX)
        elif func in _CLAMP:
            self._see(_given(args, named), args[2] if len(args) > 2 else named.get("max"))
        elif func in _CLAMP_MAX:
            self._see(_given(args, named), args[1] if len(args) > 1 else named.get("max"))
        return func(*args, **named)

    def _see(self, given: Any, bound: Any) -> None:
        """bound: the upper one. What has none near fp16's end is a clip of the model's own, in fp32 too."""
        if not isinstance(given, torch.Tensor) or given.dtype is not torch.float16 or not given.numel():
            return
        counts: bool | torch.Tensor = False
        to_fp8 = False
        if isinstance(bound, torch.Tensor) and bound.numel() == 1:
            bound = bound.detach().reshape(()).float()
            counts = (bound >= EDGE) & (bound < BEYOND)
        elif isinstance(bound, (int, float)):
            to_fp8 = bound == FP8_END
            counts = to_fp8 or EDGE <= bound < BEYOND
        if counts is False:
            return
        self._needed = True
        peak = largest(given)
        if to_fp8:
            peak = torch.where(peak.isinf(), peak, 0.0)
        else:
            peak = torch.where(peak >= bound, peak.clamp(min=FP16_MAX), peak)
        if isinstance(counts, torch.Tensor):
            peak = torch.where(counts, peak, 0.0)
        self._peak = torch.maximum(self._peak, peak.to(self._peak.device))


def _device_of(inputs: Any) -> torch.device | None:
    """That a stage computes on: a denoiser may be given other things in main memory, a text encoder has token ids."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    return next((tensor.device for tensor in (*floating(tensors), *tensors)), None)


def _compiled_something() -> bool:
    """This process, by now."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0


def _given(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return args[0] if args else named.get("input")
