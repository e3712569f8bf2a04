"""The five known ways to a black picture (README), each on a model that is built for its mechanism.

Each shows first that the mechanism is real: plain fp16, or the switch as it was, fails as users report it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from cogview_step import cogview3_call
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS
from comfyui_onediff_guard.pipelines.run.denoiser import guarded_denoiser
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, Accumulation
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.loaded_weights import DamagedByCast, make_consistent
from comfyui_onediff_guard.precision.policy import Component, Precision
from diffusers import CogVideoXTransformer3DModel, CogView3PlusTransformer2DModel
from mechanisms import (
    ATTENTION,
    FEED_FORWARD,
    IMAGE,
    TEXT,
    FusedAttention,
    FusedRMSNorm,
    OneFlow,
    beyond_fp16,
    error,
    overflow_inside_a_feed_forward,
    overflow_stream,
    trained_in_fp16,
)
from onediff.infer_compiler.backends import registry
from torch.nn import functional as F
from transformers import T5EncoderModel

SMALL = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DPM")


def sampled(handle, prompt="a lighthouse above a calm sea"):
    (positive, negative), _ = encode_prompts(handle, [prompt, ""], Precision.FP32)
    return sample(handle, positive, negative, SMALL)


# --- case 1: the residual stream of a model trained in bf16 leaves fp16's range ---------------------------------------


def test_case_1_stream(model_folder, on_card):
    folder = model_folder("1.5", "stream")
    expected, _ = sampled(on_card(folder, "sm75", "fp32"))
    plain, plain_report = sampled(on_card(folder, "sm75", "fp16 (plain)"))
    assert torch.isnan(plain).all() and plain_report.failed == SMALL.steps
    bf16, _ = sampled(on_card(folder, "sm80"))

    latents, report = sampled(on_card(folder, "sm75"))
    assert [(step.dtype, step.outcome) for step in report.steps] == [("fp16", "finite")] * SMALL.steps
    assert error(latents, expected) <= error(bf16, expected) / 4, "nearer to fp32 than an A100's bf16"
    assert "sm75 (Turing) has no native bf16 → fp16, stream in float32; 3 steps, 0 reruns" in report.summary()


# --- case 2: a model belongs in the dtype that it was trained in ------------------------------------------------------


@pytest.fixture
def overflowing_inside(model_folder, changed):
    return changed(model_folder("5b"), "transformer", CogVideoXTransformer3DModel, overflow_inside_a_feed_forward)


def test_case_2_inside_of_a_feed_forward(overflowing_inside, on_card):
    expected, _ = sampled(on_card(overflowing_inside, "sm80", "fp32"))
    plain, _ = sampled(on_card(overflowing_inside, "sm80", "fp16 (plain)"))
    assert not torch.isfinite(plain).all()

    latents, report = sampled(on_card(overflowing_inside, "sm80"))
    assert report.plan.dtype == "bf16" and report.reruns == 0
    assert error(latents, expected) < 0.1

    latents, report = sampled(on_card(overflowing_inside, "sm75"))
    assert report.plan.wide and report.reruns == 1
    assert error(latents, expected) < 5e-3
    assert "'transformer_blocks.1.ff.net.0.proj' reaches" in report.text()
    assert "inside a block, apart from the residual stream" in report.text()


def test_case_2_weights_trained_in_fp16_lose_digits_in_bf16(model_folder, changed, on_card):
    folder = changed(model_folder("2b"), "transformer", CogVideoXTransformer3DModel, trained_in_fp16)
    expected, _ = sampled(on_card(folder, "sm80", "fp32"))
    lost, _ = sampled(on_card(folder, "sm80", "bf16"))
    latents, report = sampled(on_card(folder, "sm80"))
    assert report.plan.dtype == "fp16" and "CogVideoX-2B was trained in fp16" in report.summary()
    assert error(latents, expected) <= error(lost, expected) / 4


# --- case 3: T5 in fp16 -----------------------------------------------------------------------------------------------


def encoded(handle):
    (embeddings, _), report = encode_prompts(handle, ["a boat", ""])
    return embeddings, report


def test_case_3_text_encoder(model_folder, changed, on_card):
    folder = changed(model_folder("2b"), "text_encoder", T5EncoderModel, beyond_fp16)
    expected, _ = encoded(on_card(folder, "sm75", "fp32"))
    tokens = torch.tensor([[5, 9, 1]])
    right = T5EncoderModel.from_pretrained(folder / "text_encoder")(tokens).last_hidden_state
    undone = T5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float16)
    torch.nn.Module.to(undone, torch.float16)  # wo's large value becomes infinite, and T5 clamps what it makes
    assert not error(undone(tokens).last_hidden_state, right) < 0.1
    with pytest.raises(DamagedByCast, match=r"wo.weight' belongs in fp32.*1 of its values are not finite"):
        make_consistent(undone, torch.float16)

    embeddings, report = encoded(on_card(folder, "sm75"))
    assert report.plan.dtype == "fp16" and report.reruns == 0
    assert error(embeddings, expected) < 1e-2


def test_case_3_text_encoder_with_a_norm_that_refuses_mixed_dtypes(model_folder, on_card, monkeypatch):
    folder = model_folder("2b")
    expected, _ = encoded(on_card(folder, "sm75", "fp32"))
    monkeypatch.setattr("transformers.models.t5.modeling_t5.T5LayerNorm", FusedRMSNorm)
    plain = T5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float16)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        plain(torch.tensor([[5, 9, 1]]))

    embeddings, report = encoded(on_card(folder, "sm75"))
    assert report.plan.dtype == "fp16" and report.reruns == 0
    assert error(embeddings, expected) < 1e-2
    assert "(FusedRMSNorm) refuses inputs of another dtype than its weight: computes in fp32 now" in report.text()


def test_case_3_a_text_encoder_that_was_cast_after_loading_is_put_right(model_folder, changed, on_card, monkeypatch):
    load = T5EncoderModel.from_pretrained

    def load_and_cast(*args, **options):
        loaded: Any = load(*args, **options)  # the model, and what was found of it on disk
        return torch.nn.Module.to(loaded[0], torch.float16), loaded[1]

    folders = model_folder("2b"), changed(model_folder("2b"), "text_encoder", T5EncoderModel, beyond_fp16)
    expected = [encoded(on_card(folder, "sm75", "fp32"))[0] for folder in folders]
    monkeypatch.setattr(T5EncoderModel, "from_pretrained", load_and_cast)
    text = ""
    for folder, right in zip(folders, expected, strict=True):
        embeddings, report = encoded(on_card(folder, "sm75", "fp16"))
        text = report.text()
        assert "put back in fp32, where T5EncoderModel keeps wo" in text
        assert error(embeddings, right) < 1e-2 and report.reruns == 0
    assert "wo.weight' holds values of up to 6.62e+04, which fp16 cannot hold" in text


# --- case 4: half-precision accumulation in fused attention, by contract ----------------------------------------------


@pytest.fixture
def fused_attention(monkeypatch):
    kernel, original = FusedAttention(), F.scaled_dot_product_attention

    def launch(*args, **options):
        return kernel(*args, **options)

    launch.__wrapped__ = original  # type: ignore[attr-defined]
    monkeypatch.setattr(F, "scaled_dot_product_attention", launch)
    return kernel


@pytest.mark.parametrize("card", ["sm75", "sm80", "sm86", "sm89"])
def test_case_4_accumulation(model_folder, on_card, fused_attention, monkeypatch, card):
    folder = model_folder("2b")
    expected, _ = sampled(on_card(folder, card, "fp32"))
    monkeypatch.setenv(ATTENTION_SWITCH, "1")  # as it was: what unset counts as
    plain, _ = sampled(on_card(folder, card, "fp16 (plain)"))
    assert not torch.isfinite(plain).all()
    _, exported = sampled(on_card(folder, card))
    assert exported.reruns == 2, "the user's value is respected; the guard saves the run, then a block is in fp32"
    assert "inside attention, apart from the residual stream" in exported.text()
    monkeypatch.delenv(ATTENTION_SWITCH)

    fused_attention.seen.clear()
    latents, report = sampled(on_card(folder, card))
    assert report.plan.dtype == "fp16" and report.reruns == 0
    assert set(fused_attention.seen) == {"0"}, "at the moment of each launch"
    assert error(latents, expected) < 2e-2
    assert ATTENTION_SWITCH not in os.environ


@pytest.mark.parametrize(
    ("card", "request_", "exported", "expected"),
    [
        ("sm70", "auto", None, "1"),
        ("sm80", "auto", None, "0"),
        ("sm80", "fast", None, "1"),
        ("sm70", "auto", "0", "0"),
        ("sm80", "auto", "1", "1"),
    ],
)
def test_case_4_a_run_that_compiles_nothing_sees_what_the_one_that_compiled_saw(
    model_folder, on_card, monkeypatch, card, request_, exported, expected
):
    kernel = OneFlow("sm70")  # whose results are right in either mode: what it sees is looked at
    monkeypatch.setitem(registry._BACKENDS, "oneflow", kernel.compile)
    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel.launch)
    if exported:
        monkeypatch.setenv(ATTENTION_SWITCH, exported)
    before = kernel.environment()
    handle = on_card(model_folder("2b"), card)
    handle = replace(handle, backend=BackendChoice("oneflow", "asked for"), accumulation=Accumulation(request_))
    handle.store.compiled.clear()  # what another test's stand-in made
    for _ in range(2):
        kernel.launches.clear()
        _, report = sampled(handle)
        assert {launch.attention for launch in kernel.launches if launch.compiled} == {expected}
        assert kernel.environment() == before
        (told,) = [switch for switch in report.switches if switch.name == ATTENTION_SWITCH]
        assert (told.value, told.set_by) == (expected, "user" if exported else "onediff-guard")


def test_case_4_accumulation_is_left_on_for_volta(model_folder, on_card, fused_attention):
    handle = on_card(model_folder("2b"), "sm70", "fp32")
    sampled(handle)
    assert set(fused_attention.seen) == {"1"}


# --- case 5: CogView3-Plus clips its stream in fp16 -------------------------------------------------------------------


CLIPPED = {
    "a finite wrong picture": ((IMAGE, TEXT), FEED_FORWARD, True),
    "a clipped text, of which the last norm sees nothing": ((TEXT,), FEED_FORWARD, True),
    "NaN, which the clip keeps": ((IMAGE - 3, TEXT - 3), ATTENTION, False),
}


@pytest.mark.parametrize(("gates", "writer", "finite"), CLIPPED.values(), ids=CLIPPED)
def test_case_5_clip(cogview3_folder, changed, on_card, gates, writer, finite):
    folder = changed(cogview3_folder, "transformer", CogView3PlusTransformer2DModel, overflow_stream(gates, writer))

    def step(precision, card="sm75", **planned):
        handle = replace(on_card(folder, card, precision, COGVIEW3PLUS), policy=GuardPolicy(scope=Scope.STEP))
        stage = handle.stage(Component.DENOISER)
        plan = replace(stage.plan, **planned)
        stage = replace(stage, plan=plan, report=handle.report(plan))
        denoiser = guarded_denoiser(stage)
        with torch.no_grad():
            outputs = [denoiser(**cogview3_call(denoiser))[0].float() for _ in range(2)]
        return outputs[-1], stage.report

    expected, _ = step("fp32")
    plain, report = step("fp16 (plain)")
    assert torch.isfinite(plain).all() == finite
    assert report.failed == 2, "a clipped value is a failure"
    if IMAGE in gates:
        assert error(plain, expected) > 0.4
    bf16, report = step("auto", "sm80")
    assert report.plan.dtype == "bf16" and report.reruns == 0

    narrow, report = step("auto", wide=False)
    assert [record.outcome for record in report.steps] == ["rerun", "rerun"], "the guard sees it, too"
    assert error(narrow, expected) < 2e-3
    wide, report = step("auto")
    assert [(record.dtype, record.outcome) for record in report.steps] == [("fp16", "finite")] * 2
    assert error(wide, expected) <= error(bf16, expected) / 4


def test_fp16_ends_where_the_models_above_go_beyond():
    assert torch.finfo(torch.float16).max < 66246 < 5e5
