"""PyTorch's own settings that a rerun in fp32 holds while it runs. They are the process's, so all reruns share them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from .shared import SharedSetting


def device_types() -> tuple[str, ...]:
    """Return the types of devices that may compute: "cpu", and the accelerator's where there is one."""
    if not torch.accelerator.is_available():  # asked first: where there is none, torch 2.6 raises
        return ("cpu",)
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


@contextmanager
def autocast_off(device_types: Iterable[str]) -> Generator[None]:
    """Switch autocast off inside, whatever is set around it."""
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def autocast_off_where_on(device_types: Iterable[str]) -> AbstractContextManager[None]:
    """Return a context that does the same, at next to no cost where autocast is off: one is entered for each function
    that is called."""
    on = [
        device_type
        for device_type in device_types
        if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)  # "meta" has none
    ]
    return autocast_off(on) if on else _AS_IT_IS


_AS_IT_IS = nullcontext()


def _force_eager() -> Callable[[], None]:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def _allow_fp32_attention() -> Callable[[], None]:
    kernels = torch.nn.attention.SDPBackend
    with ExitStack() as held:
        held.enter_context(torch.nn.attention.sdpa_kernel([kernels.EFFICIENT_ATTENTION, kernels.MATH]))
        return held.pop_all().close


def _allow_tf32() -> Callable[[], None]:
    """Allow TF32 through PyTorch's old switches, which set the new ones (2.9 and later) along. Where the new ones alone
    were set, reading an old one raises, in every thread. Returns the function that undoes it."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    undo = _in_tf32(matmul, (matmul,)), _in_tf32(cudnn, (cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ())

    def restore() -> None:
        for each in undo:
            each()

    return restore


def _in_tf32(switch: Any, operations: tuple[Any, ...]) -> Callable[[], None]:
    """Allow TF32 where it is not allowed. Returns the function that undoes it.

    operations: those whose new settings the old switch sets too; the first is the one that needs TF32.
    """
    operations = tuple(each for each in operations if hasattr(each, "fp32_precision"))
    before = [each.fp32_precision for each in operations]  # their own, or what stands above them
    allowed = before[0] == "tf32" if before else switch.allow_tf32
    if allowed:  # whichever way: 'high' and 'medium' matrix products are not told apart by the old switch
        return lambda: None
    try:
        mixed = switch.allow_tf32  # off in the new settings, so on here is another's doing
    except RuntimeError:
        mixed = True
    if mixed:
        operations[0].fp32_precision = "tf32"
    else:
        switch.allow_tf32 = True

    def restore() -> None:
        if not mixed:
            switch.allow_tf32 = False
        for operation, precision in zip(operations, before, strict=True):
            inherited = precision == torch.backends.cudnn.fp32_precision  # it stands for all of CUDA
            operation.fp32_precision = "none" if inherited else precision

    return restore


EAGER_ONLY = SharedSetting(_force_eager)
TF32 = SharedSetting(_allow_tf32)
FP32_ATTENTION = SharedSetting(_allow_fp32_attention)
