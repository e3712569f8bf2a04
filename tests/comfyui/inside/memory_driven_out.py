"""Runs in which each component that ComfyUI places drives out the others: with --disable-smart-memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory import decode, opened, small_runs


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "svd"])
def test_a_component_is_on_the_card_when_it_is_called(tmp_path: Path, model: str) -> None:
    """Else it raises."""
    handle = opened(model, tmp_path)
    assert decode(handle, small_runs.sampled(handle, model)[0])[0].isfinite().all()
