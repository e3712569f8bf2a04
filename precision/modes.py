"""Function modes beside torch.compile."""

from __future__ import annotations

from types import CodeType
from typing import Any

from torch._C._dynamo import eval_frame
from torch.overrides import TorchFunctionMode


class Mode(TorchFunctionMode):
    """A function mode that a compiler traces into what it compiles, and that is never compiled by itself.

    Where dynamo gives a frame up, what that calls runs one call after the other, and each mode's `__torch_function__`
    would be a frame to compile. What a property gives (`Tensor.dtype`) is a constant in such code, with no guard: the
    next tensor's is taken for the same, and its results have the wrong dtype.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _compile_what_it_calls_alone(cls.__torch_function__.__code__)


def _compile_what_it_calls_alone(code: CodeType) -> None:
    known: Any = eval_frame  # C, with no stubs; torch._dynamo's own `skip_code` would import all of the compiler
    if skip := getattr(known, "skip_code", None):  # before PyTorch 2.8
        skip(code)
    else:
        action = known._FrameAction
        known.set_code_exec_strategy(code, known._FrameExecStrategy(action.SKIP, action.DEFAULT))
