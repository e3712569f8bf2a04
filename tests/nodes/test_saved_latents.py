"""Latents that are saved and decoded later: damaged, of another model, and after a failed decode.

tests/comfyui/test_latents_in_comfyui.py decodes those of each family in another process.
"""

from __future__ import annotations

import gc
from unittest.mock import Mock

import pytest
import torch
from as_comfyui import GRAPHS, call, load_latent, save_latent
from comfyui_onediff_guard.precision.guard import GuardStopped
from comfyui_onediff_guard.trust.message import BadInput

pytestmark = pytest.mark.usefixtures("without_comfyui")


def sampled(family, folder, **settings):
    """(pipeline, latents)."""
    gc.collect()  # pipelines of earlier tests
    graph = GRAPHS[family]
    pipeline = graph.load(folder, precision="fp32")
    prompts = graph.encode(pipeline)["result"] if graph.prompted else ()
    return pipeline, graph.sample(pipeline, prompts, **settings)["result"][0]


DAMAGES = {
    "NaN": (
        lambda tensor: tensor.index_fill(-1, torch.tensor([0]), float("nan")),
        GuardStopped,
        "values are NaN or infinite",
    ),
    "infinite": (lambda tensor: tensor * float("inf"), GuardStopped, "values are NaN or infinite"),
    "a dimension short": (lambda tensor: tensor[0], BadInput, r"have shape \(16, 3, 4, 4\), but CogVideoX-2B decodes"),
    "channels lost": (
        lambda tensor: tensor[:, :7],
        BadInput,
        r"\(1, 7, 3, 4, 4\).*\[batch, 16, frames, height, width\]",
    ),
    "empty": (lambda tensor: tensor[:0], BadInput, r"have shape \(0, 16, 3, 4, 4\)"),
    "no frame": (lambda tensor: tensor[:, :, :0], BadInput, r"have shape \(1, 16, 0, 4, 4\)"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_latents_are_refused_before_weights_are_read(model_folder, tmp_path, damage):
    change, error, message = DAMAGES[damage]
    pipeline, latents = sampled("2b", model_folder("2b"))
    whole, broken = tmp_path / "whole.latent", tmp_path / "broken.latent"
    save_latent(latents, whole)
    save_latent({"samples": change(latents["samples"]).contiguous()}, broken)
    loaded = pipeline.store.loaded()
    for guarded in ("rerun", "stop"):
        (handle,) = call("NaNGuard", pipeline=pipeline, on_failure=guarded)["result"]
        with pytest.raises(error, match=message):
            GRAPHS["2b"].decode(handle, load_latent(broken))
        assert pipeline.store.loaded() == loaded
    images = GRAPHS["2b"].decode(pipeline, load_latent(whole))["result"][0]
    assert torch.isfinite(images).all(), "valid latents decode without sampling again"


def test_latents_are_unchanged_after_failed_decode(model_folder, monkeypatch, tmp_path):
    """After out of memory in the decoder, the same latents can be decoded in tiles."""
    from diffusers import AutoencoderKLCogVideoX

    pipeline, latents = sampled("2b", model_folder("2b"))
    before = latents["samples"].clone()
    with monkeypatch.context() as full:
        full.setattr(AutoencoderKLCogVideoX, "decode", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            GRAPHS["2b"].decode(pipeline, latents)
    assert torch.equal(latents["samples"], before)
    images = GRAPHS["2b"].decode(pipeline, latents, tiling=True)["result"][0]
    assert torch.isfinite(images).all()


OTHERS = [("cogview3", "2b"), ("2b", "svd"), ("svd", "cogview4"), ("cogview3", "cogview4"), ("cogview4", "cogview3")]


@pytest.mark.parametrize(("made_by", "decoded_by"), OTHERS)
def test_latents_of_another_family_are_refused(model_folder, made_by, decoded_by):
    _, latents = sampled(made_by, model_folder(made_by))
    graph = GRAPHS[decoded_by]
    pipeline = graph.load(model_folder(decoded_by), precision="fp32")
    with pytest.raises(BadInput, match="Wire them from a"):
        graph.decode(pipeline, latents)
    assert pipeline.store.loaded() == {}


def test_latents_of_other_model_of_same_family_are_decoded(model_folder):
    _, latents = sampled("5b-i2v", model_folder("5b-i2v"))
    pipeline = GRAPHS["5b"].load(model_folder("5b"), precision="fp32")
    assert torch.isfinite(GRAPHS["5b"].decode(pipeline, latents)["result"][0]).all()
