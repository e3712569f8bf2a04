"""The five known causes of black pictures (README), in graphs of nodes as users run them.

Each test first reproduces what users report: plain fp16, a diffusers script, or the old switch. Then it runs `auto`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from as_comfyui import PROMPT
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, Accumulation
from diffusers import CogVideoXTransformer3DModel, CogView3PlusTransformer2DModel
from mechanisms import (
    CLIPPED,
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

STEPS = 2
VISIBLE = 0.02  # of white: smaller differences of a pixel are invisible


def largest_difference(made, expected):
    assert made.images.shape == expected.images.shape
    return (made.images - expected.images).abs().max().item()


def outcomes(made):
    return [(step["dtype"], step["outcome"]) for step in made.reports["sample"]["steps"]]


def broken(made):
    return sum(outcome in ("non-finite", "saturated") for _, outcome in outcomes(made))


def as_saved(images):
    """Convert to pixels as ComfyUI's SaveImage and diffusers do."""
    return np.clip(255.0 * images.numpy(), 0, 255).astype(np.uint8)


def assert_is_black(made):
    assert torch.isnan(made.images).all()
    with pytest.warns(RuntimeWarning, match="invalid value encountered in cast"):
        assert not as_saved(made.images).any()


# --- case 1: the residual stream of a model trained in bf16 leaves fp16's range ---------------------------------------


@pytest.mark.parametrize("family", ["1.5", "1.5-i2v", "5b", "5b-i2v", "5b from a video", "cogview4"])
def test_case_1_overflowing_stream_is_black_only_in_plain_fp16(model_folder, through_nodes, family):
    folder = model_folder(family.split()[0], "stream")
    expected = through_nodes(family, folder, "sm75", "fp32")
    plain = through_nodes(family, folder, "sm75", "fp16 (plain)")
    assert_is_black(plain)
    assert "with NaN, infinite or clipped values: the result is broken" in plain.reports["sample"]["summary"]

    turing = through_nodes(family, folder, "sm75")
    calls = len(turing.reports["sample"]["steps"])
    assert outcomes(turing) == [("fp16", "finite")] * calls
    assert largest_difference(turing, expected) < VISIBLE
    chosen = through_nodes(family, folder, "sm80", "fp16", decode="fp32")
    assert chosen.reports["sample"]["protection"] and chosen.reports["sample"]["reruns"] == 0
    assert "fp16, as you chose" in chosen.text
    assert "overflows plain fp16; overflow protection" in chosen.text
    assert largest_difference(chosen, expected) < VISIBLE
    ampere = through_nodes(family, folder, "sm80")
    assert outcomes(ampere) == [("bf16", "finite")] * calls
    nearer = 4 if family == "1.5" else 1  # times nearer to fp32 than an A100's bf16
    assert error(turing.latents, expected.latents) <= error(ampere.latents, expected.latents) / nearer


# --- case 2: a model belongs in the dtype that it was trained in ------------------------------------------------------


@pytest.mark.parametrize("family", ["5b", "5b-i2v"])
def test_case_2_bf16_trained_model_runs_in_bf16_or_protected_fp16(model_folder, changed, through_nodes, family):
    folder = changed(model_folder(family), "transformer", CogVideoXTransformer3DModel, overflow_inside_a_feed_forward)
    expected = through_nodes(family, folder, "sm80", "fp32")
    plain = through_nodes(family, folder, "sm80", "fp16 (plain)")
    assert not torch.isfinite(plain.images).all()

    ampere = through_nodes(family, folder, "sm80")
    assert outcomes(ampere) == [("bf16", "finite")] * STEPS
    assert "was trained in bf16, which sm80 (Ampere) computes natively" in ampere.text
    turing = through_nodes(family, folder, "sm75")
    assert outcomes(turing) == [("fp16", "finite")] * STEPS and turing.reports["sample"]["reruns"] == 0
    assert error(turing.latents, expected.latents) <= error(ampere.latents, expected.latents) / 4
    assert largest_difference(turing, expected) < VISIBLE
    assert largest_difference(ampere, expected) < 5 * VISIBLE


def test_case_2_fp16_trained_model_runs_in_fp16(model_folder, changed, through_nodes):
    folder = changed(model_folder("2b"), "transformer", CogVideoXTransformer3DModel, trained_in_fp16)
    expected = through_nodes("2b", folder, "sm80", "fp32")
    in_bf16 = through_nodes("2b", folder, "sm80", "bf16")
    made = through_nodes("2b", folder, "sm80")
    assert outcomes(made) == [("fp16", "finite")] * STEPS
    assert "CogVideoX-2B was trained in fp16" in made.text
    assert error(made.latents, expected.latents) <= error(in_bf16.latents, expected.latents) / 4


