"""PyTorch's own settings that a rerun in fp32 holds while it runs. They are the process's, so all reruns share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

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


class Tf32:
    """TF32 in this process's matrix products and convolutions: allowed while a run holds it so, and off while one
    computes in plain fp32, which PyTorch's convolutions do not do by default. Plain fp32 wins where runs overlap."""

    def __init__(self) -> None:
        self._holders = {True: 0, False: 0}
        self._now: bool | None = None
        self._restore: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    @property
    def is_held(self) -> bool:
        return any(self._holders.values())

    @contextmanager
    def held(self, allowed: bool) -> Generator[None]:
        """Hold it on or off inside."""
        self._count(allowed, 1)
        try:
            yield
        finally:
            self._count(allowed, -1)

    def off(self, wanted: bool) -> AbstractContextManager[None]:
        """Hold it off inside, or where that is not wanted, leave it as it is."""
        return self.held(False) if wanted else _AS_IT_IS

    def _count(self, allowed: bool, one: int) -> None:
        with self._lock:
            self._holders[allowed] += one
            wanted = False if self._holders[False] else True if self._holders[True] else None
            if wanted is not self._now:
                self._restore()
                self._restore, self._now = (lambda: None) if wanted is None else _set_tf32(wanted), wanted


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

    products = _Switch(torch.get_float32_matmul_precision, write_products, ("highest", "high"))
    convolutions = _Switch(lambda: cudnn.allow_tf32, lambda value: setattr(cudnn, "allow_tf32", value), (False, True))
    undo = (
        products.turned(on, (matmul, mkldnn.matmul) if hasattr(mkldnn, "matmul") else (matmul,)),
        convolutions.turned(on, (cudnn.conv, cudnn.rnn) if hasattr(cudnn, "conv") else ()),
    )

    def restore() -> None:
        for each in undo:
            each()

    return restore


class _Switch(NamedTuple):
    """An old switch of TF32, and its values for off and on."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    values: tuple[Any, Any]

    def turned(self, on: bool, operations: tuple[Any, ...]) -> Callable[[], None]:
        """Set TF32 where it is not set so. Returns the function that undoes it.

        operations: those whose new settings the old switch sets too; the first is the one that it is about.
        """
        operations = tuple(each for each in operations if hasattr(each, "fp32_precision"))
        before = [each.fp32_precision for each in operations]  # their own, or what stands above them
        try:
            old = self.read()
            is_on = before[0] == "tf32" if before else old != self.values[False]
            mixed = (old != self.values[False]) != is_on  # by another's new settings alone
        except RuntimeError:
            old, is_on, mixed = None, before[0] == "tf32", True
        if is_on == on:
            return lambda: None
        if mixed:
            for operation in operations[:1] if on else operations:
                operation.fp32_precision = "tf32" if on else "ieee"
        else:
            self.write(self.values[on])

        def restore() -> None:
            if not mixed:
                self.write(old)
            for operation, precision in zip(operations, before, strict=True):
                inherited = precision == torch.backends.cudnn.fp32_precision  # it stands for all of CUDA
                operation.fp32_precision = "none" if inherited else precision

        return restore


EAGER_ONLY = SharedSetting(_force_eager)
TF32 = Tf32()
FP32_ATTENTION = SharedSetting(_allow_fp32_attention)
