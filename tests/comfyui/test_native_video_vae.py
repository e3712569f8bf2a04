"""NaN Guard (native) on ComfyUI's video VAEs, many of which decode in chunks, into what they were handed."""

from __future__ import annotations

import native
import pytest
import torch

KINDS = ("cogvideox", "ltxv", "minimax_h3", "wan2.1", "wan2.2", "hunyuan_video", "hunyuan_video1.5")
HIDING = ("ltxv", "minimax_h3", "wan2.2")  # by a norm, a nan_to_num in place, a norm


@pytest.fixture(scope="module", params=native.WHOLE.values(), ids=native.WHOLE)
def ran(request: pytest.FixtureRequest, leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_video_vae_cases", tmp_path_factory.mktemp("native_video_vae"), *request.param, leg=leg)


def there(ran: native.Ran, kind: str) -> None:
    if kind not in ran["each/kinds"]:
        pytest.skip("this ComfyUI has no such VAE")


@pytest.mark.parametrize("call", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_vae_is_the_same_to_the_bit(ran: native.Ran, kind: str, call: str) -> None:
    there(ran, kind)
    plain, guarded = (ran[f"each/{kind}, {call}, healthy, {how}"] for how in ("plain", "guarded"))
    assert plain.isfinite().all() and plain.std() > 0 and torch.equal(plain, guarded)
    assert "1 call, 0 reruns" in ran[f"each/{kind}, {call}, healthy, said"]


@pytest.mark.parametrize("call", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vae_that_overflows_is_broken_without_and_right_with_it(ran: native.Ran, kind: str, call: str) -> None:
    there(ran, kind)
    plain, guarded, fp32 = (ran[f"each/{kind}, {call}, hot, {how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isnan().any()
    assert fp32.std() > 0 and native.difference(guarded, fp32) <= 1e-5
    assert "1 call, 1 rerun" in ran[f"each/{kind}, {call}, hot, said"]


@pytest.mark.parametrize("call", ["decode", "encode"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_every_layer_wide_it_does_not_overflow(ran: native.Ran, kind: str, call: str) -> None:
    there(ran, kind)
    wide, fp32 = (ran[f"each/{kind}, {call}, hot, {how}"] for how in ("wide", "fp32"))
    assert (wide - fp32).norm() <= 5e-3 * fp32.norm()
    assert ", every layer wide; 1 call, 0 reruns" in ran[f"each/{kind}, {call}, hot, wide said"]


@pytest.mark.parametrize("kind", HIDING)
def test_what_a_vae_hides_is_seen(ran: native.Ran, kind: str) -> None:
    there(ran, kind)
    plain, guarded, fp32 = (ran[f"each/{kind}, decode, hidden, {how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isfinite().all() and native.difference(plain, fp32) > 0.05
    assert native.difference(guarded, fp32) <= 1e-5
    assert "1 call, 1 rerun" in ran[f"each/{kind}, decode, hidden, said"]


@pytest.mark.parametrize("kind", ["ltxv", "minimax_h3"])
def test_what_chunks_are_written_to_may_be_in_half_precision(ran: native.Ran, kind: str) -> None:
    there(ran, kind)
    if not ran["half_buffer/here"]:
        pytest.skip("this ComfyUI keeps what comes out in float32")
    plain, guarded, fp32 = (ran[f"half_buffer/{kind}, {how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isnan().any() and guarded.dtype is fp32.dtype is torch.float16
    assert torch.equal(guarded, fp32)


def test_a_quantised_decoder_is_rerun_from_what_its_checkpoint_holds(ran: native.Ran) -> None:
    there(ran, "minimax_h3")
    assert torch.equal(ran["quantised/healthy, guarded"], ran["quantised/healthy, plain"])
    plain, guarded, fp32 = (ran[f"quantised/hot, {how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isnan().any() and native.difference(guarded, fp32) <= 1e-5
    assert "rerun from the int8_tensorwise weights as they are stored" in ran["quantised/hot, said"]
