"""NaN Guard (native) and its probe where ComfyUI computes guidance halves at the same time, in threads of its own."""

from __future__ import annotations

import native
import pytest
import torch

STEPS = 4


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    found = native.run("native_work_unit_cases", tmp_path_factory.mktemp("native_work_units"), leg=leg)
    if not found:
        pytest.skip("this ComfyUI computes guidance halves on one GPU: it is older than 0.23")
    return found


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("layout", ["sd15", "flux"])
def test_each_half_is_computed_again_in_every_run(ran: native.Ran, layout: str, order: str) -> None:
    runs, fp32 = ran[f"overflowing/{layout}, {order}, guarded"], ran[f"overflowing/{layout}, fp32"]
    assert not native.difference(ran[f"overflowing/{layout}, plain"], fp32) <= 0.1  # NaN, or finite and wrong
    assert max(native.difference(made, fp32) for made in runs) <= 1e-5
    said = ran[f"overflowing/{layout}, {order}, said"]
    assert len(said) == len(runs) and all(f"{STEPS} steps, {2 * STEPS} reruns." in text for text in said)
    calls = ran[f"overflowing/{layout}, {order}, calls said"]
    named = [f"call {n + 1}" for n in range(2 * STEPS)] * len(runs)
    assert sorted(text.partition(":")[0] for text in calls) == sorted(named)
    assert not any("did not fail" in text for text in calls)  # each found the layer in its own network
    assert ran[f"overflowing/{layout}, {order}, threads"] == 2 * len(runs)


@pytest.mark.parametrize("layout", ["sd15", "flux"])
def test_a_healthy_model_stays_as_it_is(ran: native.Ran, layout: str) -> None:
    assert torch.equal(ran[f"healthy/{layout}, guarded"], ran[f"healthy/{layout}, plain"])
    assert [f"{STEPS} steps, 0 reruns." in text for text in ran[f"healthy/{layout}, said"]] == [True]


def test_a_fault_in_one_half_costs_one_call(ran: native.Ran) -> None:
    assert 0 < native.difference(ran["one_half_fails/guarded"], ran["one_half_fails/fp32"]) <= 2e-2
    assert [f"{STEPS} steps, 1 rerun." in text for text in ran["one_half_fails/said"]] == [True]
    assert ran["one_half_fails/dtypes"].count("torch.float32") == 1


def test_what_one_half_clips_is_not_lost_to_the_other(ran: native.Ran) -> None:
    made = "one_begins_as_the_other_ends"
    assert native.difference(ran[f"{made}/guarded"], ran[f"{made}/fp32"]) <= 1e-5
    assert "1 step, 2 reruns." in ran[f"{made}/said"][0]


@pytest.mark.parametrize(
    ("scope", "reruns", "apart"),
    [("step", "8 reruns", 1e-5), ("learned", "2 reruns", 1e-2), ("run", "2 reruns", 1e-5)],
)
def test_each_half_decides_how_far_its_rerun_reaches(ran: native.Ran, scope: str, reruns: str, apart: float) -> None:
    assert native.difference(ran[f"scopes/{scope}, guarded"], ran[f"scopes/{scope}, fp32"]) <= apart
    assert f"{STEPS} steps, {reruns}." in ran[f"scopes/{scope}, said"][0]


@pytest.mark.parametrize("when", ["attempt", "rerun"])
@pytest.mark.parametrize(
    ("name", "raised"), {"error": "ValueError", "interrupt": "InterruptProcessingException"}.items()
)
def test_what_ends_one_half_leaves_nothing_behind(ran: native.Ran, name: str, raised: str, when: str) -> None:
    stopped = f"stopped/{name} in the {when}"
    assert ran[f"{stopped}, raised"] == raised
    assert ran[f"{stopped}, left"] == []
    assert native.difference(ran[f"{stopped}, next"], ran["stopped/fp32"]) <= 1e-5
    assert [f"{STEPS} steps, {2 * STEPS} reruns." in text for text in ran[f"{stopped}, next said"]] == [True]


def test_the_policy_stops_the_run_from_a_thread(ran: native.Ran) -> None:
    assert ran["stopped/policy"].startswith("GuardStopped: denoiser, call 1: the output in fp16 is non-finite")
    assert ran["stopped/policy, left"] == []


def test_the_probe_measures_both_halves(ran: native.Ran) -> None:
    one, two = ran["probe/one device"], ran["probe/two devices"]
    assert [entry["name"] for entry in two["worst"]] == [entry["name"] for entry in one["worst"]]
    for ours, theirs in zip(two["worst"], one["worst"], strict=True):
        assert ours["reach"] == pytest.approx(theirs["reach"], rel=1e-4)
    assert two["measured_steps"] == one["measured_steps"]


def test_easycache_keeps_what_the_other_half_left(ran: native.Ran) -> None:
    assert ran["easycache/kept"] == [0, 2, 2, 2]
    assert f"{STEPS} steps, {2 * STEPS} reruns." in ran["easycache/said"][0]
