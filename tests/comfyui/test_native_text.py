"""NaN Guard (native) where a model refines text itself before it samples: MiniMax H3 and LTX-2, in a new ComfyUI."""

from __future__ import annotations

import native
import pytest
import torch

FAMILIES = ("ltx2", "minimax_h3")


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_text_cases", tmp_path_factory.mktemp("native_text"), leg=leg)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, ran: native.Ran) -> str:
    if request.param not in ran["families/found"]:
        pytest.skip(f"this ComfyUI has no {request.param}")
    return request.param


@pytest.mark.parametrize("which", ["text", "both"])
def test_text_that_overflows_is_refined_in_fp32(ran: native.Ran, family: str, which: str) -> None:
    run = f"refining/{family}, {which}"
    assert not ran[f"{run}, plain, text"].isfinite().all()
    assert native.difference(ran[f"{run}, guarded, text"], ran[f"{run}, fp32, text"]) <= 1e-5
    assert native.difference(ran[f"{run}, guarded, made"], ran[f"{run}, fp32, made"]) <= (
        1e-5 if which == "both" else 2e-2  # what comes behind it stays in fp16
    )
    assert ("3 steps, 0 reruns." in ran[f"{run}, said"][-1]) == (which == "text")
    assert "text: non-finite in fp16, refined again in fp32" in ran[f"{run}, said"][-1]


def test_healthy_text_stays_as_it_is(ran: native.Ran, family: str) -> None:
    run = f"refining/{family}, none"
    for what in ("text", "made"):
        assert torch.equal(ran[f"{run}, guarded, {what}"], ran[f"{run}, plain, {what}"])
    assert "refined" not in ran[f"{run}, said"][-1]


@pytest.mark.parametrize("which", ["text", "both", "none"])
def test_nothing_is_set_on_the_model(ran: native.Ran, family: str, which: str) -> None:
    assert ran[f"refining/{family}, {which}, own method"]


def test_the_probe_refines_it_too(ran: native.Ran, family: str) -> None:
    assert ran[f"probe/{family}"] == "fp16"  # of what is computed in each step


def test_what_cannot_be_helped_is_named(ran: native.Ran, family: str) -> None:
    name = {"ltx2": "LTXAV", "minimax_h3": "MiniMaxH3"}[family]
    found = f"GuardStopped: The text refiner of {name} itself: its output in fp16 is non-finite"
    assert ran[f"refused/{family}, stop"].startswith(f"{found}, and the guard is set to stop.")
    assert ran[f"refused/{family}, broken weight"].startswith(f"{found}, and in fp32 too")
    assert not ran[f"refused/{family}, off"]
