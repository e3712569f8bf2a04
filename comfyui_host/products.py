"""ComfyUI's layers that round what goes into them to fp8, int8 or fp4, and how a rerun has them multiply in fp32.

Such a layer holds its weights in few bits and, on the way, makes as few of its input too. Where it does:
- `comfy.ops.fp8_linear` (--fast fp8_matrix_mult, and checkpoints with scaled fp8 weights, until 2025): where that gives
  None, ComfyUI itself casts the weights to the input's dtype, scales them, and multiplies in that;
- the layers of `comfy.ops.mixed_precision_ops`, whose weights are a tensor class of their own: not where their
  `_full_precision_mm` says so;
- `comfy.ops.linear_input_act`, which makes one of an activation and an int8 product, and does not ask that layer.

All of them are told of the thread that asks: others may be using the same layer.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from ..precision.dtypes import dtype_name
from ..precision.shared import SharedSetting
from ..precision.upcast import RerunUnsupported

_IN_FULL = "_full_precision_mm"  # ComfyUI's own switch, on each layer that may hold quantised weights


@contextmanager
def products_in_fp32(network: torch.nn.Module) -> Generator[None]:
    """Inside, in this thread, layers multiply in their input's dtype by the weights that the checkpoint holds.

    Raises RerunUnsupported for layers that quantise in a way of their own.
    """
    _refuse_quantised(network)
    before = _here.whole
    try:
        _here.whole = True
        with _WHOLE_PRODUCTS.held():
            yield
    finally:
        _here.whole = before


def rerun_from(network: torch.nn.Module) -> str:
    """What a rerun in fp32 computes from, where the weights hold less than half precision; "" where they do not."""
    held = {_held_in(layer, weight) for layer in network.modules() for weight in layer.parameters(recurse=False)}
    stored = " and ".join(sorted(held - {""}))
    return f"rerun from the {stored} weights as they are stored, with products in fp32" if stored else ""


def _held_in(layer: torch.nn.Module, weight: torch.Tensor) -> str:
    """Its dtype or quantised format; "" where that is half precision or more."""
    if isinstance(weight, _quantised_kind()):
        return str(getattr(layer, "quant_format", "quantised"))
    return dtype_name(weight.dtype) if weight.is_floating_point() and weight.dtype.itemsize < 2 else ""


def _quantised_kind() -> type | tuple[()]:
    """ComfyUI's class of quantised weights; that of nothing in one that has none."""
    return getattr(sys.modules.get("comfy.quant_ops"), "QuantizedTensor", ())


def _refuse_quantised(network: torch.nn.Module) -> None:
    """Not those that have ComfyUI's switch, and not a table that is looked up: it rounds nothing that goes in."""
    kind = _quantised_kind()
    for name, layer in network.named_modules():
        if _IN_FULL in vars(layer) or isinstance(layer, torch.nn.Embedding):
            continue
        for own, weight in layer.named_parameters(recurse=False):
            if isinstance(weight, kind):
                layout = getattr(weight, "_layout_cls", "quantised")
                raise RerunUnsupported(
                    "'{}.{}' is quantised ({}), and its layer, a {}, has no switch for products in full precision: a "
                    "rerun would not be fp32. Update ComfyUI, take off the node that put this layer in, or use a "
                    "checkpoint of this model in fp16, bf16 or plain fp8.",
                    name,
                    own,
                    layout,
                    type(layer).__name__,
                )


class _Here(threading.local):
    whole = False  # products are to be made in the input's dtype, in this thread


_here = _Here()


class _InFull:
    """This stands in place of a layer's own `_full_precision_mm`, which stays there: on in a thread that reruns."""

    def __get__(self, layer: Any, owner: type) -> Any:
        if _IN_FULL not in vars(layer or owner):
            raise AttributeError(_IN_FULL)
        return _here.whole or vars(layer)[_IN_FULL]

    def __set__(self, layer: Any, value: bool) -> None:
        vars(layer)[_IN_FULL] = value


def _make_whole_products() -> Callable[[], None]:
    ops: Any = sys.modules.get("comfy.ops")
    undo = [
        _replace(ops, "fp8_linear", lambda original, *args, **kwargs: None),
        _replace(ops, "linear_input_act", _with_unquantised_layer),
    ]
    base = getattr(ops, "CastWeightBiasOp", None)  # of all its layers
    if base is not None:
        setattr(base, _IN_FULL, _InFull())
        undo.append(lambda: delattr(base, _IN_FULL))

    def restore() -> None:
        for each in undo:
            each()

    return restore


class _Unquantised:
    """A layer as ComfyUI's own functions see it that ask its weight whether it is quantised: it is not."""

    weight = None

    def __init__(self, layer: Any):
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._layer(*args, **kwargs)


def _with_unquantised_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `linear_input_act`, whatever else its version takes. Its way for layers that are not quantised calls the
    layer, which then multiplies in full."""
    if args:
        return original(_Unquantised(args[0]), *args[1:], **kwargs)
    return original(**{**kwargs, "linear": _Unquantised(kwargs["linear"])})


def _replace(ops: Any, name: str, in_full: Callable[..., Any]) -> Callable[[], None]:
    """In threads that rerun, have `in_full(original, ...)` for that function, where there is one; returns the undo."""
    original = getattr(ops, name, None)
    if original is None:
        return lambda: None

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return in_full(original, *args, **kwargs) if _here.whole else original(*args, **kwargs)

    setattr(ops, name, replaced)
    return lambda: setattr(ops, name, original)


_WHOLE_PRODUCTS = SharedSetting(_make_whole_products)
