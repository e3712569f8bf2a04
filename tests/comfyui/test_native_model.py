"""NaN Guard (native) on ComfyUI's own small models, in a current ComfyUI: what it does, says and leaves."""

from __future__ import annotations

import native
import pytest
import torch

STEPS = 3


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_model_cases", tmp_path_factory.mktemp("native_model"), leg=leg)


def test_the_report_names_the_layer(ran: native.Ran) -> None:
    assert "'input_blocks.1.0.in_layers.2' reaches" in ran["report/sd15"][-1]
    assert "'double_blocks.0.txt_mlp.2' reaches" in ran["report/flux"][-1]


@pytest.mark.parametrize("layout", ["sd15", "flux"])
def test_each_rerun_is_told_as_it_happens(ran: native.Ran, layout: str) -> None:
    said = ran[f"report/{layout}"]
    assert f"{STEPS} steps, {STEPS} reruns" in said[-1]
    assert len(said) == STEPS + 1 and said[0].startswith("call 1: non-finite in fp16")


def test_the_model_that_went_in_is_not_changed(ran: native.Ran) -> None:
    assert ran["comes_off/unchanged"]
    assert torch.isnan(ran["comes_off/plain"]).all()
    assert ran["comes_off/wrappers"] == [1, 1]  # a second guard takes the first one's place


def test_what_the_policy_says_is_done(ran: native.Ran) -> None:
    assert "call 1" in ran["policies/stop"] and "set to stop" in ran["policies/stop"]
    assert torch.isnan(ran["policies/off"]).all()
    assert f"0 reruns, {STEPS} NOT FINITE" in ran["policies/off said"][-1]
    assert torch.equal(ran["policies/scope step"], ran["policies/scope run"])
    assert torch.equal(ran["policies/the last node counts"], ran["policies/scope step"])
    fp16, fp32 = "torch.float16", "torch.float32"
    looked_for = [fp16]  # where it fails, once
    assert ran["policies/scope run calls"] == [fp16, fp32, fp32, fp32]
    assert ran["policies/scope step calls"] in ([fp16, fp32] * STEPS, [fp16, fp32, *looked_for, *[fp16, fp32] * 2])


@pytest.mark.parametrize("case", ["weight", "weight in fp32"])
def test_a_damaged_weight_ends_the_run_by_name(ran: native.Ran, case: str) -> None:
    assert ran[f"hopeless/{case}"].startswith("GuardStopped")
    assert "'input_blocks.1.0.in_layers.2.weight' holds" in ran[f"hopeless/{case}"]


def test_a_broken_input_is_not_blamed_on_the_model(ran: native.Ran) -> None:
    assert "was given latents with 512 non-finite values" in ran["hopeless/latents"]
    assert "was given condition 'y' with 24 non-finite values" in ran["hopeless/prompt"]
    assert ran["hopeless/afterwards"].isfinite().all()


def test_a_controlnet_reaches_the_rerun(ran: native.Ran) -> None:
    assert native.difference(ran["control/without"], ran["control/fp32"]) > 2e-2
    assert torch.equal(ran["control/guarded"], ran["control/fp32"])


def test_what_a_newer_comfyui_gives_the_sampler_is_handed_on(ran: native.Ran) -> None:
    assert ran["newer/handed on"] == {"latent_shapes": [[1, 4]]}
