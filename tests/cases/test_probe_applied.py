"""The Numerics Probe's recommendation through the NaN Guard: no step of any mechanism's model fails any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.comfyui_host import host
from diffusers import CogVideoXTransformer3DModel, CogView3PlusTransformer2DModel
from mechanisms import CLIPPED, overflow_inside_a_feed_forward, overflow_stream


@pytest.fixture
def probed_and_applied(card, tmp_path) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]], torch.Tensor]]:
    """(what the probe told, the sampler's steps with its profile applied, latents)."""

    def run(family: str, folder: Path, name: str = "sm75"):
        card(name)
        graph = GRAPHS[family]
        sizes = {key: graph.sampling[key] for key in ("width", "height", "frames") if key in graph.sampling}
        with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
            pipeline = graph.load(folder)
            positive, negative = graph.encode(pipeline)["result"]
            probe = call(
                "NumericsProbe", pipeline=pipeline, positive=positive, negative=negative, steps=2, seed=3, **sizes
            )
            profile = probe["result"][2]
            (guarded,) = call("NaNGuard", pipeline=pipeline, scope="learned", profile=profile)["result"]
            sampled = graph.sample(guarded, (positive, negative))
        report = sampled["ui"]["onediff_guard"][0]
        return probe["ui"]["onediff_guard"][0], report["steps"], sampled["result"][0]["samples"]

    return run


def assert_nothing_failed(steps, latents, dtype="fp16"):
    assert {(step["dtype"], step["outcome"]) for step in steps} == {(dtype, "finite")}
    assert torch.isfinite(latents).all()


@pytest.mark.parametrize("family", ["5b", "1.5", "cogview3", "cogview4"])
def test_a_stream_that_overflows(model_folder, probed_and_applied, family):
    told, steps, latents = probed_and_applied(family, model_folder(family, "stream"))
    assert told["learned"]["all_layers_scaled"]
    assert_nothing_failed(steps, latents)


def test_an_inner_overflow(model_folder, changed, probed_and_applied):
    folder = changed(model_folder("5b"), "transformer", CogVideoXTransformer3DModel, overflow_inside_a_feed_forward)
    told, steps, latents = probed_and_applied("5b", folder)
    assert told["learned"]["all_layers_scaled"]
    assert told["worst"][0]["name"] == "transformer_blocks.1.ff.net.0.proj"
    assert_nothing_failed(steps, latents)


@pytest.mark.parametrize("clipped", CLIPPED)
def test_a_stream_that_is_clipped(cogview3_folder, changed, probed_and_applied, clipped):
    change = overflow_stream(*CLIPPED[clipped])
    folder = changed(cogview3_folder, "transformer", CogView3PlusTransformer2DModel, change)
    told, steps, latents = probed_and_applied("cogview3", folder)
    assert told["learned"]["all_layers_scaled"]
    assert_nothing_failed(steps, latents)


def test_a_card_with_bf16_stays_with_it(model_folder, probed_and_applied):
    told, steps, latents = probed_and_applied("1.5", model_folder("1.5", "stream"), "sm80")
    assert told["plan"] == "bf16"
    assert_nothing_failed(steps, latents, "bf16")
