"""A plug-in of pytest's, for tests that run on the second device: `python -m pytest -p on_second_device FILE`."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import second_device

OTHER_CARDS: dict[str, dict[str, Any]] = {  # by the file that is about them
    "without_bf16": {"capability": (7, 5)},
    "like_apples": {"like_apples": True},
}


def pytest_configure(config: pytest.Config) -> None:
    options = [OTHER_CARDS[Path(name).stem] for name in config.args if Path(name).stem in OTHER_CARDS]
    second_device.install(**(options[0] if options else {}))


@pytest.fixture(autouse=True)
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