# --- case 3: T5 in fp16 -----------------------------------------------------------------------------------------------

WITH_T5 = ["2b", "1.5-i2v", "cogview3"]


def embed_with_diffusers(family, folder, cast=False):
    """The positive prompt's embeddings from a diffusers script: loaded in fp16, or cast to fp16 after loading."""
    text_encoder = T5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float16)
    if cast:
        torch.nn.Module.to(text_encoder, torch.float16)
    kind = {"cogview3": diffusers.CogView3PlusPipeline}.get(family, diffusers.CogVideoXPipeline)
    pipe: Any = kind.from_pretrained(folder, transformer=None, vae=None, text_encoder=text_encoder)
    with torch.no_grad():
        return pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[0].float()


@pytest.mark.parametrize("family", WITH_T5)
def test_case_3_t5_norm_that_rejects_mixed_dtypes_runs_in_fp16(model_folder, through_nodes, monkeypatch, family):
    folder = model_folder(family)
    expected = through_nodes(family, folder, "sm75", "fp32")
    monkeypatch.setattr("transformers.models.t5.modeling_t5.T5LayerNorm", FusedRMSNorm)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        embed_with_diffusers(family, folder)

    made = through_nodes(family, folder, "sm75")
    assert made.reports["encode"]["plan"]["dtype"] == "fp16" and made.reports["encode"]["reruns"] == 0
    assert "(FusedRMSNorm) refuses inputs" in " ".join(made.reports["encode"]["notes"])
    assert error(made.conditioning[0], expected.conditioning[0]) < 1e-2
    assert largest_difference(made, expected) < VISIBLE


@pytest.mark.parametrize("family", WITH_T5)
def test_case_3_t5_with_weights_beyond_fp16_range_is_near_fp32(model_folder, changed, through_nodes, family):
    folder = changed(model_folder(family), "text_encoder", T5EncoderModel, beyond_fp16)
    expected = through_nodes(family, folder, "sm75", "fp32")
    cast_embeddings = embed_with_diffusers(family, folder, cast=True)
    assert not error(cast_embeddings, expected.conditioning[0][:, : cast_embeddings.shape[1]]) < 0.1

    made = through_nodes(family, folder, "sm75")
    assert made.reports["encode"]["plan"]["dtype"] == "fp16" and made.reports["encode"]["reruns"] == 0
    assert error(made.conditioning[0], expected.conditioning[0]) < 1e-2
    assert largest_difference(made, expected) < VISIBLE


def test_case_3_t5_layers_cast_to_fp16_after_loading_are_restored(model_folder, changed, on_card, monkeypatch):
    load = T5EncoderModel.from_pretrained

    def load_and_cast(*args, **options):
        loaded: Any = load(*args, **options)  # the model, and its loading info
        return torch.nn.Module.to(loaded[0], torch.float16), loaded[1]

    def encoded(folder, precision):
        (embeddings, _), report = encode_prompts(on_card(folder, "sm75", precision), ["a boat", ""])
        return embeddings, report

    folders = model_folder("2b"), changed(model_folder("2b"), "text_encoder", T5EncoderModel, beyond_fp16)
    expected = [encoded(folder, "fp32")[0] for folder in folders]
    monkeypatch.setattr(T5EncoderModel, "from_pretrained", load_and_cast)
    for folder, right in zip(folders, expected, strict=True):
        embeddings, report = encoded(folder, "fp16")
        assert "restored to fp32, where T5EncoderModel keeps wo" in report.text()
        assert ("beyond fp16" in report.text()) == (folder is folders[1])
        assert error(embeddings, right) < 1e-2 and report.reruns == 0


# --- case 4: half-precision accumulation in fused attention, with a stand-in ------------------------------------------


@pytest.fixture
def oneflow(monkeypatch):
    """oneflow("sm80") → the stand-in for OneFlow on that card, installed as backend 'oneflow'."""

    def stand_in(card):
        kernel = OneFlow(card)
        monkeypatch.setitem(backends._PROBES, "oneflow", lambda _device: None)
        monkeypatch.setitem(registry._BACKENDS, "oneflow", kernel.compile)
        monkeypatch.setattr(F, "scaled_dot_product_attention", kernel.launch)
        return kernel

    monkeypatch.delenv(ATTENTION_SWITCH, raising=False)
    return stand_in


def is_near(made, expected):
    """Compare averages: the weights are random, and the scheduler starts at 700 times the latents."""
    return (made.images - expected.images).abs().mean().item() < VISIBLE


