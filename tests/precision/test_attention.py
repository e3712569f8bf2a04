"""PyTorch's attention kernels: which calls there are, and which kernel is taken for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import attention
from comfyui_onediff_guard.precision import attention as attention_kernels
from comfyui_onediff_guard.precision.attention import (
    Attended,
    Call,
    Choice,
    Timing,
    attention_calls,
    measure,
    preferring,
)
from kernel_clock import timed_as
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

CPU = torch.device("cpu")
SMALL = Call((1, 2, 80, 16), (1, 2, 80, 16), (1, 2, 80, 16), torch.bfloat16)
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
sdpa = torch.nn.functional.scaled_dot_product_attention


def kernels_of(run: Callable[[], Any]) -> set[str]:
    with profile() as profiled:
        run()
    ran = {event.key for event in profiled.key_averages()}
    return {name for name, operator in OPERATORS.items() if operator in ran}


def test_a_step_on_the_meta_device_tells_its_calls() -> None:
    query, key = (torch.empty(2, 4, tokens, 8, device="meta", dtype=torch.float16) for tokens in (6, 9))
    mask = torch.empty(2, 1, 6, 9, device="meta", dtype=torch.bool)

    def step() -> None:
        for _ in range(3):
            sdpa(query, key, key, attn_mask=mask)
        sdpa(query, query, query, is_causal=True, scale=0.5)

    first = Call((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), torch.float16, ((2, 1, 6, 9), torch.bool))
    second = Call((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), torch.float16, causal=True, scale=0.5)
    assert attention_calls(step) == {first: 3, second: 1}
    assert first.with_queries(4) == Call(
        (2, 4, 4, 8), (2, 4, 9, 8), (2, 4, 9, 8), torch.float16, ((2, 1, 4, 9), torch.bool)
    )


def test_a_kernel_that_is_named_computes() -> None:
    given = attention._tensors(SMALL, CPU)
    expected = sdpa(**given)
    with preferring("math"):
        assert kernels_of(lambda: sdpa(**given)) == {"math"}
    for kernel in ("flash", "cudnn", "efficient"):  # the last two take nothing on a CPU: another one does
        with preferring(kernel):
            torch.testing.assert_close(sdpa(**given), expected)


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sdpa(x, x, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_is_computed_by_its_kernel_compiled_or_not(compiled: bool) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 80, 16)
    make = (lambda module: torch.compile(module, backend="aot_eager")) if compiled else (lambda module: module)
    with torch.inference_mode():
        for kernel in ("math", "flash", "math"):
            block = make(Attended(Block(), kernel))
            block(x)
            in_parts = compiled and kernel == "math"  # a product, a softmax and a product
            assert kernels_of(lambda block=block: block(x)) == (set() if in_parts else {kernel})
    assert kernels_of(lambda: sdpa(x, x, x)) == {"flash"}, "it holds inside the block alone"


def test_where_there_is_no_choice_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_seconds", lambda *_: pytest.fail("timed"))
    choice = measure({SMALL: 2}, CPU)
    assert choice == Choice("", {})
    assert str(choice) == "attention: PyTorch's own choice, the only one here"


def test_pytorchs_own_choice_is_kept_where_it_is_the_fastest(
    choice_here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_as(monkeypatch, auto=1.0)
    choice = measure({SMALL: 2}, CPU)
    assert choice.kernel == "" and set(choice.timings) == {"auto", "flash", "math"}
    assert str(choice) == "attention: PyTorch's own choice, measured the fastest here"
    assert all(timing.seconds > 0 and 0 < timing.error < 0.1 for timing in choice.timings.values())
    assert all(0 < timing.share < 0.01 for timing in choice.timings.values())


@pytest.fixture
def choice_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes "math" beside its one fast kernel."""
    monkeypatch.setitem(attention.KERNELS, "math", replace(attention.KERNELS["math"], timed=True))


@pytest.fixture
def flash_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, flash=1.0)


