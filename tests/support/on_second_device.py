"""A plug-in of pytest's, for tests that run on the second device: `python -m pytest -p on_second_device FILE`."""

from __future__ import annotations

import gc
from collections.abc import Generator
from typing import Any

import pytest
import second_device


def pytest_configure() -> None:
    second_device.install()


@pytest.fixture
def card() -> Generator[Any]:
    """The device's extension. Afterwards nothing was unordered, and nothing is page-locked that nobody has any more."""
    card, runtime = second_device.card, second_device.runtime
    gc.collect()
    second_device.hazards()
    card.reset()
    runtime.limit, runtime.most = float("inf"), 0
    yield card
    gc.collect()
    assert not second_device.hazards()
    assert not runtime.registered


@pytest.fixture
def room(card: Any) -> Generator[Any]:
    """The device's memory, and what stages take of it."""
    from card_room import Room

    found = Room(card)
    with found.calls_watched():
        yield found
    found.close()
