"""The five known ways to a black picture (README), through a graph of nodes as people run it.

First what users report: plain fp16, diffusers by hand, or the switch as it was. Then `auto` on the same card.
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
VISIBLE = 0.02  # of white: the largest difference of a pixel that nobody sees


def largest_difference(made, expected):
    assert made.images.shape == expected.images.shape
    return (made.images - expected.images).abs().max().item()


def outcomes(made):
    return [(step["dtype"], step["outcome"]) for step in made.reports["sample"]["steps"]]


def broken(made):
    return sum(outcome in ("non-finite", "saturated") for _, outcome in outcomes(made))


def as_saved(images):
    """As ComfyUI's SaveImage and diffusers write pixels."""
    return np.clip(255.0 * images.numpy(), 0, 255).astype(np.uint8)


def assert_is_black(made):
    assert torch.isnan(made.images).all()
    with pytest.warns(RuntimeWarning, match="invalid value encountered in cast"):
        assert not as_saved(made.images).any()


# --- case 1: the residual stream of a model trained in bf16 leaves fp16's range ---------------------------------------


@pytest.mark.parametrize("family", ["1.5", "1.5-i2v", "5b", "5b-i2v", "5b from a video", "cogview4"])
def test_case_1_stream(model_folder, through_nodes, family):
    folder = model_folder(family.split()[0], "stream")
    expected = through_nodes(family, folder, "sm75", "fp32")
    plain = through_nodes(family, folder, "sm75", "fp16 (plain)")
    assert_is_black(plain)
    assert "with NaN, infinite or clipped values: the result is broken" in plain.reports["sample"]["summary"]

    turing = through_nodes(family, folder, "sm75")
    calls = len(turing.reports["sample"]["steps"])
    assert outcomes(turing) == [("fp16", "finite")] * calls
    assert largest_difference(turing, expected) < VISIBLE
    asked = through_nodes(family, folder, "sm80", "fp16", decode="fp32")
    assert asked.reports["sample"]["protection"] and asked.reports["sample"]["reruns"] == 0
    assert "fp16, as you chose" in asked.text
    assert "overflows plain fp16; overflow protection" in asked.text
    assert largest_difference(asked, expected) < VISIBLE
    ampere = through_nodes(family, folder, "sm80")
    assert outcomes(ampere) == [("bf16", "finite")] * calls
    nearer = 4 if family == "1.5" else 1  # than an A100's bf16
    assert error(turing.latents, expected.latents) <= error(ampere.latents, expected.latents) / nearer


# --- case 2: a model belongs in the dtype that it was trained in ------------------------------------------------------


@pytest.mark.parametrize("family", ["5b", "5b-i2v"])
def test_case_2_trained_in_bf16(model_folder, changed, through_nodes, family):
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


def test_case_2_trained_in_fp16(model_folder, changed, through_nodes):
    folder = changed(model_folder("2b"), "transformer", CogVideoXTransformer3DModel, trained_in_fp16)
    expected = through_nodes("2b", folder, "sm80", "fp32")
    lost = through_nodes("2b", folder, "sm80", "bf16")
    made = through_nodes("2b", folder, "sm80")
    assert outcomes(made) == [("fp16", "finite")] * STEPS
    assert "CogVideoX-2B was trained in fp16" in made.text
    assert error(made.latents, expected.latents) <= error(lost.latents, expected.latents) / 4


# --- case 3: T5 in fp16 -----------------------------------------------------------------------------------------------

WITH_T5 = ["2b", "1.5-i2v", "cogview3"]


def by_hand(family, folder, cast=False):
    """The positive prompt's embeddings as a script makes them: diffusers in fp16, or cast to it after loading."""
    text_encoder = T5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float16)
    if cast:
        torch.nn.Module.to(text_encoder, torch.float16)
    kind = {"cogview3": diffusers.CogView3PlusPipeline}.get(family, diffusers.CogVideoXPipeline)
    pipe: Any = kind.from_pretrained(folder, transformer=None, vae=None, text_encoder=text_encoder)
    with torch.no_grad():
        return pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)[0].float()


@pytest.mark.parametrize("family", WITH_T5)
def test_case_3_a_norm_that_refuses_mixed_dtypes(model_folder, through_nodes, monkeypatch, family):
    folder = model_folder(family)
    expected = through_nodes(family, folder, "sm75", "fp32")
    monkeypatch.setattr("transformers.models.t5.modeling_t5.T5LayerNorm", FusedRMSNorm)
    with pytest.raises(RuntimeError, match="expected scalar type Float but found Half"):
        by_hand(family, folder)

    made = through_nodes(family, folder, "sm75")
    assert made.reports["encode"]["plan"]["dtype"] == "fp16" and made.reports["encode"]["reruns"] == 0
    assert "(FusedRMSNorm) refuses inputs" in " ".join(made.reports["encode"]["notes"])
    assert error(made.conditioning[0], expected.conditioning[0]) < 1e-2
    assert largest_difference(made, expected) < VISIBLE


@pytest.mark.parametrize("family", WITH_T5)
def test_case_3_weights_beyond_fp16(model_folder, changed, through_nodes, family):
    folder = changed(model_folder(family), "text_encoder", T5EncoderModel, beyond_fp16)
    expected = through_nodes(family, folder, "sm75", "fp32")
    undone = by_hand(family, folder, cast=True)
    assert not error(undone, expected.conditioning[0][:, : undone.shape[1]]) < 0.1

    made = through_nodes(family, folder, "sm75")
    assert made.reports["encode"]["plan"]["dtype"] == "fp16" and made.reports["encode"]["reruns"] == 0
    assert error(made.conditioning[0], expected.conditioning[0]) < 1e-2
    assert largest_difference(made, expected) < VISIBLE


