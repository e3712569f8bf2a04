"""Attention kernels: PyTorch's, by name, and SageAttention's.

SageAttention itself is not run: it needs a GPU. A module of the same name with the documented signature replaces it: it
multiplies in int8, or returns finite noise as in SageAttention's issue 162.
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


def test_preferred_kernel_computes_attention() -> None:
    x = torch.randn(1, 2, 80, 16)
    expected = sdpa(x, x, x)
    with preferring("math"):
        assert kernels_of(lambda: sdpa(x, x, x)) == {"math"}
    for kernel in ("flash", "cudnn", "efficient"):  # the last two do not run on a CPU: another one does
        with preferring(kernel):
            torch.testing.assert_close(sdpa(x, x, x), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_block_uses_its_kernel_eager_and_compiled(compiled: bool) -> None:
    torch.compiler.reset()
    x = torch.randn(1, 2, 80, 16)
    make = (lambda module: torch.compile(module, backend="aot_eager")) if compiled else (lambda module: module)
    with torch.inference_mode():
        for kernel in ("math", "flash", "math"):
            block = make(Attended(Block(), kernel))
            block(x, x, x)
            in_parts = compiled and kernel == "math"  # compiled into product, softmax, product
            assert kernels_of(lambda block=block: block(x, x, x)) == (set() if in_parts else {kernel})
    assert kernels_of(lambda: sdpa(x, x, x)) == {"flash"}, "the choice applies inside the block only"


# --- SageAttention ----------------------------------------------------------------------------------------------------

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_int8(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None) -> torch.Tensor:
    """Queries and keys in int8, with one scale per block of rows; finite for any input."""
    assert tensor_layout == "HND"

    def rounded(x: torch.Tensor) -> torch.Tensor:
        x = x.float().nan_to_num(0.0, 0.0, 0.0)
        scale = x.abs().amax((-2, -1), keepdim=True).clamp(min=1e-6) / 127
        return (x / scale).round() * scale

    made = sdpa(rounded(q), rounded(k), v.float().nan_to_num(0.0, 0.0, 0.0), is_causal=is_causal, scale=sm_scale)
    return made.to(q.dtype)


@pytest.fixture
def sage(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """sage(function): install `function` as `sageattention.sageattn`."""

    def install(function: Any) -> None:
        monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=function))

    return install


def qkv(channels: int = 64) -> Given:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 300, channels, generator=generator).bfloat16() for _ in range(3))
    return query, key, value


def test_kernel_names_are_fixed_and_sage_needs_cuda_and_its_package() -> None:
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
def test_sage_declines_unsupported_calls(sage: Any, changes: Any, takes: bool) -> None:
    sage(in_int8)
    query, key, value = qkv()
    assert (attention.sage(query, key, value, **changes) is not None) == takes
    assert attention.sage(query.float(), key.float(), value.float(), **changes) is None
    assert attention.sage(*qkv(channels=136), **changes) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_block_uses_sage_eager_and_compiled(sage: Any, compiled: bool) -> None:
    torch.compiler.reset()
    sage(in_int8)
    block = Attended(Block(), "sage")
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    with torch.inference_mode():
        assert torch.equal(run(*qkv()), in_int8(*qkv()) * 2)
        single = [each.float() for each in qkv()]
        torch.testing.assert_close(run(*single), sdpa(*single) * 2)  # PyTorch computes what Sage declines
    torch.compiler.reset()


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_inputs_give_nan_although_sage_hides_them(sage: Any, which: int, value: float) -> None:
    sage(in_int8)
    broken = qkv()
    broken[which][0, 1, 7, 3] = value
    assert in_int8(*broken).isfinite().all(), "Sage hides it"
    assert Attended(Block(), "sage")(*broken).isnan().all(), "the block does not"
