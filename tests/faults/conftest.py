"""Fixtures of all fault tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all fault tests
from hypothesis import is_hypothesis_test


@pytest.fixture(autouse=True)
def _drawn_examples(request: pytest.FixtureRequest, figure: Callable[[str, object], None]) -> None:
    """Record the number of hypothesis examples as a figure for docs/reliability.md."""
    if is_hypothesis_test(request.function):
        settings = request.function._hypothesis_internal_use_settings
        name = request.function.__name__.removeprefix("test_").replace("_", " ")
        figure(f"Fuzzing: {name}", f"{settings.max_examples:,} examples, 0 unexpected errors")
