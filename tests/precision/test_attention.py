"""Attention kernels: PyTorch's, by name, and SageAttention's.

SageAttention itself has not been run: it needs a card. In its place stands a module of its name with its documented
call, which multiplies in int8 as it does, or gives finite noise, as its issue 162 has it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import attention
from comfyui_onediff_guard.precision.attention import KERNELS, Attended, missing, preferring
from torch.profiler import profile

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


def test_a_kernel_that_is_named_computes() -> None:
    x = torch.randn(1, 2, 80, 16)
    expected = sdpa(x, x, x)
    with preferring("math"):
        assert kernels_of(lambda: sdpa(x, x, x)) == {"math"}
    for kernel in ("flash", "cudnn", "efficient"):  # the last two take nothing on a CPU: another one does
        with preferring(kernel):
            torch.testing.assert_close(sdpa(x, x, x), expected)


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


# --- SageAttention ----------------------------------------------------------------------------------------------------

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


@pytest.fixture
def sage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """sage(function): what `sageattention.sageattn` is, installed."""

    def install(function: Any) -> None:
        monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=function))

    return install


def given(channels: int = 64) -> Given:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, channels, generator=generator).bfloat16() for _ in range(3))
    return query, key, value


def test_names_stand_in_workflow_files_and_sage_needs_a_card_and_the_package() -> None:
    assert [*KERNELS] == ["flash", "cudnn", "efficient", "math", "sage"]
    assert "not on cpu" in missing("sage", CPU)
    assert "sageattention is not installed" in missing("sage", CUDA)
    assert not any(missing(name, CPU) for name, kernel in KERNELS.items() if kernel)


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
