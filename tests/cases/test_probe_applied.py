"""Numerics Probe's recommendation, used by NaN Guard: no step fails."""

from __future__ import annotations

import pytest
import torch
from as_comfyui import GRAPHS, call
from comfyui_onediff_guard.comfyui_host import host


@pytest.mark.parametrize("family", ["5b", "1.5", "cogview3", "cogview4"])
def test_probe_profile_keeps_every_fp16_step_finite(model_folder, card, tmp_path, family):
    folder, graph = model_folder(family, "stream"), GRAPHS[family]
    card("sm75")
    sizes = {key: graph.sampling[key] for key in ("width", "height", "frames") if key in graph.sampling}
    with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
        pipeline = graph.load(folder)
        positive, negative = graph.encode(pipeline)["result"]
        wired = {"pipeline": pipeline, "positive": positive, "negative": negative}
        probe = call("NumericsProbe", **wired, steps=2, seed=3, **sizes)
        (guarded,) = call("NaNGuard", pipeline=pipeline, scope="learned", profile=probe["result"][2])["result"]
        sampled = graph.sample(guarded, (positive, negative))
    assert probe["ui"]["onediff_guard"][0]["learned"]["all_layers_scaled"]
    steps = sampled["ui"]["onediff_guard"][0]["steps"]
    assert {(step["dtype"], step["outcome"]) for step in steps} == {("fp16", "finite")}
    assert torch.isfinite(sampled["result"][0]["samples"]).all()
