"""PyTorch's own settings that a rerun in fp32 holds while it runs. They are the process's, so all reruns share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any

import torch

from .shared import SharedSetting


def device_types() -> tuple[str, ...]:
    """Return the types of devices that may compute: "cpu", and the accelerator's where there is one."""
    if not torch.accelerator.is_available():  # asked first: where there is none, torch 2.6 raises
        return ("cpu",)
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def autocast_off_where_on(device_types: Iterable[str]) -> AbstractContextManager[Any]:
    """Return a context with autocast off, whatever is set around it, at next to no cost where it is off anyway: one is
    entered for each function that is called."""
    on = [
        device_type
        for device_type in device_types
        if _has_autocast(device_type) and torch.is_autocast_enabled(device_type)
    ]
    if not on:
        return _AS_IT_IS
    with ExitStack() as stack:
        for device_type in on:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        return stack.pop_all()


_AS_IT_IS = nullcontext()
_has_autocast = cache(torch.amp.is_autocast_available)  # "meta" has none


def _force_eager() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _allow_fp32_attention() -> Callable[[], None]:
    kernels = torch.nn.attention.SDPBackend
    with ExitStack() as held:
        held.enter_context(torch.nn.attention.sdpa_kernel([kernels.EFFICIENT_ATTENTION, kernels.MATH]))
        return held.pop_all().close


def tf32_off(wanted: bool) -> AbstractContextManager[None]:
    """Return a context with TF32 off in this process's products and convolutions, which PyTorch lets take it; where
    that is not wanted, it is as it is."""
    return TF32.held(False) if wanted else _AS_IT_IS


def _set_tf32(on: bool) -> Callable[[], None]:
    """Set TF32 through PyTorch's old switches, which set the new ones (2.9 and later) along. Where the new ones alone
    were set, reading an old one raises, in every thread. Returns the function that undoes it."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn

    def write_products(value: str) -> None:
        if value == "high":
            matmul.allow_tf32 = True  # the word would set the CPU's products, too
        else:
            torch.set_float32_matmul_precision(value)

    def write_convolutions(value: bool) -> None:
        cudnn.allow_tf32 = value

    products = (matmul, mkldnn.matmul) if hasattr(mkldnn, "matmul") else (matmul,)
    convolutions = (cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ()
    with ExitStack() as undo:
        undo.callback(_turn(on, torch.get_float32_matmul_precision, write_products, ("highest", "high"), products))
        undo.callback(_turn(on, lambda: cudnn.allow_tf32, write_convolutions, (False, True), convolutions))
        return undo.pop_all().close


def _turn(
    on: bool,
    read: Callable[[], Any],
    write: Callable[[Any], None],
    values: tuple[Any, Any],
    operations: tuple[Any, ...],
) -> Callable[[], None]:
    """Set TF32 where it is not set so. Returns the function that undoes it.

    read, write: an old switch. values: its values for off and on.
    operations: those whose new settings the old switch sets too; the first is the one that it is about.
    """
    operations = tuple(each for each in operations if hasattr(each, "fp32_precision"))
    before = [each.fp32_precision for each in operations]  # their own, or what stands above them
    try:
        old = read()
        is_on = before[0] == "tf32" if before else old != values[False]
        mixed = (old != values[False]) != is_on  # by another's new settings alone
    except RuntimeError:
        old, is_on, mixed = None, before[0] == "tf32", True
    if is_on == on:
        return lambda: None
    if mixed:
        for operation in operations[:1] if on else operations:
            operation.fp32_precision = "tf32" if on else "ieee"
    else:
        write(values[on])

    def restore() -> None:
        if not mixed:
            write(old)
        for operation, precision in zip(operations, before, strict=True):
            inherited = precision == torch.backends.cudnn.fp32_precision  # it stands for all of CUDA
            operation.fp32_precision = "none" if inherited else precision

    return restore


EAGER_ONLY = SharedSetting(_force_eager)
TF32 = SharedSetting(_set_tf32)  # where runs overlap, plain fp32 wins
FP32_ATTENTION = SharedSetting(_allow_fp32_attention)
