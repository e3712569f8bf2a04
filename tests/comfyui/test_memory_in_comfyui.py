"""A component that could not be moved, under ComfyUI's own memory manager."""

from __future__ import annotations

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
