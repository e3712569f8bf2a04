"""What brings weights to where they are used is one operation to the fp32 rerun, and sees the dtypes that they have."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

import torch
from comfyui_onediff_guard.precision.upcast import Fp32Mode, OneOperation, fp32_mode, run_in_fp32
from torch.overrides import TorchFunctionMode

WEIGHT = torch.tensor([300.0, -2.5], dtype=torch.float16)
BYTES = WEIGHT.view(torch.uint8)
Seen = list[torch.dtype | None]


def bring(seen: Seen, given: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A weight out of a buffer of bytes, in the dtype that is asked for."""
    seen += [given.dtype, dtype, WEIGHT.dtype]
    return BYTES.view(WEIGHT.dtype).to(dtype or given.dtype)


def test_it_views_bytes_in_the_true_dtype_and_gives_float32():
    seen: Seen = []
    moved = OneOperation(bring)
    found = run_in_fp32(lambda: moved(seen, WEIGHT, torch.float16) * WEIGHT)
    assert seen == [torch.float32, torch.float32, torch.float16]
    assert torch.equal(found, torch.tensor([90000.0, 6.25]))


def test_outside_of_a_rerun_it_is_the_function():
    seen: Seen = []
    assert OneOperation(bring)(seen, WEIGHT, torch.bfloat16).dtype is torch.bfloat16
    assert seen == [torch.float16, torch.bfloat16, torch.float16]
    assert OneOperation(bring).__doc__ == bring.__doc__


def test_it_is_one_operation_inside_other_modes_and_other_reruns_too():
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def fp32() -> AbstractContextManager[None]:
        return fp32_mode(Fp32Mode(), tf32=False)

    for first, second in ((fp32, Mode), (Mode, fp32), (fp32, fp32)):
        seen: Seen = []
        with first(), second():
            assert OneOperation(OneOperation(bring))(seen, given=WEIGHT).dtype is torch.float32
        assert seen == [torch.float32, None, torch.float16]


def test_another_thread_has_its_own_dtypes_meanwhile():
    seen: Seen = []
    with fp32_mode(Fp32Mode(), tf32=False):
        other = threading.Thread(target=OneOperation(bring), args=(seen, WEIGHT))
        other.start()
        other.join()
    assert seen == [torch.float16, None, torch.float16]


def test_an_error_comes_as_it_is_and_the_rerun_goes_on():
    def fails() -> None:
        raise KeyError("weight")

    def rerun() -> torch.Tensor:
        try:
            OneOperation(fails)()
        except KeyError:
            return WEIGHT * WEIGHT
        raise AssertionError

    assert run_in_fp32(rerun)[0] == 90000
