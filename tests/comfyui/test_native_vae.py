"""NaN Guard (native) on ComfyUI's own small VAEs, in a current ComfyUI: SD1.5's layout and SVD's, whole and tiled."""

from __future__ import annotations

import re

import native
import pytest
import torch

CALLS = ("decode", "decode tiled", "encode", "encode tiled")


@pytest.fixture(scope="module", params=native.WHOLE.values(), ids=native.WHOLE)
def ran(request: pytest.FixtureRequest, leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_vae_cases", tmp_path_factory.mktemp("native_vae"), *request.param, leg=leg)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("call", CALLS)
def test_a_healthy_vae_is_the_same_to_the_bit(ran: native.Ran, call: str, dtype: torch.dtype) -> None:
    plain, guarded = (ran[f"healthy/{call}, {dtype}, {how}"] for how in ("plain", "guarded"))
    assert plain.isfinite().all() and torch.equal(plain, guarded)
    assert len(ran["healthy/said"]) == 2 * len(CALLS)  # one report for each, whatever the number of tiles
    assert all("0 reruns" in text for text in ran["healthy/said"])


@pytest.mark.parametrize("call", CALLS)
def test_a_vae_that_overflows_is_broken_without_and_right_with_it(ran: native.Ran, call: str) -> None:
    plain, guarded, fp32 = (ran[f"overflow/{call}, {how}"] for how in ("plain", "guarded", "fp32"))
    assert torch.isnan(plain).all()
    assert torch.equal(guarded, fp32)
    part = call.split()[0]
    counts = re.search(r"(\d+) calls?, (\d+) reruns?", ran[f"overflow/{call}, said"][-1])
    assert counts and counts[1] == counts[2]
    assert (int(counts[1]) > 1) is ("tiled" in call)
    assert ran[f"overflow/{call}, said"][-1].startswith(f"VAE {part}r: AutoencoderKL computes in fp16")
    assert f"'{part}r.mid.block_1.conv1' reaches" in ran[f"overflow/{call}, said"][-1]


@pytest.mark.parametrize("call", CALLS)
def test_with_every_layer_wide_it_does_not_overflow(ran: native.Ran, call: str) -> None:
    wide, bf16, fp32 = (ran[f"overflow/{call}, {how}"] for how in ("fp16", "bf16", "fp32"))
    assert (wide - fp32).norm() <= (bf16 - fp32).norm() / 4
    assert ", every layer wide; " in ran[f"overflow/{call}, fp16 said"][-1]
    assert ", 0 reruns" in ran[f"overflow/{call}, fp16 said"][-1]


def test_svds_decoder_is_guarded_over_all_frames(ran: native.Ran) -> None:
    assert torch.isnan(ran["temporal/plain"]).all()
    assert torch.equal(ran["temporal/guarded"], ran["temporal/fp32"])


def test_one_bad_tile_costs_one_tile(ran: native.Ran) -> None:
    assert torch.isnan(ran["one_tile/plain"]).any() and not torch.isnan(ran["one_tile/plain"]).all()
    assert native.difference(ran["one_tile/guarded"], ran["one_tile/fp32"]) <= 2e-2
    counts = re.search(r"(\d+) calls, (\d+) reruns?", ran["one_tile/said"][-1])
    assert counts and 0 < int(counts[2]) < int(counts[1])


def test_the_vae_that_went_in_is_not_changed(ran: native.Ran) -> None:
    assert ran["comes_off/unchanged"]
    assert torch.isnan(ran["comes_off/plain"]).all()
    assert torch.isnan(ran["comes_off/the last node counts"]).all()
    assert ran["comes_off/shares weights"] and ran["comes_off/same class"]


def test_what_the_policy_says_is_done(ran: native.Ran) -> None:
    assert "vae decode, call 1" in ran["policies/stop"] and "set to stop" in ran["policies/stop"]
    assert torch.isnan(ran["policies/off"]).all()
    assert torch.equal(ran["policies/scope run"], ran["policies/scope step"])


def test_what_no_precision_helps_is_named(ran: native.Ran) -> None:
    assert "the weight 'decoder.conv_in.weight' holds" in ran["policies/weight"]
    for case in ("latents", "latents in fp32"):
        assert "holds 144 non-finite values already" in ran[f"policies/{case}"]
    assert ran["policies/replaced"].startswith("BadInput: Another node has replaced this VAE's 'decode'")
    assert ran["policies/empty"].startswith("BadInput: There is no VAE in this checkpoint")
