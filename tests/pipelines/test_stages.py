"""Stages other than the denoiser, folders with unusual names, and failed loads."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from unittest.mock import Mock

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.run.stage import Calls
from comfyui_onediff_guard.pipelines.run.vae import guarded_encoder
from comfyui_onediff_guard.pipelines.weights import components as store
from comfyui_onediff_guard.precision.guard import GuardStopped
from comfyui_onediff_guard.precision.policy import Component
from hostile import rewrite
from small_runs import SMALL, error, opened, prompts, sampled
from transformers import T5EncoderModel


def overflow_in_feed_forward(tensors):
    """Make the product inside T5's gated feed-forward overflow fp16. The next layer scales it back."""
    for name, tensor in tensors.items():
        if name.endswith((".wi_0.weight", ".wi_1.weight")):
            tensor.mul_(1e5**0.5)
        elif name.endswith(".wo.weight"):
            tensor.div_(1e5)


def overflow_in_attention(tensors):
    """Make the output of the first attention overflow fp16, where T5 clamps it to ±64504. The weights are the same in
    fp16 and fp32."""
    weight = tensors["encoder.block.0.layer.0.SelfAttention.o.weight"]
    weight.mul_(6e4 / weight.abs().max())
    for tensor in tensors.values():
        tensor.copy_(tensor.half())


def overflow_in_encoder(tensors):
    """Make it overflow as Stable Video Diffusion's does. The weights are the same in fp16 and fp32."""
    for tensor in tensors.values():
        tensor.copy_(tensor.half())
    tensors["encoder.conv_in.weight"].mul_(2.0**18)


def broken(folder, component, how):
    rewrite(folder, component, how)
    return folder


@pytest.fixture
def overflowing_text_encoder(copy):
    return broken(copy("2b"), "text_encoder", overflow_in_feed_forward)


def encoded(folder, precision):
    """The embeddings of a prompt and of an empty one, and the stage's report."""
    return encode_prompts(opened(folder, precision=precision), ["a boat", ""])


def test_protected_text_encoder_does_not_overflow(overflowing_text_encoder):
    folder = overflowing_text_encoder
    (expected, _), _ = encoded(folder, "fp32")
    (found, _), report = encoded(folder, "fp16")
    assert report.protection == "overflow protection" and report.reruns == 0
    assert found.dtype == torch.float32
    assert error(found, expected) <= 2e-3
    assert not torch.isfinite(encoded(folder, "fp16 (plain)")[0][0]).all()


def test_protected_text_encoder_clamps_nothing(copy):
    folder = broken(copy("2b"), "text_encoder", overflow_in_attention)
    expected, _ = encoded(folder, "fp32")
    (plain, unguarded), (_, again) = (encoded(folder, "fp16 (plain)") for _ in range(2))
    found, report = encoded(folder, "fp16")
    for embeddings, wrong, right in zip(found, plain, expected, strict=True):
        assert wrong.isfinite().all() and error(wrong, right) > 0.2
        assert error(embeddings, right) <= 2e-3
    assert (report.reruns, unguarded.failed, again.failed) == (0, 2, 2), "it is reported each time"


@pytest.mark.parametrize("precision", ["fp16 (plain)", "bf16"])
def test_unprotected_text_encoder_is_bit_equal_to_transformers(precision):
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    handle = opened("2b", precision=precision)
    text_encoder = T5EncoderModel.from_pretrained(handle.store.model.path / "text_encoder", dtype=dtype)
    found, report = encode_prompts(handle, ["a boat", ""])
    tokens = handle.store.unweighted("tokenizer")(
        "a boat", padding="max_length", max_length=found[0].shape[1], return_tensors="pt"
    ).input_ids
    with torch.no_grad():
        assert torch.equal(found[0], text_encoder(tokens).last_hidden_state.float())
    assert report.reruns == 0 and not report.protection


def test_non_finite_embeddings_are_not_cached_and_stop_sampling(overflowing_text_encoder):
    handle = opened(overflowing_text_encoder, precision="fp16 (plain)")
    (non_finite, negative), _ = encode_prompts(handle, ["a boat", ""])
    assert not torch.isfinite(non_finite).all()
    assert all(kept.isfinite().all() for kept in handle.store.prompts.values())
    with pytest.raises(GuardStopped, match="input 'encoder_hidden_states' holds"):
        sample(opened(overflowing_text_encoder), non_finite, negative, SampleSettings(*SMALL[:2], 1, 0, SMALL[2], 6.0))


def test_protected_svd_encoder_is_near_fp32_where_plain_fp16_is_nan(copy):
    folder = broken(copy("svd"), "vae", overflow_in_encoder)
    pixels = torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1

    def moments(precision):
        stage = opened(folder, precision=precision).stage(Component.VAE_ENCODE)
        guarded = guarded_encoder(stage, Calls("encoding {} of {}", lambda *_: None))
        with torch.no_grad():
            return guarded.encode(pixels).latent_dist.parameters, stage

    (expected, _), (plain, unguarded) = (moments(precision) for precision in ("fp32", "fp16 (plain)"))
    assert not plain.isfinite().any() and unguarded.report.protection == ""
    found, stage = moments("fp16")
    assert [(step.dtype, step.outcome) for step in stage.report.steps] == [("fp16", "finite")]
    assert stage.report.protection == "overflow protection"
    assert "overflow protection; 1 part, fine" in stage.report.summary()
    assert stage.handle.store.loaded() == {"vae": "fp16"} and error(found, expected) < 2e-3
    assert moments("bf16")[1].report.protection == ""


def test_folder_with_spaces_and_non_ascii_letters_works(model_folder, tmp_path):
    handle = opened(shared_models.copied(model_folder("2b"), tmp_path / "модель – 模型 (1)"))
    assert torch.isfinite(encode_prompts(handle, ["кораблик 🚢"])[0][0]).all()
    assert torch.isfinite(sampled(handle, SMALL)[0]).all()


@pytest.mark.parametrize("where", ["to_device", "mend_narrowed"])
def test_component_that_failed_to_load_is_loaded_again(monkeypatch, where):
    """After out of memory or a deleted file, the next run must not use an incomplete component."""
    handle = opened("2b", precision="fp16")
    handle.store.drop("transformer")  # loaded by another test
    owner = handle.store.placement if where == "to_device" else store
    with monkeypatch.context() as broken:
        broken.setattr(owner, where, Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            handle.store.module("transformer", "fp16")
    assert "transformer" not in handle.store.loaded()
    handle.store.module("transformer", "fp16")
    assert handle.store.notes["transformer"] == ()


def test_eager_run_calls_no_code_of_compile_package():
    handle = opened("2b", precision="fp16")
    prompts(handle)
    entered: set[Path] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(Path(frame.f_code.co_filename))

    sys.setprofile(called)
    try:
        sampled(handle, SMALL)
    finally:
        sys.setprofile(None)
    called_files = {file.name for file in entered if file.parent == Path(backends.__file__).parent}
    assert not called_files
