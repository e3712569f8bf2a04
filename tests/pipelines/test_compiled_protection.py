"""Overflow protection in compiled blocks: the first step scales each row, then one graph serves all blocks and later
runs; also with LoRAs, offload, over ranks, and with growing values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import rank_runs
import small_runs
import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.precision import learned_scales
from comfyui_onediff_guard.precision.guard import RENEWED
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED, NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.planned_layers import InPlannedBlock
from lora_models import training
from overflows import fails_in_half
from small_runs import error, opened, prompts
from weights_apart import simulated_offload

CLOSE = 3e-3  # relative error of the norm, against fp32 and uncompiled runs


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Drop graphs of other tests, which would fit."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[torch.Tensor, int, int]]:
    """run(handle, model) → latents of a run without failures; numbers of row-scaled steps and of new graphs."""
    learning: list[int] = []
    begin = learned_scales.LearningMode.begin
    monkeypatch.setattr(
        learned_scales.LearningMode, "begin", lambda mode, inputs: learning.append(1) or begin(mode, inputs)
    )

    def run(handle: PipelineHandle, model: str, **more: Any) -> tuple[torch.Tensor, int, int]:
        prompts(handle)
        learning.clear()
        made, report = sampled(handle, model, **more)
        assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * len(report.steps)
        assert report.backend == handle.backend.name and report.learned == NOTHING
        assert report.protection == ALL_LAYERS_SCALED
        return made, len(learning), report.graphs or 0

    return run


def sampled(handle: PipelineHandle, model: str, **more: Any) -> Any:
    return small_runs.sampled(handle, model, steps=3, seed=1, **more)


@pytest.mark.parametrize(
    ("model", "overflow"), [("2b", "none"), ("2b", "inside"), ("cogview3", "stream"), ("wan", "stream")]
)
def test_scales_are_learned_in_one_step_and_compiled_in_one_graph(
    run: Any, traced_alone: None, model: str, overflow: str
) -> None:
    right, _ = sampled(opened(model, overflow=overflow), model)
    handle = opened(model, precision="fp16", overflow=overflow, backend="inductor")
    made, *first = run(handle, model)
    again, *second = run(handle, model)
    assert (first, second) == ([1, 1], [0, 0])
    assert error(made, right) < CLOSE and error(again, right) < CLOSE


def test_inductor_learns_in_one_step_and_compiles_one_graph(run: Any) -> None:
    right, _ = sampled(opened("2b", overflow="stream"), "2b")
    handle = opened("2b", precision="fp16", overflow="stream", backend="inductor")
    made, *once = run(handle, "2b")
    assert once == [1, 1] and error(made, right) < CLOSE and run(handle, "2b")[1:] == (0, 0)


def test_each_set_of_loras_learns_its_own_scales(run: Any, traced_alone: None, tmp_path: Path) -> None:
    exact, train = opened("2b"), training(tmp_path)
    model = exact.store.module("transformer", "fp32")
    one, two = train(model), train(model, seed=2)
    sets = [(), (Lora(one),), (Lora(one, 3.0), Lora(two, -2.0))]
    right = [sampled(reduce(add_lora, loras, exact), "2b")[0] for loras in sets]
    handle = opened("2b", precision="fp16", backend="inductor")
    for number, loras in enumerate(sets):
        made, learned, _ = run(reduce(add_lora, loras, handle), "2b")
        assert learned == 1 and error(made, right[number]) < CLOSE < error(made, right[number - 1])
    for loras in (sets[-1], ()):  # scales of other sets are not kept
        assert run(reduce(add_lora, loras, handle), "2b")[1:] == (0, 0)


@pytest.mark.parametrize("offload", ["group", "model"])
def test_offloaded_run_is_bit_equal_and_learns_in_one_step(run: Any, traced_alone: None, offload: str) -> None:
    right, *_ = run(opened("2b", precision="fp16", backend="inductor"), "2b")
    with simulated_offload() if offload == "group" else nullcontext():
        handle = opened("2b", offload, "fp16", backend="inductor")
        handle.store.scales.clear()
        made, *once = run(handle, "2b")
        assert torch.equal(made, right) and once[0] == 1
        assert run(handle, "2b")[1:] == (0, 0)


def test_values_beyond_planned_scales_are_rescaled_in_fp16(run: Any, traced_alone: None) -> None:
    handle = opened("2b", precision="fp16", backend="inductor")
    layer = handle.store.module("transformer", "fp16").transformer_blocks[1].ff.net[0].proj

    def grow(done: int, _total: int, _report: Any) -> None:
        if done == 2:
            layer.bias.fill_(6e4)

    with torch.no_grad():
        made, report = sampled(handle, "2b", step_done=grow)
    assert [(step.outcome, step.note) for step in report.steps] == [("finite", ""), ("finite", ""), ("finite", RENEWED)]
    assert made.isfinite().all() and report.reruns == 0
    assert run(handle, "2b")[1] == 0, "later runs know the new scales"


def test_run_with_failing_step_leaves_no_scales_to_later_runs(run: Any, traced_alone: None) -> None:
    right, _ = sampled(opened("2b"), "2b")
    handle = opened("2b", precision="fp16", backend="inductor")
    layer = handle.store.module("transformer", "fp16").transformer_blocks[1].ff.net[0]
    hook = layer.register_forward_hook(fails_in_half)
    _, report = sampled(handle, "2b")
    hook.remove()
    assert report.reruns == 1 and report.learned == PrecisionOverrides(whole_run_fp32=True)
    made, *once = run(handle, "2b")
    assert once == [1, 1] and error(made, right) < CLOSE


@pytest.mark.parametrize("guidance", [1.0, 5.0], ids=["shared tokens", "one half per rank"])
def test_ranks_agree_bit_equal_and_are_near_fp32(model_folder: Callable[..., Path], guidance: float) -> None:
    exact = rank_runs.Case("2b", model_folder("2b", "stream"), steps=3, guidance=guidance)
    cases = [replace(exact, precision="fp16", backend=backend) for backend in ("eager", "inductor")]
    right = rank_runs.sampled(exact).latents
    by_rank = rank_runs.run_in_ranks(2, rank_runs.run_cases, cases)
    for first, second in zip(*by_rank, strict=True):
        assert torch.equal(first.latents, second.latents) and first.steps == second.steps
        assert {(dtype, outcome) for dtype, outcome, _ in first.steps} == {("fp16", "finite")}
        assert error(first.latents, right) < CLOSE


def test_number_minus_tensor_is_compiled_in_one_graph() -> None:
    """dynamo takes Tensor.__rsub__ for a function that is in none of its sets, and its guard then fails."""
    block = InPlannedBlock(lambda x: (1.0 - x) + (x - x.half()), safe_attention=True)
    x = torch.full((4,), 3.0)
    assert torch.equal(torch.compile(block, backend="eager", fullgraph=True)(x), 1.0 - x)
