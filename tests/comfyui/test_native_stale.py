"""NaN Guard where the weights on the card are not what the host has: NaN in fp32 too, until ComfyUI loads them anew."""

from __future__ import annotations

import native
import pytest
import torch

ANEW = "non-finite in fp32 too: the weights were loaded anew, "


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_stale_cases", tmp_path_factory.mktemp("native_stale"), leg=leg)


def skip_missing(ran: native.Ran, case: str) -> None:
    if ran.get(f"{case}/missing"):
        pytest.skip("this ComfyUI has no dynamic VRAM")


@pytest.mark.parametrize("case", ["patched", "dynamic"])
def test_weights_that_fit_fp16_are_right_once_they_are_loaded_anew(ran: native.Ran, case: str) -> None:
    skip_missing(ran, case)
    assert torch.equal(ran[f"{case}/healthy, guarded"], ran[f"{case}/healthy, expected"])
    assert f"{ANEW}after that fp16 was finite" in ran[f"{case}/healthy, said"]
    assert "3 steps, 0 reruns" in ran[f"{case}/healthy, said"]
    assert ran[f"{case}/healthy, loads"] == 2  # the run's own, and one more


@pytest.mark.parametrize("case", ["patched", "dynamic"])
def test_a_model_that_overflows_is_then_computed_in_fp32(ran: native.Ran, case: str) -> None:
    skip_missing(ran, case)
    assert native.difference(ran[f"{case}/hot, guarded"], ran[f"{case}/hot, expected"]) <= 1e-5
    assert f"{ANEW}and the step computed in fp32" in ran[f"{case}/hot, said"]
    assert "3 steps, 3 reruns" in ran[f"{case}/hot, said"]


def test_a_model_in_fp32_is_loaded_anew_too(ran: native.Ran) -> None:
    assert torch.equal(ran["single/guarded"], ran["single/expected"])
    assert f"{ANEW}after that fp32 was finite" in ran["single/said"]


def test_a_lora_of_one_prompt_is_in_it_again(ran: native.Ran) -> None:
    assert native.difference(ran["hooks/without"], ran["hooks/expected"]) > 2e-2
    assert torch.equal(ran["hooks/guarded"], ran["hooks/expected"])


def test_as_much_is_on_the_card_afterwards(ran: native.Ran) -> None:
    assert torch.equal(ran["partly_loaded/guarded"], ran["partly_loaded/expected"])
    before, after = ran["partly_loaded/before"], ran["partly_loaded/after"]
    if ran["partly_loaded/loads 64 MB"]:
        pytest.skip("this ComfyUI loads no model of this size in part")
    assert 0.95 * before < after <= before < ran["partly_loaded/of"]


def test_a_weight_that_is_broken_on_the_host_is_named_as_ever(ran: native.Ran) -> None:
    assert ran["hopeless/weight"].startswith("GuardStopped")
    assert "ff.net.2.weight' holds 1 non-finite values of 16384" in ran["hopeless/weight"]
    assert ran["hopeless/weight, loads"] == 2


def test_nothing_is_loaded_for_a_broken_input_or_where_the_guard_stops(ran: native.Ran) -> None:
    assert "was given latents with 512 non-finite values" in ran["hopeless/latents"]
    assert ran["hopeless/latents, loads"] == 1
    assert "set to stop" in ran["hopeless/stop"] and ran["hopeless/stop, loads"] == 1


def test_what_others_loaded_or_runs_compiled_is_left_alone(ran: native.Ran) -> None:
    assert ran["left_alone/not loaded here, compiled, plain"] == [False, False, True]
