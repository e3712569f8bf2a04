"""NaN Guard (native) on networks that remember earlier calls: a rerun starts from what the failed call found."""

from __future__ import annotations

import native
import pytest
import torch


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_cache_cases", tmp_path_factory.mktemp("native_caches"), leg=leg)


def test_frames_after_frames_attend_to_what_the_rerun_made_of_those_before(ran: native.Ran) -> None:
    if "autoregressive/hot/said" not in ran:
        pytest.skip("this ComfyUI has no autoregressive Wan")
    assert torch.equal(ran["autoregressive/healthy/guarded"], ran["autoregressive/healthy/plain"])
    assert "9 reruns" in ran["autoregressive/hot/said"]
    for state in ("some", "hot"):  # their keys and values are kept in fp16, as those of a healthy run are
        assert native.difference(ran[f"autoregressive/{state}/guarded"], ran[f"autoregressive/{state}/fp32"]) <= 2e-3
    assert "2 reruns" in ran["autoregressive/some/said"]


@pytest.mark.parametrize("run", ["first", "second"])
def test_a_prompt_that_the_network_remembers_is_not_that_of_a_failed_call(ran: native.Ran, run: str) -> None:
    if "hidream/hot/first" not in ran:
        pytest.skip("this ComfyUI has no HiDream-O1")
    assert torch.equal(ran[f"hidream/healthy/{run}"], ran["hidream/healthy/plain"])
    assert ran["hidream/healthy/remembers"] == 1
    assert "3 steps, 3 reruns" in ran[f"hidream/hot/{run}_said"]
    assert native.difference(ran[f"hidream/hot/{run}"], ran["hidream/hot/fp32"]) <= 1e-5
    assert ran["hidream/hot/remembers"] == 0


def test_nothing_of_a_stopped_run_is_remembered(ran: native.Ran) -> None:
    if "hidream/stopped/error" not in ran:
        pytest.skip("this ComfyUI has no HiDream-O1")
    assert "set to stop" in ran["hidream/stopped/error"]
    assert ran["hidream/stopped/remembers"] == 0


def test_a_cache_beside_the_network_is_filled_by_the_rerun(ran: native.Ran) -> None:
    if "animate/guarded" not in ran:
        pytest.skip("this ComfyUI has no Wan-Animate 2")
    assert "2 steps, 2 reruns" in ran["animate/said"]
    assert native.difference(ran["animate/uncached"], ran["animate/fp32"]) <= 1e-5
    assert native.difference(ran["animate/guarded"], ran["animate/fp32"]) <= 2e-3  # it is kept in fp16


def test_what_a_network_keeps_in_an_object_is_not_that_of_a_failed_call(ran: native.Ran) -> None:
    assert "2 steps, 2 reruns" in ran["prefix/said"]
    assert native.difference(ran["prefix/guarded"], ran["prefix/fp32"]) <= 1e-5
