"""Attention on the CPU with few keys returns 0 for a row whose scores are all NaN; the guard detects it."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import find_c_compiler
from comfyui_onediff_guard.precision.attention import Attended, sdpa
from comfyui_onediff_guard.precision.overflow_detection import (
    BlockWithNanAttention,
    ClipDetector,
    propagate_nonfinite_attention,
)
from denoisers import MODELS, build, step
from guards import guarded, report_of
from test_attention import Block, in_int8, qkv
from torch import nn
from torch.overrides import _get_current_function_mode_stack

HALVES = [torch.float16, torch.bfloat16]
CPU = torch.ones(1)  # the input of a call


def projected(keys: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value [2, 3, tokens, 16]."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 3, 8, 16), (2, 3, keys, 16), (2, 3, keys, 16)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("keys", [1, 6, 15, 16, 40])
@pytest.mark.parametrize(("which", "value"), [(0, torch.nan), (0, torch.inf), (1, torch.nan), (1, -torch.inf)])
def test_attention_is_nonfinite_for_nonfinite_query_or_key(dtype, keys, which, value):
    given = projected(keys, dtype)
    given[which][1, 2, :, 3:] = value
    with propagate_nonfinite_attention(CPU):
        assert not torch.isfinite(sdpa(*given)).all()
        query, key, values = given
        assert not torch.isfinite(sdpa(query=query, key=key, value=values)).all(), "with keyword arguments too"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("keys", [1, 6, 40])
def test_finite_attention_is_bit_equal_to_plain_sdpa(dtype, keys):
    given = projected(keys, dtype)
    given[0][0, 0] = torch.finfo(dtype).max / 4  # their product overflows
    given[1][0, 0] = -torch.finfo(dtype).max / 4
    mask = torch.zeros(8, keys, dtype=dtype).masked_fill_(torch.arange(keys) > 3, -torch.inf)
    for more in ({}, {"attn_mask": mask}, {"is_causal": True}):
        expected = sdpa(*given, **more)
        with propagate_nonfinite_attention(CPU):
            assert torch.isfinite(expected).all() and torch.equal(sdpa(*given, **more), expected)


def test_mode_is_not_active_for_inputs_on_other_devices():
    for inputs in ((), torch.empty(1, device="meta"), {"x": torch.empty(1, device="meta"), "timestep": CPU}):
        with propagate_nonfinite_attention(inputs):
            assert not _get_current_function_mode_stack()
    with propagate_nonfinite_attention({"tokens": torch.ones(1, dtype=torch.int64), "text": None}):
        assert _get_current_function_mode_stack()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (3, 2, 16))
        return sdpa(*heads.permute(2, 0, 3, 1, 4).unbind(0))


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.skipif(not find_c_compiler(), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", HALVES)
def test_inductor_keeps_the_nonfinite_check(dtype, dynamo):
    """Inductor simplifies a product with 0 to 0, which would remove the check."""
    module = Attending().to(dtype).requires_grad_(False)
    made = torch.compile(module, backend="inductor", fullgraph=True)
    x, large = torch.randn(2, 6, 32).to(dtype), torch.full((2, 6, 32), torch.finfo(dtype).max / 4, dtype=dtype)
    with torch.no_grad(), propagate_nonfinite_attention(CPU):
        assert torch.allclose(made(x), module(x), rtol=0.05, atol=0.05)
        module.qkv.weight.zero_()[:32] = torch.eye(32)  # the query is the input, and scores are 0
        assert torch.isfinite(made(large)).all(), "large but finite"
        for value in (torch.nan, torch.inf):
            for rows in (slice(0, 32), slice(32, 64)):  # of the query, of the key
                module.qkv.bias.zero_()[rows] = value
                assert not torch.isfinite(made(x)).all(), (value, rows)


@pytest.mark.skipif(not find_c_compiler(), reason="inductor needs a C++ compiler")
def test_inductor_keeps_the_check_of_sage_inputs(monkeypatch, dynamo):
    monkeypatch.setitem(sys.modules, "sageattention", SimpleNamespace(sageattn=in_int8))
    run = torch.compile(Attended(Block(), "sage"), backend="inductor", fullgraph=True)
    broken = qkv()
    broken[1][0, 1, 7, 3] = -torch.inf
    with torch.inference_mode():
        assert run(*qkv()).isfinite().all() and run(*broken).isnan().all()


SVD = MODELS["svd-xt"]
INPUTS = ("sample", "encoder_hidden_states", "added_time_ids")


@pytest.fixture(scope="module")
def unet() -> Any:
    """A small diffusers UNet of Stable Video Diffusion, in fp16."""
    return build(SVD, SVD.sizes["tiny"], torch.device("cpu"), torch.float16)


@pytest.fixture
def call(unet: Any) -> dict[str, Any]:
    return step(SVD, unet.config, SVD.sizes["tiny"], torch.device("cpu"), torch.float16)


@pytest.mark.parametrize("attention", ["attn1", "attn2"])
def test_overflow_in_temporal_attention_is_detected_and_recomputed(unet, call, attention):
    broken = copy.deepcopy(unet)
    temporal: Any = broken.mid_block.attentions[0].temporal_transformer_blocks[0]
    attending = getattr(temporal, attention)
    query, key = attending.to_q.weight, attending.to_k.weight
    query.sign_().mul_(6e4)
    query[1::2], key[1::2] = query[::2], -key[::2]  # a row's scores are all inf - inf, or all 0
    guard = guarded(broken, report=report_of("fp16", "SVD"), inputs=INPUTS)
    in_float = {name: value.float() if name in INPUTS else value for name, value in call.items()}
    expected = copy.deepcopy(broken).float()(**in_float)[0]
    with torch.no_grad():
        plain = broken(**call)[0]
        made = guard(**call)[0]
    wrong = ((plain.float() - expected).norm() / expected.norm()).item()
    assert torch.isfinite(plain).all() and wrong > 0.01, "plain fp16 is finite and wrong"
    assert torch.allclose(made, expected, rtol=1e-3, atol=1e-4)
    (record,) = guard.report.steps
    assert record.outcome == "rerun" and f"temporal_transformer_blocks.0.{attention}.to_q" in record.note


def test_healthy_call_is_bit_equal_to_diffusers(unet, call):
    guard = guarded(unet, report=report_of("fp16", "SVD"), inputs=INPUTS)
    with torch.no_grad():
        assert torch.equal(guard(**call)[0], unet(**call)[0])
    assert guard.report.reruns == 0 and not _get_current_function_mode_stack()


@pytest.mark.parametrize("shown", [True, False])
def test_compiled_block_runs_without_mode_and_keeps_callers_choice(shown, dynamo):
    """Otherwise the mode would handle each matrix product that compiled code calls."""
    modes: list[Any] = []

    def backend(graph, _inputs):
        def run(*args: Any) -> Any:
            modes.append(_get_current_function_mode_stack())
            return graph.forward(*args)

        return run

    module = Attending().half().requires_grad_(False)
    made = torch.compile(BlockWithNanAttention(module), backend=backend, fullgraph=True)
    module.qkv.weight[:32] = torch.nan  # the query's
    x = torch.randn(2, 6, 32).half()
    with torch.no_grad(), propagate_nonfinite_attention(CPU if shown else ()):
        outer = _get_current_function_mode_stack()
        assert BlockWithNanAttention.run(made, x).isnan().all() == shown
        assert _get_current_function_mode_stack() == outer
        with ClipDetector("fp16") as above:
            assert BlockWithNanAttention.run(made, x).isnan().all() == shown
    assert modes == [[], [above]]
