"""A pytest plugin for tests on the second device: `python -m pytest -p on_second_device FILE`."""

from __future__ import annotations

import gc
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import second_device

OTHER_CARDS: dict[str, dict[str, Any]] = {  # by test file
    "without_bf16": {"capability": (7, 5)},
    "like_apples": {"apple_gpu": True},
}


def pytest_configure(config: pytest.Config) -> None:
    options = [OTHER_CARDS[Path(name).stem] for name in config.args if Path(name).stem in OTHER_CARDS]
    second_device.install(**(options[0] if options else {}))


@pytest.fixture(autouse=True)
def card() -> Generator[Any]:
    """The device's extension. After each test, no access was unordered and no memory stays page-locked."""
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
    """Limits and measures the device's memory."""
    from card_room import Room

    found = Room(card)
    with found.calls_watched():
        yield found
    found.close()