@pytest.mark.usefixtures("flash_is_fast")
def test_another_kernel_is_taken_where_it_is_faster() -> None:
    long = Call((1, 4, 700, 32), (1, 4, 700, 32), (1, 4, 700, 32), torch.bfloat16)
    with sdpa_kernel(SDPBackend.MATH):  # as if PyTorch chose so
        choice = measure({long: 1}, CPU)
    assert choice.kernel == "flash"
    assert (choice.timings["auto"].seconds, choice.timings["flash"].seconds) == (2.0, 1.0)
    assert "attention: flash, measured" in str(choice) and "times as fast here as PyTorch's own choice" in str(choice)


@pytest.mark.usefixtures("flash_is_fast")
@pytest.mark.parametrize("wrong", [0.5, math.nan])
def test_a_fast_kernel_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch, wrong: float) -> None:
    real = attention._run

    def run(name: str, given: Any) -> torch.Tensor:
        if name == "flash":
            return given["query"] + wrong
        with sdpa_kernel(SDPBackend.MATH):
            return real("auto", given)

    monkeypatch.setattr(attention, "_run", run)
    monkeypatch.setattr(attention, "_own", lambda _call, _device: SDPBackend.MATH)
    choice = measure({SMALL: 1}, CPU)
    assert choice.timings["flash"].seconds < choice.timings["auto"].seconds
    assert choice.kernel == "" and choice.timings["flash"].error > 0.4
    assert "not flash: its error is" in str(choice) and "times the least" in str(choice)


def test_nothing_to_attend_to_is_nothing_to_choose() -> None:
    assert measure({}, CPU) == Choice("", {})
    assert str(Choice("cudnn", {"auto": Timing(3.0, 0.1), "cudnn": Timing(2.0, 0.1)})).startswith(
        "attention: cudnn, measured 1.50 times"
    )


@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
def test_masks_and_causal_calls_are_timed_and_checked(mask: torch.dtype, choice_here: None) -> None:
    masked = Call((1, 2, 80, 16), (1, 2, 70, 16), (1, 2, 70, 16), torch.float32, ((1, 1, 80, 70), mask))
    causal = Call((1, 2, 80, 16), (1, 2, 80, 16), (1, 2, 80, 16), torch.float32, causal=True, scale=0.3)
    choice = measure({masked: 1, causal: 1}, CPU)
    assert len(choice.timings) == 3 and max(timing.error for timing in choice.timings.values()) < 1e-5


@pytest.mark.usefixtures("flash_is_fast")
def test_a_kernel_is_checked_at_the_whole_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is right for few queries, and wrong behind them, is not taken; nor is one that fails there."""
    long = Call((1, 2, 500, 16), (1, 2, 500, 16), (1, 2, 500, 16), torch.bfloat16)
    monkeypatch.setattr(attention, "_own", lambda _call, _device: SDPBackend.MATH)
    real = attention._run

    def wrong(name: str, given: Any) -> torch.Tensor:
        made = real(name, given)
        if name == "flash" and made.shape[-2] > 400:
            made[..., 400:, :] = 0.25
        return made

    monkeypatch.setattr(attention, "_run", wrong)
    assert "not flash: its error is" in str(measure({long: 1}, CPU))
    assert measure({long.with_queries(100): 1}, CPU).kernel == "flash"

    def failing(name: str, given: Any) -> torch.Tensor:
        if name == "flash" and given["query"].shape[-2] > 400:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return real(name, given)

    monkeypatch.setattr(attention, "_run", failing)
    choice = measure({long: 1}, CPU)
    assert choice.kernel == "" and choice.left_out == {"flash": "it failed (OutOfMemoryError)"}


def test_a_cpu_offers_one_kernel_and_a_card_three() -> None:
    def names(device: str) -> list[str]:
        return [kernel.name for kernel in attention_kernels.offered(torch.device(device))]

    assert names("cpu") == ["flash"] and names("mps") == []
    assert names("cuda") == ["flash", "cudnn", "efficient"]
