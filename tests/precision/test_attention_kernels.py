"""The registry of attention kernels: what each may be off by, and SageAttention's call.

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
from comfyui_onediff_guard.precision.attention import (
    BUDGET,
    KERNELS,
    TOLERANCE,
    Attended,
    Call,
    Errors,
    Measured,
    measure,
    over_budget,
    sage_takes,
)
from kernel_clock import timed_as

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
sdpa = torch.nn.functional.scaled_dot_product_attention
LONG = Call((1, 2, 300, 64), (1, 2, 300, 64), (1, 2, 300, 64), torch.bfloat16)
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_int8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
) -> torch.Tensor:
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
        monkeypatch.setitem(KERNELS, "sage", replace(KERNELS["sage"], lacking=lambda _device: ""))

    return install


@pytest.fixture
def sage_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_as(monkeypatch, sage=1.0)


def given(channels: int = 64) -> Given:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, channels, generator=generator).bfloat16() for _ in range(3))
    return query, key, value


@pytest.mark.parametrize(
    ("errors", "largest", "share", "refused"),
    [
        (Errors.ROUNDING, TOLERANCE * 0.01, 0.5, False),
        (Errors.ROUNDING, TOLERANCE * 0.0101, 0.0, True),
        (Errors.ROUNDING, math.inf, math.inf, True),
        (Errors.QUANTISING, 1.0, BUDGET, False),
        (Errors.QUANTISING, 0.0, 1.01 * BUDGET, True),
        (Errors.QUANTISING, math.inf, math.inf, True),
    ],
)
def test_each_class_of_errors_has_its_budget(errors: Errors, largest: float, share: float, refused: bool) -> None:
    assert bool(over_budget(errors, Measured(largest, share), least=0.01)) == refused


def test_a_rounding_error_beside_none_is_beyond_the_budget() -> None:
    assert over_budget(Errors.ROUNDING, Measured(1e-9, 1e-9), least=0.0)
    assert not over_budget(Errors.ROUNDING, Measured(0.0, 0.0), least=0.0)


def test_names_stand_in_workflow_files() -> None:
    assert ATTENTIONS == ("", "measured", "flash", "cudnn", "efficient", "math", "sage")
    assert [kernel.name for kernel in KERNELS.values()] == [*KERNELS]


def test_sage_needs_a_card_and_the_package() -> None:
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
def test_what_sage_takes(changes: Any, takes: bool) -> None:
    query, key, value = given()
    assert sage_takes(query, key, value, **changes) == takes
    assert not sage_takes(query.float(), key.float(), value.float(), **changes)
    assert not sage_takes(*given(channels=136), **changes)


@pytest.mark.usefixtures("sage_is_fast")
def test_it_is_taken_where_it_is_fast_and_within_its_budget(sage: Any) -> None:
    sage(in_int8)
    choice = measure({LONG: 3}, CPU)
    assert choice.kernel == "sage" and choice.timings["sage"].seconds < choice.timings["auto"].seconds
    assert TOLERANCE * choice.timings["auto"].error < choice.timings["sage"].error, "no rounding error any more"
    assert 0.005 < choice.timings["sage"].share < BUDGET
    assert "attention: sage, measured 2.00 times as fast here" in str(choice) and "of the norm from fp32" in str(choice)


@pytest.mark.usefixtures("sage_is_fast")
@pytest.mark.parametrize("wrong", [noise, lambda q, k, v, **_: q * math.nan])
def test_finite_noise_and_nan_are_beyond_the_budget(sage: Any, wrong: Any) -> None:
    sage(wrong)
    choice = measure({LONG: 3}, CPU)
    assert choice.kernel == "" and choice.timings["sage"].seconds < choice.timings["auto"].seconds
    assert "not sage: its error is" in str(choice) and "beyond 5%" in str(choice)


def test_what_raises_is_not_taken(sage: Any) -> None:
    def refuses(*_: Any, **__: Any) -> torch.Tensor:
        raise ValueError("Unsupported head_dim")

    sage(refuses)
    assert measure({LONG: 1}, CPU).timings == {}


class Block(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sdpa(query, key, value).unflatten(-1, (2, -1)).flatten(-2) * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_attends_by_it_compiled_or_not(sage: Any, compiled: bool) -> None:
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
