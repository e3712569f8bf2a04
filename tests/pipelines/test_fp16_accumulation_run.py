"""Whole sampling runs with fp16 accumulation, on a CPU that emulates the tensor cores of a GeForce card
(scripts/benchmarks/fp16_sums_on_cpu.py). Results of a real card's kernels may differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision import accumulation as switches
from comfyui_onediff_guard.precision import planned_layers, planned_products
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.overrides import MAX_FP16_ERROR, parse
from comfyui_onediff_guard.precision.planned_products import float32_product
from comfyui_onediff_guard.precision.policy import PlanImpossible
from fp16_sums_on_cpu import Fp16SumsOnCpu, a_card_with_fp16_sums
from hostile import rewrite
from small_runs import error, sampled


def switched_on() -> bool:
    return bool(torch.backends.cuda.matmul.allow_fp16_accumulation)


AUTO, FP16 = Accumulation.AUTO, Accumulation.FP16
BROKEN, NORM = "transformer_blocks.1.attn1.to_q", "transformer_blocks.1.norm1.norm"  # of CogVideoX


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fp16SumsOnCpu]:
    for module in (planned_products, planned_layers):  # cuBLAS has no such kernel with float32 output
        made = lambda *given: pytest.fail("not supported") if switched_on() else float32_product(*given)  # noqa: E731
        monkeypatch.setattr(module, "float32_product", made)
    with a_card_with_fp16_sums() as card:
        yield card
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PipelineHandle]:
    monkeypatch.setattr(handles, "verified_architecture", lambda *_: ARCHITECTURES["sm89"])

    def open_in(model: str | Path, accumulation: Accumulation = FP16, **more: Any) -> PipelineHandle:
        options = {"precision": "fp16", "accumulation": accumulation, "profiles": tmp_path / "kept"}
        return small_runs.opened(model, **options | more)

    return open_in


@pytest.fixture
def overflowing(copy: Callable[[str], Path]) -> Path:
    """The folder of a CogVideoX in which one layer's sums leave fp16's range half-way."""
    folder = copy("2b")

    def change(weights: dict[str, torch.Tensor]) -> None:
        half = weights[f"{BROKEN}.weight"].shape[1] // 2
        weights[f"{NORM}.weight"].zero_()
        weights[f"{NORM}.bias"].fill_(64.0)
        weights[f"{BROKEN}.weight"][:, :half], weights[f"{BROKEN}.weight"][:, half:] = 128.0, -128.0
        weights[f"{BROKEN.replace('to_q', 'to_out.0')}.weight"].zero_()  # else it would dominate

    rewrite(folder, "transformer", change)
    return folder


def found_error(handle: PipelineHandle) -> float:
    found = handle.store.learned[handle.memory_key(handle.family.denoiser, "fp16")].fp16_error
    assert found is not None
    return found


def note_of(report: Any) -> str:
    (note,) = [note for note in report.notes if note.startswith("fp16 accumulation in the ")]
    return note.partition(": ")[2]


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "cogview3", "wan", "svd"])
def test_fp16_accumulation_is_near_plain_run_in_every_family(opened, card, model: str) -> None:
    plain, report = sampled(opened(model, AUTO), model)
    assert card.launched == 0 and report.plan.fp16_sums_reason == ""
    handle = opened(model)
    made, report = sampled(handle, model)
    assert 0 < found_error(handle) <= MAX_FP16_ERROR and note_of(report).startswith("on, it changes a step by 0.")
    assert [step.outcome for step in report.steps] == ["finite"] * len(report.steps)
    assert 0 < error(made, plain) < 4 * MAX_FP16_ERROR
    before = card.launched
    assert torch.equal(sampled(opened(model, AUTO), model)[0], plain), "bit-equal when it is off"
    assert card.launched == before


@pytest.mark.parametrize("half_way", [False, True])
def test_overflow_is_scaled_with_fp16_accumulation_too(opened, overflowing, card, half_way: bool) -> None:
    """At the end of a sum or half-way, and only with existing kernels."""
    given = {"model": overflowing} if half_way else {"model": "2b", "overflow": "stream"}
    exact, _ = sampled(opened(**given, accumulation=AUTO, precision="fp32"), "2b", steps=4)
    made, report = sampled(opened(**given), "2b", steps=4)
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * 4
    assert note_of(report).startswith("on, ") and card.launched and error(made, exact) < 4 * MAX_FP16_ERROR


def test_wrong_step_turns_fp16_accumulation_off_for_later_runs_too(opened, card, tmp_path) -> None:
    plain, _ = sampled(opened("svd", AUTO), "svd")
    handle = opened("svd")
    hook = handle.store.module("unet", "fp16").conv_out.register_forward_hook(
        lambda _layer, _given, made: made * 1.5 if switched_on() else None
    )
    made, report = sampled(handle, "svd")
    assert torch.equal(made, plain) and report.reruns == 0 and note_of(report).startswith("off, ")
    (kept,) = (tmp_path / "kept").glob("*.json")
    assert parse(kept.read_text(), "it").learned.fp16_error == found_error(handle) > MAX_FP16_ERROR
    handle.store.learned.clear()  # as in another process
    launched = card.launched
    again, report = sampled(opened("svd"), "svd")
    hook.remove()
    assert torch.equal(again, plain) and note_of(report).startswith("off, ") and card.launched == launched
    assert any("from a profile" in note and note_of(report) in note for note in report.notes)


def test_second_run_and_other_process_check_nothing_again(opened, card) -> None:
    handle = opened("2b")
    sampled(handle, "2b")
    found, checked = found_error(handle), card.launched
    _, report = sampled(replace(handle, accumulation=AUTO), "2b")
    assert found_error(handle) == found and card.launched == checked, "a run without it keeps what one with it found"
    assert not any("fp16 accumulation" in note for note in report.notes)
    second, _ = sampled(handle, "2b")
    launched, card.launched = card.launched - checked, 0
    handle.store.learned.clear()
    third, _ = sampled(opened("2b"), "2b")
    assert torch.equal(third, second) and card.launched == launched


def test_step_cache_works_with_fp16_accumulation(opened, card) -> None:
    handle = replace(opened("2b"), step_cache=CachePolicy(0.5, check_every=3))
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    settings = SampleSettings(96, 64, steps=12, seed=3, frames=9, guidance_scale=3.0)
    plain, before = sample(replace(handle, accumulation=AUTO), positive, negative, settings)
    assert card.launched == 0
    made, report = sample(handle, positive, negative, settings)
    assert report.cells().count("cached") == before.cells().count("cached") > 0
    assert found_error(handle) <= MAX_FP16_ERROR and report.reruns == 0 and 0 < error(made, plain) < 0.5


# without gain or without support


def test_run_is_bit_equal_on_card_that_gains_nothing(opened, card) -> None:
    handle = replace(opened("2b"), architecture=ARCHITECTURES["sm80"])
    made, report = sampled(handle, "2b")
    assert torch.equal(made, sampled(replace(handle, accumulation=AUTO), "2b")[0]) and card.launched == 0
    assert "fp16 accumulation off: it is faster only on GeForce RTX, and this is sm80 (Ampere)" in report.text()


def test_pytorch_without_switch_is_refused_before_weights_are_read(opened, monkeypatch) -> None:
    monkeypatch.setattr(switches, "FP16_SUMS", "a switch of a newer PyTorch")
    with pytest.raises(PlanImpossible, match=rf"needs PyTorch 2\.7 .* this is {torch.__version__[:4]}.*'auto'"):
        opened("2b")
    opened("2b", AUTO)


# compiled


def test_switch_does_not_recompile(opened, traced_alone: None) -> None:
    """Without the emulated card, whose dispatch mode prevents compiling."""
    torch._dynamo.reset()
    handle = opened("2b", backend="inductor")
    handle.store.learned.clear()
    plain, _ = sampled(opened("2b", AUTO), "2b")
    made, report = sampled(handle, "2b")
    assert report.backend == "inductor" and report.graphs == 1, report.text()
    assert found_error(handle) == 0 and error(made, plain) < 0.01
    _, report = sampled(handle, "2b")
    assert report.graphs == 0
    torch._dynamo.reset()


def test_nexfort_is_not_affected_by_fp16_accumulation(opened, card, monkeypatch) -> None:
    from comfyui_onediff_guard.pipelines.compile import backends

    monkeypatch.setattr(backends, "_compile", lambda block, *_: block)
    handle = replace(opened("2b"), backend=backends.BackendChoice("nexfort", "as you chose"))
    _, report = sampled(handle, "2b")
    assert card.launched == 0
    assert "fp16 accumulation in the transformer: no effect, since nexfort multiplies in its own way" in report.text()
