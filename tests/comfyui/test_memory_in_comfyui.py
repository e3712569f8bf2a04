"""A component that could not be moved, under ComfyUI's own memory manager."""

from __future__ import annotations

from pathlib import Path

import native
import pytest


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("memory_cases", tmp_path_factory.mktemp("memory"), leg=leg)


def test_the_next_run_is_right_whichever_move_failed(ran: native.Ran) -> None:
    assert ran.pop("moves/placement") == "ComfyPlacement"
    wrong = {case: lines for case, lines in ran.items() if not case.endswith("there")}
    assert len(wrong) == 6
    assert {case: lines for case, lines in wrong.items() if lines} == {}


def test_the_manager_counts_what_is_there(ran: native.Ran) -> None:
    counted = {case: sizes for case, sizes in ran.items() if case.endswith("there")}
    assert len(counted) == 6
    assert all(said == there for said, there in counted.values()), counted


def test_a_component_is_on_the_card_when_it_is_called(leg: native.Leg, tmp_path: Path) -> None:
    ran = native.run("driven_out_cases", tmp_path, "--disable-smart-memory", leg=leg)
    there = {case.removeprefix("called/"): components for case, components in ran.items()}
    text = {"text_encoder": [True], "transformer": [True], "vae": [True]}
    assert there == {"2b": text, "5b-i2v": text, "svd": {"image_encoder": [True], "unet": [True], "vae": [True]}}


def test_what_the_manager_has_no_room_for_beside_a_call_leaves_and_what_fits_stays(
    leg: native.Leg, tmp_path: Path
) -> None:
    ran = native.run("room_cases", tmp_path, leg=leg)
    away, _ = ran["asked/weights alone"]
    there, moved = ran["asked/weights and the call"]
    assert (away, there) == (False, True)
    assert moved == 0, "what was used before is found on the card"