@pytest.mark.parametrize("name", ["sm70", "sm75"])
def test_case_4_svd_on_oneflow_sets_accumulation_switch_by_card(svd_folder, through_nodes, oneflow, monkeypatch, name):
    folder, kernel = svd_folder, oneflow(name)
    expected = through_nodes("svd", folder, name, "fp32", backend="oneflow")
    with monkeypatch.context() as exported:
        exported.setenv(ATTENTION_SWITCH, "1")  # OneFlow's default
        plain = through_nodes("svd", folder, name, "fp16 (plain)", backend="oneflow")
    if name == "sm75":
        assert_is_black(plain)
    else:
        assert is_near(plain, expected), "correct on V100, as users report"

    kernel.launches.clear()
    made = through_nodes("svd", folder, name, backend="oneflow")
    assert outcomes(made) == [("fp16", "finite")] * STEPS
    assert is_near(made, expected)
    assert made.reports["sample"]["backend"] == "oneflow"
    compiled = sum(launch.compiled for launch in kernel.launches)
    assert compiled > len(kernel.launches) - compiled > 0, "UNet blocks; image encoder and VAE"
    value = "1" if name == "sm70" else "0"
    assert {launch[1:] for launch in kernel.launches} == {(value, value)}, "set at each launch"
    assert not kernel.environment(), "and unset afterwards"


def test_case_4_exported_switch_is_kept_and_failed_steps_are_recomputed(
    model_folder, through_nodes, oneflow, monkeypatch
):
    folder, kernel = model_folder("svd"), oneflow("sm80")
    expected = through_nodes("svd", folder, "sm80", "fp32", backend="oneflow")
    kernel.launches.clear()
    monkeypatch.setenv(ATTENTION_SWITCH, "1")
    made = through_nodes("svd", folder, "sm80", backend="oneflow")
    assert made.reports["sample"]["reruns"] and broken(made) == 0
    assert is_near(made, expected)
    assert {launch.attention for launch in kernel.launches} == {"1"}
    assert f"{ATTENTION_SWITCH}=1 (by user: set before this run, respected, although" in made.text


@pytest.mark.parametrize(
    ("name", "request_", "exported", "expected"),
    [
        ("sm70", "auto", None, "1"),
        ("sm80", "auto", None, "0"),
        ("sm80", "fast", None, "1"),
        ("sm70", "auto", "0", "0"),
        ("sm80", "auto", "1", "1"),
    ],
)
def test_case_4_second_run_without_compiling_has_same_switch(
    model_folder, on_card, oneflow, monkeypatch, name, request_, exported, expected
):
    kernel = oneflow("sm70")  # correct in either mode: the test checks only the values that it reads
    if exported:
        monkeypatch.setenv(ATTENTION_SWITCH, exported)
    before = kernel.environment()
    handle = on_card(model_folder("2b"), name, "fp16 (plain)")  # OneFlow compiles no layers with overflow protection
    handle = replace(handle, backend=BackendChoice("oneflow", "as you chose"), accumulation=Accumulation(request_))
    handle.store.compiled.clear()  # blocks of another test's stand-in
    positive, negative = encode_prompts(handle, [PROMPT, ""])[0]
    for _ in range(2):
        kernel.launches.clear()
        _, report = sample(handle, positive, negative, SampleSettings(64, 48, frames=9, steps=STEPS, seed=3))
        assert {launch.attention for launch in kernel.launches if launch.compiled} == {expected}
        assert kernel.environment() == before
        (reported,) = [switch for switch in report.switches if switch.name == ATTENTION_SWITCH]
        assert (reported.value, reported.set_by) == (expected, "user" if exported else "onediff-guard")


# --- case 5: CogView3-Plus clips its stream in fp16 -------------------------------------------------------------------


@pytest.mark.parametrize("clipped", CLIPPED)
def test_case_5_clipped_stream_is_near_fp32_with_protection(cogview3_folder, changed, through_nodes, clipped):
    change = overflow_stream(*CLIPPED[clipped])
    folder = changed(cogview3_folder, "transformer", CogView3PlusTransformer2DModel, change)
    expected = through_nodes("cogview3", folder, "sm75", "fp32")
    plain = through_nodes("cogview3", folder, "sm75", "fp16 (plain)")
    assert plain.reports["sample"]["outcomes"].keys() <= {"saturated", "non-finite"}
    if clipped == "finite wrong picture":
        assert torch.isfinite(plain.images).all()
        assert largest_difference(plain, expected) > 0.5
    elif "NaN" in clipped:
        assert_is_black(plain)

    turing = through_nodes("cogview3", folder, "sm75")
    assert outcomes(turing) == [("fp16", "finite")] * STEPS
    assert largest_difference(turing, expected) < VISIBLE
    ampere = through_nodes("cogview3", folder, "sm80")
    assert outcomes(ampere) == [("bf16", "finite")] * STEPS
    assert largest_difference(turing, expected) <= largest_difference(ampere, expected) / 2
