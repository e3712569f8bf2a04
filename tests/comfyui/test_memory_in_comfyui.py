"""A component that could not be moved, under ComfyUI's own memory manager."""

from __future__ import annotations

from pathlib import Path

import native
import pytest


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("memory_cases", tmp_path_factory.mktemp("memory"), *native.CARD, leg=leg)


def test_the_next_run_is_right_whichever_move_failed(ran: native.Ran) -> None:
    assert ran.pop("moves/placement") == "ComfyPlacement"
    wrong = {case: lines for case, lines in ran.items() if case.startswith("moves/") and not case.endswith("there")}
    assert len(wrong) == 6
    assert {case: lines for case, lines in wrong.items() if lines} == {}


def test_the_manager_counts_what_is_there(ran: native.Ran) -> None:
    counted = {case: sizes for case, sizes in ran.items() if case.endswith("there")}
    assert len(counted) == 6
    assert all(said == there for said, there in counted.values()), counted


def test_a_component_is_on_the_card_when_it_is_called(leg: native.Leg, tmp_path: Path) -> None:
    ran = native.run("driven_out_cases", tmp_path, "--disable-smart-memory", *native.CARD, leg=leg)
    assert [case for case, through in ran.items() if through is True] == ["called/2b", "called/5b-i2v", "called/svd"]


def test_the_manager_makes_the_room_that_a_call_asks_for_and_a_run_survives_where_it_ran_out(
    leg: native.Leg, tmp_path: Path
) -> None:
    ran = native.run("room_cases", tmp_path, *native.CARD, leg=leg)
    away, _ = ran["asked/weights alone"]
    there, moved = ran["asked/weights and the call"]
    assert (away, there) == (False, True)
    assert moved == 0, "what was used before is found on the card"
    assert ran["survived/there"] == [True] * 3, "what the manager had moved out for room is back for the call"
    assert ran["survived/same"]
    assert ran["survived/said"] == ["denoiser: memory ran out; went on with nothing else on the device"]
    autos = {tuple(case.removeprefix("auto/").split(", ")): found for case, found in ran.items() if "auto/" in case}
    for model in {model for model, _ in autos}:
        whole, *smaller, least = (found for (of, _), found in autos.items() if of == model)
        assert {*whole[0]} == {"none", "whole"}
        assert "there is not enough memory" in least[0][0]
        for ways, off, ran_out in (whole, *smaller):
            assert not ran_out
            assert off <= 1e-3 or {"tiling", "2 at once", "1 at once"}.intersection(ways)
        assert any({*ways} - {"none", "whole"} for ways, *_ in smaller)
    assert len(autos) == 25
