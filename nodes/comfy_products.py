"""ComfyUI's layers that round what goes into them to fp8 or int8, and how a rerun has them multiply in fp32 instead.

Such a layer holds its weights in fp8 and, on the way, makes fp8 of its input too. `comfy.ops.fp8_linear` is where it
does (--fast fp8_matrix_mult, and checkpoints with scaled fp8 weights): where that gives None, ComfyUI itself casts the
weights to the input's dtype, scales them, and multiplies in that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from ..precision.dtypes import dtype_name
from ..precision.shared import SharedSetting
from ..precision.upcast import RerunUnsupported


@contextmanager
def products_in_fp32(network: torch.nn.Module) -> Generator[None]:
    """Inside, in this thread, layers multiply in their input's dtype by the weights that the checkpoint holds.

    Raises RerunUnsupported for layers that quantise in a way of their own.
    """
    _refuse_quantised(network)
    before, _here.whole = _here.whole, True
    try:
        with _NO_FP8_LINEAR.held():
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
    """Not those that make whole weights of theirs and leave their input as it is: on cards without such products, or
    where the checkpoint says so."""
    kind = _quantised_kind()
    for name, layer in network.named_modules():
        if getattr(layer, "_full_precision_mm", False):
            continue
        for own, weight in layer.named_parameters(recurse=False):
            if isinstance(weight, kind):
                layout = getattr(weight, "_layout_cls", "quantised")
                raise RerunUnsupported(
                    f"'{name}.{own}' is quantised ({layout}), and its layer rounds what goes into it too: a rerun "
                    "would not be fp32. Use a checkpoint of this model in fp16, bf16 or plain fp8."
                )


class _Here(threading.local):
    whole = False  # products are to be made in the input's dtype, in this thread


_here = _Here()


def _without_fp8_linear() -> Callable[[], None]:
    ops: Any = sys.modules["comfy.ops"]
    original = getattr(ops, "fp8_linear", None)
    if original is None:  # an older ComfyUI, without fp8 products
        return lambda: None

    def fp8_linear(layer: Any, given: Any) -> Any:
        return None if _here.whole else original(layer, given)

    def restore() -> None:
        ops.fp8_linear = original

    ops.fp8_linear = fp8_linear
    return restore


_NO_FP8_LINEAR = SharedSetting(_without_fp8_linear)