def test_case_3_a_text_encoder_that_was_cast_after_loading_is_put_right(model_folder, changed, on_card, monkeypatch):
    load = T5EncoderModel.from_pretrained

    def load_and_cast(*args, **options):
        loaded: Any = load(*args, **options)  # the model, and what was found of it on disk
        return torch.nn.Module.to(loaded[0], torch.float16), loaded[1]

    def encoded(folder, precision):
        (embeddings, _), report = encode_prompts(on_card(folder, "sm75", precision), ["a boat", ""])
        return embeddings, report

    folders = model_folder("2b"), changed(model_folder("2b"), "text_encoder", T5EncoderModel, beyond_fp16)
    expected = [encoded(folder, "fp32")[0] for folder in folders]
    monkeypatch.setattr(T5EncoderModel, "from_pretrained", load_and_cast)
    for folder, right in zip(folders, expected, strict=True):
        embeddings, report = encoded(folder, "fp16")
        assert "put back in fp32, where T5EncoderModel keeps wo" in report.text()
        assert ("which fp16 cannot hold" in report.text()) == (folder is folders[1])
        assert error(embeddings, right) < 1e-2 and report.reruns == 0


# --- case 4: half-precision accumulation in fused attention, by contract ----------------------------------------------


@pytest.fixture
def oneflow(monkeypatch):
    """oneflow("sm80") → the stand-in for OneFlow on that card, which backend 'oneflow' compiles with from then on."""

    def stand_in(card):
        kernel = OneFlow(card)
        monkeypatch.setitem(backends._PROBES, "oneflow", lambda _device: None)
        monkeypatch.setitem(registry._BACKENDS, "oneflow", kernel.compile)
        monkeypatch.setattr(F, "scaled_dot_product_attention", kernel.launch)
        return kernel

    monkeypatch.delenv(ATTENTION_SWITCH, raising=False)
    return stand_in


def is_near(made, expected):
    """On average: the weights are random, and the scheduler starts at 700 times the latents."""
    return (made.images - expected.images).abs().mean().item() < VISIBLE


@pytest.mark.parametrize("name", ["sm70", "sm75"])
def test_case_4_svd_on_oneflow(svd_folder, through_nodes, oneflow, monkeypatch, name):
    folder, kernel = svd_folder, oneflow(name)
    expected = through_nodes("svd", folder, name, "fp32", backend="oneflow")
    with monkeypatch.context() as exported:
        exported.setenv(ATTENTION_SWITCH, "1")  # as it was: what unset counts as
        plain = through_nodes("svd", folder, name, "fp16 (plain)", backend="oneflow")
    if name == "sm75":
        assert_is_black(plain)
    else:
        assert is_near(plain, expected), "right on V100, as users say"

    kernel.launches.clear()
    made = through_nodes("svd", folder, name, backend="oneflow")
    assert outcomes(made) == [("fp16", "finite")] * STEPS
    assert is_near(made, expected)
    assert made.reports["sample"]["backend"] == "oneflow"
    compiled = sum(launch.compiled for launch in kernel.launches)
    assert compiled > len(kernel.launches) - compiled > 0, "the UNet's blocks; image encoder and both halves of the VAE"
    value = "1" if name == "sm70" else "0"
    assert {launch[1:] for launch in kernel.launches} == {(value, value)}, "at the moment of each launch"
    assert not kernel.environment(), "and not after it"


def test_case_4_a_switch_that_the_user_exported_is_respected_and_the_guard_saves_the_run(
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
def test_case_4_a_run_that_compiles_nothing_sees_what_the_one_that_compiled_saw(
    model_folder, on_card, oneflow, monkeypatch, name, request_, exported, expected
):
    kernel = oneflow("sm70")  # whose results are right in either mode: what it sees is looked at
    if exported:
        monkeypatch.setenv(ATTENTION_SWITCH, exported)
    before = kernel.environment()
    handle = on_card(model_folder("2b"), name, "fp16 (plain)")  # OneFlow compiles no layers with overflow protection
    handle = replace(handle, backend=BackendChoice("oneflow", "as you chose"), accumulation=Accumulation(request_))
    handle.store.compiled.clear()  # what another test's stand-in made
    positive, negative = encode_prompts(handle, [PROMPT, ""])[0]
    for _ in range(2):
        kernel.launches.clear()
        _, report = sample(handle, positive, negative, SampleSettings(64, 48, frames=9, steps=STEPS, seed=3))
        assert {launch.attention for launch in kernel.launches if launch.compiled} == {expected}
        assert kernel.environment() == before
        (told,) = [switch for switch in report.switches if switch.name == ATTENTION_SWITCH]
        assert (told.value, told.set_by) == (expected, "user" if exported else "onediff-guard")


# --- case 5: CogView3-Plus clips its stream in fp16 -------------------------------------------------------------------


@pytest.mark.parametrize("clipped", CLIPPED)
def test_case_5_clip(cogview3_folder, changed, through_nodes, clipped):
    change = overflow_stream(*CLIPPED[clipped])
    folder = changed(cogview3_folder, "transformer", CogView3PlusTransformer2DModel, change)
    expected = through_nodes("cogview3", folder, "sm75", "fp32")
    plain = through_nodes("cogview3", folder, "sm75", "fp16 (plain)")
    assert plain.reports["sample"]["outcomes"].keys() <= {"saturated", "non-finite"}
    if clipped == "a finite wrong picture":
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
