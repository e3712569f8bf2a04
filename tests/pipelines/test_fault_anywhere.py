"""A fault in any layer of any stage, from any call on: found, named correctly, recovered, and no state is left."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from generations import Generation
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from small_runs import opened
from tiers import by_tier

STAGES = {  # (model, stage) → the component, and the part of it that runs
    ("5b-i2v", "text_encoder"): ("text_encoder", ""),
    ("5b-i2v", "vae_encode"): ("vae", "encoder"),
    ("5b-i2v", "denoiser"): ("transformer", ""),
    ("5b-i2v", "vae_decode"): ("vae", "decoder"),
    ("cogview4", "denoiser"): ("transformer", ""),
    ("svd", "image_encoder"): ("image_encoder", ""),
    ("wan", "text_encoder"): ("text_encoder", ""),
    ("wan", "denoiser"): ("transformer", ""),
    ("wan", "vae_decode"): ("vae", "decoder"),
    ("wan-two", "denoiser"): ("transformer_2", ""),
}
HEALTH = {"suppress_health_check": list(HealthCheck), "max_examples": by_tier(6, 2), "derandomize": True}


def run(handle, model):
    """(frames, {stage: its report})"""
    generation = Generation(handle, model)
    return generation.whole(), generation.reports


def distance(frames, exact):
    return (frames - exact).square().mean().sqrt()


@contextmanager
def broken(layer, first_call):
    """Make the layer's half-precision output NaN from this call on. Yields a list, filled once that happens."""
    forward, happened, calls = layer.forward, [], iter(range(10**6))

    def faulty(*args, **kwargs):
        output = forward(*args, **kwargs)
        if isinstance(output, torch.Tensor) and output.dtype == torch.bfloat16 and next(calls) >= first_call:
            happened.append(True)
            output = output * torch.nan
        return output

    layer.forward = faulty
    try:
        yield happened
    finally:
        del layer.forward


@pytest.mark.parametrize(("model", "stage"), STAGES)
@settings(**HEALTH)
@given(data=st.data())
def test_fault_in_any_layer_of_any_stage_is_recovered(model, stage, data):
    component, part = STAGES[model, stage]
    handle = opened(model, precision="bf16")
    healthy, _ = run(handle, model)
    handle.store.prompts.clear()  # so that the text encoder runs again
    owner = handle.store.module(component, "bf16").get_submodule(part)
    layers = {name: layer for name, layer in owner.named_modules() if name and not [*layer.children()]}
    layers = {name: layer for name, layer in layers.items() if [*layer.parameters()]}
    before = {name: vars(layer).copy() for name, layer in layers.items()}
    name = data.draw(st.sampled_from(sorted(layers)))
    first_call = data.draw(st.sampled_from([0, 0, 1]))
    with broken(layers[name], first_call) as happened:
        frames, reports = run(handle, model)
    assume(happened)
    failed = [step for step in reports[stage].steps if step.outcome == "rerun"]
    assert failed and failed[0].stage == stage and failed[0].rerun and failed[0].rerun.module == name
    others = [report for other, report in reports.items() if other != stage]
    assert not [step for report in others for step in report.steps if step.outcome != "finite"]
    assert torch.isfinite(frames).all()
    exact, _ = run(opened(model), model)
    assert distance(frames, exact) < 4 * distance(healthy, exact)  # small random models are that sensitive to rounding
    for name, layer in layers.items():
        assert {key: value for key, value in vars(layer).items() if not key.startswith("_")} == {
            key: value for key, value in before[name].items() if not key.startswith("_")
        }
        assert not layer._forward_hooks and not layer._forward_pre_hooks
    counted = sum(report.as_dict()["rerun_seconds"] for report in reports.values())
    assert 0 < counted < sum(report.as_dict()["seconds"] for report in reports.values())
