"""NaN Guard where ComfyUI brings weights to the card as layers run: async offload and dynamic VRAM, by its own code."""

from __future__ import annotations

import native
import pytest
import torch

STREAMS, DYNAMIC = ("streams",), ("dynamic", "dynamic, little room", "dynamic, no room")
RESIDENT = ("dynamic", "dynamic, little room")  # weights stay on the card, with LoRAs in them


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_streamed_cases", tmp_path_factory.mktemp("native_streamed"), leg=leg)


def skip_missing(ran: native.Ran, way: str) -> None:
    if way not in ran["runs/ways"]:
        pytest.skip("this ComfyUI has no dynamic VRAM")


@pytest.mark.parametrize("way", STREAMS + DYNAMIC)
@pytest.mark.parametrize("run", ["sd15, fp16", "flux, fp16", "wan, fp16", "sd15, fp32 computed in fp16"])
def test_a_streamed_model_is_guarded(ran: native.Ran, run: str, way: str) -> None:
    skip_missing(ran, way)
    assert ran[f"runs/{run}, {way}, moves"] > 0
    assert torch.equal(ran[f"runs/{run}, {way}, healthy guarded"], ran[f"runs/{run}, {way}, healthy plain"])
    assert native.difference(ran[f"runs/{run}, {way}, guarded"], ran[f"runs/{run}, fp32"]) <= 1e-5
    assert "3 steps, 3 reruns" in ran[f"runs/{run}, {way}, said"]


@pytest.mark.parametrize("way", STREAMS + DYNAMIC)
def test_a_lora_on_streamed_weights_is_in_the_rerun(ran: native.Ran, way: str) -> None:
    skip_missing(ran, way)
    assert native.difference(ran["lora/fp32 without"], ran["lora/fp32"]) > 2e-2
    rounded = way in RESIDENT  # ComfyUI rounds to fp16 what stays
    assert native.difference(ran[f"lora/{way}"], ran["lora/fp32"]) <= (2e-3 if rounded else 1e-5)


@pytest.mark.parametrize("way", ["dynamic", "dynamic, no room"])
def test_weights_that_are_brought_ahead_of_their_block(ran: native.Ran, way: str) -> None:
    skip_missing(ran, way)
    assert ran["prefetch/ahead"]
    assert native.difference(ran[f"prefetch/{way}"], ran["prefetch/fp32"]) <= 1e-5
    assert native.difference(ran[f"prefetch/{way}, LoRA"], ran["prefetch/fp32"]) > 1e-3
    rounded = way in RESIDENT
    assert native.difference(ran[f"prefetch/{way}, LoRA"], ran["prefetch/fp32, LoRA"]) <= (2e-3 if rounded else 1e-5)


def test_a_model_that_is_loaded_amid_a_rerun_is_loaded_as_ever(ran: native.Ran) -> None:
    assert ran["another_model/inside"].dtype is torch.float16
    assert torch.equal(ran["another_model/inside"], ran["another_model/outside"])


@pytest.mark.parametrize("way", STREAMS + DYNAMIC)
def test_a_streamed_vae_is_guarded(ran: native.Ran, way: str) -> None:
    skip_missing(ran, way)
    assert not ran[f"vae/{way}, plain"].isfinite().all()
    assert native.difference(ran[f"vae/{way}"], ran["vae/fp32"]) <= 1e-5
