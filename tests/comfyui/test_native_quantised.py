"""NaN Guard (native) on quantised checkpoints, in every format that ComfyUI has: its rerun is fp32."""

from __future__ import annotations

import native
import pytest
import torch

FORMATS = {
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int8": "int8_tensorwise",
    "int8, rotated": "int8_tensorwise",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
    "convrot_w4a4": "convrot_w4a4",
    "asym_w4a8_int8": "asym_w4a8_int8",
}
NOT_ON_CPU = ("nvfp4", "mxfp8")  # their products
ALL = [
    (name, way) for name in FORMATS for way in ("own", "emulated", "whole") if way != "own" or name not in NOT_ON_CPU
]


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    ran = native.run("native_quantised_cases", tmp_path_factory.mktemp("native_quantised"), leg=leg)
    if not ran["formats/here"]:
        pytest.skip("this ComfyUI has no layers with quantised weights")
    return ran


def test_no_format_is_left_out(ran: native.Ran) -> None:
    assert set(ran["formats/all"]) == set(FORMATS.values())


@pytest.mark.parametrize(("kind", "way"), ALL)
def test_a_rerun_multiplies_in_fp32_what_the_checkpoint_holds(ran: native.Ran, kind: str, way: str) -> None:
    plain, guarded, fp32 = (ran[f"formats/{kind}, {way}, {how}"] for how in ("plain", "guarded", "fp32"))
    assert not plain.isfinite().all()
    assert native.difference(guarded, fp32) <= 1e-5
    said = ran[f"formats/{kind}, {way}, said"]
    assert "2 steps, 2 reruns" in said
    assert f"rerun from the {FORMATS[kind]} weights as they are stored, with products in fp32" in said
    assert ran[f"formats/{kind}, {way}, switches as before"]


@pytest.mark.parametrize(("kind", "way"), ALL)
def test_a_healthy_run_keeps_its_products(ran: native.Ran, kind: str, way: str) -> None:
    plain, guarded = (ran[f"formats/{kind}, {way}, healthy {how}"] for how in ("plain", "guarded"))
    assert plain.isfinite().all() and torch.equal(guarded, plain)
    said = ran[f"formats/{kind}, {way}, healthy said"]
    assert "0 reruns" in said and "as they are stored" not in said


@pytest.mark.parametrize(
    "call", ["plain", *(f"{act}{how}" for act in ("gelu_tanh", "swiglu") for how in ("", ", by name", ", newer"))]
)
@pytest.mark.parametrize("kind", FORMATS)
def test_one_thread_has_its_products_in_full_and_others_keep_theirs(ran: native.Ran, kind: str, call: str) -> None:
    inside, other_thread, afterwards = ran[f"products/{kind}, {call}"]
    assert inside <= 1e-6
    assert other_thread == afterwards
    assert other_thread is None if kind in NOT_ON_CPU else other_thread > 1e-3


def test_an_interrupted_rerun_leaves_nothing(ran: native.Ran) -> None:
    assert ran["interrupted/inside"] and ran["interrupted/interrupted"] and ran["interrupted/as before"]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "int8", "nvfp4"])
def test_a_lora_on_quantised_weights_is_in_the_rerun(ran: native.Ran, kind: str) -> None:
    assert ran[f"lora/{kind}, on the way"] == 1
    guarded, fp32, without = (ran[f"lora/{kind}, {how}"] for how in ("lowvram guarded", "lowvram fp32", "fp32 without"))
    assert native.difference(guarded, fp32) <= 1e-5 < 1e-3 < native.difference(without, fp32)
    guarded, fp32 = (ran[f"lora/{kind}, loaded {how}"] for how in ("guarded", "fp32"))
    assert native.difference(guarded, fp32) <= 1e-5
    assert ran[f"lora/{kind}, moved by"] > 0  # it was quantised anew
    assert "2 steps, 2 reruns" in ran[f"lora/{kind}, said"]


def test_what_rounding_hides_is_seen(ran: native.Ran) -> None:
    plain, guarded, fp32 = (ran[f"hidden/{how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isfinite().all() and native.difference(plain, fp32) > 0.01
    assert native.difference(guarded, fp32) <= 1e-5
    assert "1 step, 1 rerun" in ran["hidden/said"]


def test_what_cannot_be_rerun_is_refused_by_name(ran: native.Ran) -> None:
    error = ran["refused/no switch"]
    assert error.startswith("RerunUnsupported: 'blocks.1.self_attn.q.weight' is quantised (TensorWiseINT8Layout)")
    assert "a Linear, has no switch" in error and "Update ComfyUI" in error
    assert ran["refused/broken"].startswith("GuardStopped")
    assert "the weight 'blocks.1.ffn.2.weight' holds" in ran["refused/broken"]
