"""NaN Guard (MODEL) on ComfyUI's own small models, in a current ComfyUI, in the layouts of several families."""

from __future__ import annotations

import native
import pytest
import torch

LAYOUTS = ("sd15", "sdxl", "svd", "flux", "wan", "ace", "lumina2", "z_image")
CLIPS = ("flux", "lumina2", "z_image")  # in fp16 what overflowed is hidden, in Lumina2 and Z-Image by newer ComfyUIs
CLIPS_IN_FP32_TOO = ("ace",)
HALF = ("fp16", "bf16", "fp16 computed in bf16", "fp32 computed in fp16", "fp8 computed in fp16")
STEPS = 3


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_model_cases", tmp_path_factory.mktemp("native_model"))


def skip_missing(ran: native.Ran, layout: str) -> None:
    if layout not in ran["healthy/layouts"]:
        pytest.skip(f"this ComfyUI has no {layout}")


def looks(plain: torch.Tensor, fp32: torch.Tensor) -> str:
    if torch.isnan(plain).all():
        return "NaN"
    return "finite, and wrong" if native.difference(plain, fp32) > 2e-2 else "finite, and right"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_healthy_run_is_the_same_to_the_bit(ran: native.Ran, layout: str, dtype: str) -> None:
    skip_missing(ran, layout)
    plain, guarded, fp32 = (ran[f"healthy/{layout}, {dtype}, {how}"] for how in ("plain", "guarded", "fp32"))
    assert torch.equal(plain, guarded)
    assert not torch.equal(plain, fp32)  # it did run in half precision
    assert all("0 reruns" in text for text in ran["healthy/said"])


@pytest.mark.parametrize("dtype", ["fp16", "fp32 computed in fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_that_overflows_is_broken_without_and_right_with_it(ran: native.Ran, layout: str, dtype: str) -> None:
    skip_missing(ran, layout)
    plain, guarded, fp32 = (ran[f"overflow/{layout}, {dtype}, {how}"] for how in ("plain", "guarded", "fp32"))
    hidden = layout == "flux" or (layout in CLIPS and ran["overflow/Lumina2 clips"])
    wrong = "finite, and wrong" if hidden else "NaN"
    assert looks(plain, fp32) == ("finite, and right" if layout in CLIPS_IN_FP32_TOO else wrong)
    assert torch.equal(guarded, fp32)  # all steps failed, and each rerun is what the same weights give in fp32
    said = ran[f"overflow/{layout}, {dtype}, said"]
    assert f"{STEPS} steps, {STEPS} reruns" in said[-1]
    assert len(said) == STEPS + 1 and said[0].startswith("call 1: non-finite in fp16")


def test_the_report_names_the_layer(ran: native.Ran) -> None:
    assert "'input_blocks.1.0.in_layers.2' reaches" in ran["overflow/sd15, fp16, said"][-1]
    assert "'double_blocks.0.txt_mlp.2' reaches" in ran["overflow/flux, fp16, said"][-1]


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
