"""NaN Guard (native) on models with fp8 weights, of which some layers multiply in fp8: its rerun is fp32."""

from __future__ import annotations

import native
import pytest
import torch

KINDS = ("fp8_ops", "scaled fp8", "scaled fp8, no input scale", "scaled fp8 weights")


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_product_cases", tmp_path_factory.mktemp("native_products"), leg=leg)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rerun_multiplies_in_fp32_what_the_checkpoint_holds(ran: native.Ran, kind: str) -> None:
    if kind not in ran["products/kinds"]:
        pytest.skip("this ComfyUI has no such layers")
    plain, guarded, fp32 = (ran[f"products/{kind}, {how}"] for how in ("plain", "guarded", "fp32"))
    assert ran[f"products/{kind}, in fp8"] == (kind != "scaled fp8 weights")
    assert torch.isnan(plain).all()
    assert native.difference(guarded, fp32) <= 1e-5
    said = ran[f"products/{kind}, said"]
    assert "2 steps, 2 reruns" in said
    assert "rerun from the float8_e4m3fn weights as they are stored, with products in fp32" in said


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_keeps_its_products(ran: native.Ran, kind: str) -> None:
    if kind not in ran["products/kinds"]:
        pytest.skip("this ComfyUI has no such layers")
    assert torch.equal(ran[f"products/{kind}, healthy guarded"], ran[f"products/{kind}, healthy plain"])
    said = ran[f"products/{kind}, healthy said"]
    assert "0 reruns" in said and "as they are stored" not in said


def test_what_a_product_in_fp8_hides_is_seen(ran: native.Ran) -> None:
    plain, guarded, fp32 = (ran[f"hidden/{how}"] for how in ("plain", "guarded", "fp32"))
    assert plain.isfinite().all() and native.difference(plain, fp32) > 0.01
    assert native.difference(guarded, fp32) <= 1e-5
    assert "2 steps, 2 reruns" in ran["hidden/said"]


def test_nothing_is_left_and_other_threads_keep_their_products(ran: native.Ran) -> None:
    assert ran["leaves_nothing/error"].startswith("GuardStopped")
    assert ran["leaves_nothing/in fp8: inside, other thread, afterwards"] == [False, True, True]
