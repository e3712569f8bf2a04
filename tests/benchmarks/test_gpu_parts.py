"""What gpu.py is made of: the time that a stage may take, what nvidia-smi says, and what is moved."""

from __future__ import annotations

import card
import pytest
import torch
from budget import Budget
from moves import TO_CARD, TO_HOST, WAITS, Moves

ANSWER = """\
GPU-11111111-aaaa, 550.54.15, 345, 1980, 2619, 2619, 71.23, 700.00, 33
GPU-22222222-bbbb, 550.54.15, 1755, 1980, [N/A], 2619, 640.50, [Not Supported], 61
"""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [([0.1, 0.2], 20), ([2.0, 3.0, 5.0], 9), ([30.0], 2), ([80.0], 2), ([], 20)],
    ids=["as many as asked for", "what fits", "but for the one thrown away", "two at least", "of nobody"],
)
def test_rounds_fill_what_is_left(clock: Clock, seconds: list[float], rounds: int) -> None:
    budget = Budget(420, clock)
    clock.now = 320
    assert budget.rounds(seconds, 20) == rounds


def test_a_part_of_a_stage_has_a_share_of_what_is_left(clock: Clock) -> None:
    assert Budget(100, clock).rounds([1.0], 50, share=1 / 4) == 24


def test_nothing_is_prepared_when_most_of_the_time_is_over(clock: Clock) -> None:
    budget = Budget(100, clock)
    clock.now = 69
    assert not budget.too_late()
    clock.now = 71
    assert budget.too_late() == "left out: 71 of the stage's 100 s were over"


def test_a_card_is_found_by_its_name_among_several() -> None:
    assert card.parse(ANSWER, "22222222-bbbb") == {
        "driver": "550.54.15",
        "sm_mhz": 1755,
        "sm_mhz_max": 1980,
        "memory_mhz": None,
        "memory_mhz_max": 2619,
        "power_watts": 640.5,
        "power_watts_limit": None,
        "celsius": 61,
    }


@pytest.mark.parametrize(("answer", "uuid"), [(ANSWER, ""), (ANSWER, "3333"), ("", "1111"), ("No devices found", "")])
def test_a_card_that_is_not_found_is_none(answer: str, uuid: str) -> None:
    assert card.parse(answer, uuid) is None


def test_the_only_card_needs_no_name() -> None:
    found = card.parse(ANSWER.splitlines()[0], "")
    assert found and found["power_watts"] == 71.23 and found["driver"] == "550.54.15"


def test_no_card_is_asked_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card.state(torch.device("cpu")) is None
    monkeypatch.setenv("PATH", "")
    assert card.state(torch.device("cuda")) is None


def test_copies_between_both_are_counted() -> None:
    """ "meta" stands for the card."""
    layer = torch.nn.Linear(8, 4)
    with Moves("meta") as moves:
        layer.to("meta")
        torch.empty(6, device="meta").copy_(torch.zeros(6))
        torch.zeros(6).to(torch.float64)
        torch.zeros(6).sum().item()
        torch.empty(3, device="meta").half()
    assert moves.counts == {TO_CARD: 4 * (8 * 4 + 4) + 4 * 6, TO_HOST: 0, WAITS: 0}


def test_a_cpu_moves_nothing() -> None:
    with Moves("cpu") as moves:
        torch.zeros(6).to("meta")
        torch.zeros(6).clone().to(torch.float16)
    assert set(moves.counts.values()) == {0}


def test_what_is_compiled_is_counted_around() -> None:
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    doubled(torch.ones(3))
    with Moves("meta") as moves:
        made = doubled(torch.ones(3))
        made.to("meta")
    assert made.tolist() == [2, 2, 2] and moves.counts[TO_CARD] == 12
