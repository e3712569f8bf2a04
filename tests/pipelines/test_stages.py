"""Stages beside the denoiser, threads, and folders with awkward names."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as store
from comfyui_onediff_guard.precision.accumulation import SWITCHES
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure, Scope
from overflows import fails_in_half
from transformers import T5EncoderModel

SMALL = SampleSettings(width=64, height=48, frames=9, steps=2, guidance_scale=6.0, seed=3, scheduler="DDIM")


def overflow_text_encoder(module):
    """Makes the product inside T5's gated feed-forward leave fp16's range; it is scaled back behind it."""
    for layer in module.encoder.block:
        feed_forward = layer.layer[-1].DenseReluDense
        feed_forward.wi_1.weight.mul_(1e5**0.5)
        feed_forward.wi_0.weight.mul_(1e5**0.5)
        feed_forward.wo.weight.div_(1e5)


def overflow_vae(module):
    """Makes the decoder's first convolution leave fp16's range; the group norm behind it takes the scale out again."""
    module.decoder.conv_in.conv.weight.mul_(1e6)
    module.decoder.conv_in.conv.bias.mul_(1e6)


def test_a_text_encoder_that_would_overflow_does_not_with_every_layer_scaled(broken_in_half, open_pipeline):
    folder = broken_in_half("text_encoder", overflow_text_encoder)
    (expected, _), _ = encode_prompts(open_pipeline(folder, "fp32"), ["a boat", ""])
    handle = open_pipeline(folder, "fp16")
    (found, _), report = encode_prompts(handle, ["a boat", ""])
    assert report.protection == "overflow protection" and report.reruns == 0
    assert found.dtype == torch.float32
    assert (found - expected).norm() <= 2e-3 * expected.norm()
    plain = open_pipeline(folder, "fp16 (plain)")
    assert not torch.isfinite(encode_prompts(plain, ["a boat", ""])[0][0]).all()


def test_a_text_encoder_clamps_nothing_with_every_layer_scaled(clamping_text_encoder, open_pipeline):
    folder = clamping_text_encoder
    expected, _ = encode_prompts(open_pipeline(folder, "fp32"), ["a boat", ""])
    plain, unguarded = encode_prompts(open_pipeline(folder, "fp16 (plain)"), ["a boat", ""])
    found, report = encode_prompts(open_pipeline(folder, "fp16"), ["a boat", ""])
    for embeddings, wrong, right in zip(found, plain, expected, strict=True):
        assert wrong.isfinite().all() and (wrong - right).norm() > 0.2 * right.norm()
        assert (embeddings - right).norm() <= 2e-3 * right.norm()
    assert (report.reruns, unguarded.failed) == (0, 2)


@pytest.mark.parametrize("precision", ["fp16 (plain)", "bf16"])
def test_a_text_encoder_that_is_not_scaled_is_the_same_to_the_bit(model_folder, open_pipeline, precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    text_encoder = T5EncoderModel.from_pretrained(model_folder("2b") / "text_encoder", dtype=dtype)
    handle = open_pipeline(model_folder("2b"), precision)
    found, report = encode_prompts(handle, ["a boat", ""])
    tokens = handle.store.unweighted("tokenizer")(
        "a boat", padding="max_length", max_length=found[0].shape[1], return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert torch.equal(found[0], text_encoder(tokens).last_hidden_state.float())
    assert report.reruns == 0 and not report.protection


def test_embeddings_that_came_out_broken_are_not_remembered(broken_in_half, open_pipeline):
    handle = open_pipeline(broken_in_half("text_encoder", overflow_text_encoder), "fp16 (plain)")
    (broken, _), _ = encode_prompts(handle, ["a boat", ""])
    assert not torch.isfinite(broken).all()
    assert all(kept.isfinite().all() for kept in handle.store.prompts.values())


def test_a_decoder_that_overflows_is_rerun_and_the_frames_are_right(broken_in_half, open_pipeline):
    folder = broken_in_half("vae", overflow_vae)
    latents = torch.randn(1, 16, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    expected, _ = decode(open_pipeline(folder, "fp32"), latents)
    frames, report = decode(open_pipeline(folder, "fp16"), latents)
    assert report.reruns == 1
    assert (frames - expected).abs().max() <= 2e-2
    assert torch.isnan(decode(open_pipeline(folder, "fp16 (plain)"), latents)[0]).all()


def test_plain_fp16_embeddings_that_are_broken_are_blamed_on_their_maker(broken_in_half, open_pipeline):
    folder = broken_in_half("text_encoder", overflow_text_encoder)
    (positive, negative), _ = encode_prompts(open_pipeline(folder, "fp16 (plain)"), ["a boat", ""])
    with pytest.raises(GuardStopped, match="input 'encoder_hidden_states' holds"):
        sample(open_pipeline(folder, "fp32"), positive, negative, SMALL)


def test_two_threads_share_one_model(model_folder, open_pipeline):
    import os

    handle = open_pipeline(model_folder("2b"), "fp16")
    handle.store.module("transformer", "fp16").proj_out.register_forward_hook(fails_in_half)
    (positive, negative), _ = encode_prompts(handle, ["a boat", ""])
    handle = replace(handle, policy=GuardPolicy(scope=Scope.STEP))
    runs = [(handle, 1), (replace(handle, policy=GuardPolicy(OnFailure.OFF)), 2), (handle, 3)]

    def go(run):
        return sample(run[0], positive, negative, replace(SMALL, seed=run[1]))

    alone = [go(run) for run in runs]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(go, runs))
    for (expected, _), (found, _) in zip(alone, together, strict=True):
        assert torch.equal(found.nan_to_num(9e9), expected.nan_to_num(9e9))
    assert [report.reruns for _, report in together] == [2, 0, 2]
    assert not any(name in os.environ for name in SWITCHES)


def test_a_folder_with_spaces_and_letters_of_other_alphabets(model_folder, open_pipeline, tmp_path):
    folder = shared_models.copied(model_folder("2b"), tmp_path / "модель – 模型 (1)")
    handle = open_pipeline(folder)
    (positive, negative), _ = encode_prompts(handle, ["кораблик 🚢", ""])
    latents, _ = sample(handle, positive, negative, SMALL)
    assert torch.isfinite(latents).all()


@pytest.mark.parametrize("where", ["to_device", "mend_narrowed"])
def test_a_component_that_failed_on_its_way_is_loaded_anew(model_folder, open_pipeline, monkeypatch, where):
    """Out of memory, or a file that is gone meanwhile: the next run must not take what is there for whole."""
    handle = open_pipeline(model_folder("2b"), "fp16")
    handle.store.drop("transformer")  # another test's
    owner = handle.store.placement if where == "to_device" else store

    def failing(*_):
        raise torch.OutOfMemoryError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(owner, where, failing)
        with pytest.raises(torch.OutOfMemoryError):
            handle.store.module("transformer", "fp16")
    assert "transformer" not in handle.store.loaded()
    handle.store.module("transformer", "fp16")
    assert handle.store.notes["transformer"] == ()


def test_an_eager_run_enters_no_file_of_compile(model_folder, open_pipeline):
    handle = open_pipeline(model_folder("2b"), "fp16")
    (positive, negative), _ = encode_prompts(handle, ["a boat", ""])
    entered: set[Path] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(Path(frame.f_code.co_filename))

    sys.setprofile(called)
    try:
        sample(handle, positive, negative, SMALL)
    finally:
        sys.setprofile(None)
    ours = {file.name for file in entered if file.parent == Path(backends.__file__).parent}
    assert not ours
