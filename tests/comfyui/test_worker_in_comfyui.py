"""ComfyUI's prompt worker, and runs of the same process in other threads: all come to what they come to alone."""

from __future__ import annotations

import native
import pytest


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("worker_cases", tmp_path_factory.mktemp("worker"), leg=leg)


def test_all_are_right_and_the_process_is_what_it_was(ran: native.Ran) -> None:
    assert ran["worker/shown"] == 5
    assert ran["worker/the worker's are equal"] == [True] * 5
    assert ran["worker/the others' are equal"] == [True] * 10
    assert ran["worker/put back"] == [True, True]
