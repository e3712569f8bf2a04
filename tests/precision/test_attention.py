"""Attention kernels: which calls there are, what each kernel may be off by, and which one is taken.

SageAttention itself has not been run: it needs a card. In its place stands a module of its name with its documented
call, which multiplies in int8 as it does, or gives finite noise, as its issue 162 has it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import ATTENTIONS
from comfyui_onediff_guard.precision import attention
from comfyui_onediff_guard.precision.attention import (
    BUDGET,
    KERNELS,
    TOLERANCE,
    Attended,
    AttentionCall,
    Error,
    KernelChoice,
    attention_calls,
    measure,
    offered,
    preferring,
)
from kernel_clock import timed_as
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def call_of(tokens: int, channels: int = 16, dtype: torch.dtype = torch.bfloat16, **more: Any) -> AttentionCall:
    shape = (1, 2, tokens, channels)
    return AttentionCall(shape, shape, shape, dtype, **more)


SMALL, LONG = call_of(80), call_of(300, 64)
OPERATORS = {
    "flash": "aten::_scaled_dot_product_flash_attention_for_cpu",
    "math": "aten::_scaled_dot_product_attention_math",
}
sdpa = torch.nn.functional.scaled_dot_product_attention


class Block(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key, value).unflatten(-1, (2, -1)).flatten(-2) * 2


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

    first = AttentionCall((2, 4, 6, 8), (2, 4, 9, 8), (2, 4, 9, 8), torch.float16, ((2, 1, 6, 9), torch.bool))
    second = AttentionCall((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), torch.float16, causal=True, scale=0.5)
    assert attention_calls(step) == {first: 3, second: 1}
    assert first.with_queries(4) == AttentionCall(
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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_is_computed_by_its_kernel_compiled_or_not(compiled: bool) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 80, 16)
    make = (lambda module: torch.compile(module, backend="aot_eager")) if compiled else (lambda module: module)
    with torch.inference_mode():
        for kernel in ("math", "flash", "math"):
            block = make(Attended(Block(), kernel))
            block(x, x, x)
            in_parts = compiled and kernel == "math"  # a product, a softmax and a product
            assert kernels_of(lambda block=block: block(x, x, x)) == (set() if in_parts else {kernel})
    assert kernels_of(lambda: sdpa(x, x, x)) == {"flash"}, "it holds inside the block alone"


def test_where_there_is_no_choice_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_seconds", lambda *_: pytest.fail("timed"))
    choice = measure({SMALL: 2}, CPU)
    assert choice == measure({}, CPU) == KernelChoice("", {})
    assert str(choice) == "attention: PyTorch's own choice, the only one here"


def test_pytorchs_own_choice_is_kept_where_it_is_the_fastest(choice_here, monkeypatch):
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


def test_another_kernel_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, flash=1.0)
    with sdpa_kernel(SDPBackend.MATH):  # as if PyTorch chose so
        choice = measure({call_of(700, 32): 1}, CPU)
    assert choice.kernel == "flash"
    assert (choice.timings["auto"].seconds, choice.timings["flash"].seconds) == (2.0, 1.0)
    assert str(choice).startswith("attention: flash, measured 2.00 times as fast here as PyTorch's own choice")


def fails(_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("begins", [0, 400])
@pytest.mark.parametrize("change", [lambda made: made + 0.5, lambda made: made * math.nan, fails])
def test_a_fast_kernel_that_is_wrong_or_fails_at_the_whole_length_is_not_taken(change, begins, monkeypatch) -> None:
    """Also one that is right for few queries, and not behind them."""
    timed_as(monkeypatch, flash=1.0)
    real = attention._run

    def run(name: str, given: Any) -> torch.Tensor:
        made = real(name, given)
        if name == "flash" and made.shape[-2] > begins:
            made[..., begins:, :] = change(made[..., begins:, :])
        return made

    monkeypatch.setattr(attention, "_run", run)
    monkeypatch.setattr(attention, "_own", lambda _call, _device: SDPBackend.MATH)
    choice = measure({call_of(500): 1}, CPU)
    assert choice.kernel == "" and measure({call_of(100): 1}, CPU).kernel == ("flash" if begins else "")
    if change is not fails:
        assert choice.timings["flash"].seconds < choice.timings["auto"].seconds
        assert not choice.timings["flash"].error < 0.4
        assert "not flash: its error is" in str(choice) and "times the least" in str(choice)
    elif begins:
        assert choice.left_out == {"flash": "it failed (OutOfMemoryError)"}


@pytest.mark.parametrize("mask", [torch.bool, torch.float32])
def test_masks_and_causal_calls_are_timed_and_checked(mask: torch.dtype, choice_here: None) -> None:
    masked = AttentionCall((1, 2, 80, 16), (1, 2, 70, 16), (1, 2, 70, 16), torch.float32, ((1, 1, 80, 70), mask))
    causal = call_of(80, dtype=torch.float32, causal=True, scale=0.3)
    choice = measure({masked: 1, causal: 1}, CPU)
    assert len(choice.timings) == 3 and max(timing.error for timing in choice.timings.values()) < 1e-5


@pytest.mark.parametrize(
    ("device", "names"), [("cpu", ["flash"]), ("mps", []), ("cuda", ["flash", "cudnn", "efficient"])]
)
def test_a_cpu_offers_one_kernel_and_a_card_three(device: str, names: list[str]) -> None:
    assert [kernel.name for kernel in offered(torch.device(device))] == names


# --- SageAttention, and what kernels may be off by ------------------------------------------------------------------

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_int8(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None) -> torch.Tensor:
    """Queries and keys in int8, with a scale a block of rows; finite whatever it is given."""
    assert tensor_layout == "HND"

    def rounded(x: torch.Tensor) -> torch.Tensor:
        x = x.float().nan_to_num(0.0, 0.0, 0.0)
        scale = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-6) / 127
        return (x / scale).round() * scale

    made = sdpa(rounded(q), rounded(k), v.float().nan_to_num(0.0, 0.0, 0.0), is_causal=is_causal, scale=sm_scale)
    return made.to(q.dtype)


def noise(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)


@pytest.fixture
def sage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """sage(function): what `sageattention.sageattn` is, installed, and allowed on a CPU."""

    def install(function: Any) -> None:
        monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=function))
        timed_as(monkeypatch, sage=1.0)
        monkeypatch.setitem(KERNELS, "sage", replace(KERNELS["sage"], lacking=lambda _device: ""))

    return install


def given(channels: int = 64) -> Given:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, channels, generator=generator).bfloat16() for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(
    ("quantises", "largest", "share", "least", "refused"),
    [
        (False, TOLERANCE * 0.01, 0.5, 0.01, False),
        (False, TOLERANCE * 0.0101, 0.0, 0.01, True),
        (False, math.inf, math.inf, 0.01, True),
        (False, 1e-9, 1e-9, 0.0, True),  # beside none
        (False, 0.0, 0.0, 0.0, False),
        (True, 1.0, BUDGET, 0.01, False),
        (True, 0.0, 1.01 * BUDGET, 0.01, True),
        (True, math.inf, math.inf, 0.01, True),
    ],
)
def test_each_class_of_errors_has_its_budget(quantises, largest, share, least, refused) -> None:
    assert bool(Error(largest, share).over_budget(quantises, least)) == refused


def test_names_stand_in_workflow_files_and_sage_needs_a_card_and_the_package() -> None:
    assert ATTENTIONS == ("", "measured", "flash", "cudnn", "efficient", "math", "sage")
    assert [kernel.name for kernel in KERNELS.values()] == [*KERNELS]
    assert "not on cpu" in KERNELS["sage"].lacking(CPU)
    assert "sageattention is not installed" in KERNELS["sage"].lacking(CUDA)
    assert not any(kernel.lacking(CPU) for kernel in KERNELS.values() if kernel.torch)


@pytest.mark.parametrize(
    ("changes", "takes"),
    [
        ({}, True),
        ({"is_causal": True, "scale": 0.3}, True),
        ({"attn_mask": torch.ones(300, 300, dtype=torch.bool)}, False),
        ({"dropout_p": 0.1}, False),
        ({"enable_gqa": True}, False),
    ],
)
def test_what_sage_takes(sage: Any, changes: Any, takes: bool) -> None:
    sage(in_int8)
    query, key, value = given()
    assert (attention.sage(query, key, value, **changes) is not None) == takes
    assert attention.sage(query.float(), key.float(), value.float(), **changes) is None
    assert attention.sage(*given(channels=136), **changes) is None


def test_sage_is_taken_where_it_is_fast_and_within_its_budget(sage: Any) -> None:
    sage(in_int8)
    choice = measure({LONG: 3}, CPU)
    assert choice.kernel == "sage" and choice.timings["sage"].seconds < choice.timings["auto"].seconds
    assert TOLERANCE * choice.timings["auto"].error < choice.timings["sage"].error, "no rounding error any more"
    assert 0.005 < choice.timings["sage"].share < BUDGET
    assert "attention: sage, measured 2.00 times as fast here" in str(choice) and "of the norm from fp32" in str(choice)


def refuses(*_: Any, **__: Any) -> torch.Tensor:
    raise ValueError("Unsupported head_dim")


@pytest.mark.parametrize("wrong", [noise, lambda q, k, v, **_: q * math.nan, refuses])
def test_finite_noise_and_nan_are_beyond_the_budget_and_what_raises_is_not_taken(sage: Any, wrong: Any) -> None:
    sage(wrong)
    choice = measure({LONG: 3}, CPU)
    if wrong is refuses:
        assert choice.timings == {}
    else:
        assert choice.kernel == "" and choice.timings["sage"].seconds < choice.timings["auto"].seconds
        assert "not sage: its error is" in str(choice) and "beyond 5%" in str(choice)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_attends_by_sage_compiled_or_not(sage: Any, compiled: bool) -> None:
    torch.compiler.reset()
    sage(in_int8)
    block = Attended(Block(), "sage")
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    with torch.inference_mode():
        assert torch.equal(run(*given()), in_int8(*given()) * 2)
        single = [each.float() for each in given()]
        torch.testing.assert_close(run(*single), sdpa(*single) * 2)  # what it does not take, PyTorch computes
    torch.compiler.reset()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_out_nan_although_sage_hides_it(sage: Any, which: int, value: float) -> None:
    sage(in_int8)
    broken = given()
    broken[which][0, 1, 7, 3] = value
    assert in_int8(*broken).isfinite().all(), "hidden"
    assert Attended(Block(), "sage")(*broken).isnan().all(), "and seen"
