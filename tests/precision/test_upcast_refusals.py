"""What the fp32 rerun cannot run is named, and errors about something else show as themselves."""

from __future__ import annotations

import linecache
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from comfyui_onediff_guard.precision.upcast import RerunUnsupported, run_in_fp32
from torch import nn
from torch.nn import functional as F

HALVES = (torch.float16, torch.bfloat16)


class Threaded(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2).half()

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.inner, x).result()


def test_child_threads_are_named():
    with pytest.raises(RerunUnsupported, match=r"'inner' \(Linear\) cannot run in float32"):
        run_in_fp32(Threaded(), torch.zeros(1, 2, dtype=torch.float16))


@torch.library.custom_op("onediff_guard_test::half_attention", mutates_args=())
def half_attention(q: torch.Tensor) -> torch.Tensor:
    if q.dtype not in HALVES:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    return q.clone()


class HalfAttention(nn.Module):
    def forward(self, q):
        return half_attention(q)


def test_attention_for_half_only_is_named():
    model = nn.ModuleDict({"attn": HalfAttention()})
    model.forward = lambda q: model["attn"](q)
    q = torch.zeros(2, dtype=torch.float16)
    with pytest.raises(RerunUnsupported, match=r"'attn' \(HalfAttention\).*FlashAttention only support"):
        run_in_fp32(model, q)
    assert model(q).dtype == torch.float16


def test_attention_restricted_to_half_kernels_is_opened_for_the_rerun():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(1, 2, 8, 16).half()
    expected = F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        found = run_in_fp32(lambda: F.scaled_dot_product_attention(q, q, q))
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.allclose(found, expected, atol=1e-6)


class Checked(nn.Module):
    """Attention by a kernel for half precision only, which says so in its own way."""

    def __init__(self, check):
        super().__init__()
        self.check = check
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16), requires_grad=False)

    def forward(self, x):
        query = x @ self.weight
        self.check(query)
        return query


def diffusers_check(query):
    """What its attention backends for half precision call first."""
    from diffusers.models import attention_dispatch

    attention_dispatch._check_qkv_dtype_bf16_or_fp16(query, query, query)


def type_error(query):
    if query.dtype not in HALVES:
        raise TypeError(f"unsupported dtype {query.dtype}, only half precision")


def assertion_with_words(query):
    assert query.dtype in HALVES, "Input tensors must be in dtype of torch.float16 or torch.bfloat16"


ASSERTION = "assert query.dtype in (torch.float16, torch.bfloat16)"


def assertion_alone(query):
    file = "half_kernel.py"
    linecache.cache[file] = (len(ASSERTION), None, [f"{ASSERTION}\n"], file)
    exec(compile(ASSERTION, file, "exec"), {"torch": torch, "query": query})  # pytest rewrites those of this file


@pytest.mark.parametrize(
    ("check", "kind", "words"),
    [
        (diffusers_check, ValueError, "must be either bfloat16 or float16"),
        (type_error, TypeError, "only half precision"),
        (assertion_with_words, AssertionError, "must be in dtype of torch.float16"),
        (assertion_alone, AssertionError, r"\(assert query\.dtype in"),
    ],
)
def test_a_kernel_that_refuses_float32_in_any_way_is_named(check, kind, words):
    model, x = nn.Sequential(nn.Identity(), Checked(check)), torch.zeros(1, 2, dtype=torch.float16)
    model(x)
    with pytest.raises(RerunUnsupported, match=rf"'1' \(Checked\) cannot run in float32: .*{words}") as refused:
        run_in_fp32(model, x)
    assert type(refused.value.__cause__) is kind


@pytest.mark.parametrize(
    "error",
    [
        TypeError("forward() got an unexpected keyword argument 'dtype'"),
        TypeError("empty(): argument 'dtype' must be torch.dtype, not str"),
        TypeError("forward() missing 1 required positional argument: 'half'"),
        ValueError("the width must be half of the height"),
        RuntimeError("half of the frames are missing"),
        AssertionError(),
        AssertionError("3 frames"),
        KeyError("dtype"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("where", ["in forward", "in a thread"])
def test_an_error_about_something_else_shows_as_itself(error, where):
    def fails():
        raise error

    def forward():
        if where == "in forward":
            return fails()
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(fails).result()

    with pytest.raises(type(error)) as shown:
        run_in_fp32(forward)
    assert shown.value is error


def test_a_threads_complaint_about_dtypes_is_kept_as_the_cause():
    with pytest.raises(RerunUnsupported, match="a thread of its own") as refused:
        run_in_fp32(Threaded(), torch.zeros(1, 2, dtype=torch.float16))
    assert isinstance(refused.value.__cause__, RuntimeError)
