"""Runs with --disable-smart-memory: each component that ComfyUI loads evicts the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from memory import decode, opened, small_runs


@pytest.mark.parametrize("model", ["2b", "5b-i2v", "svd"])
def test_run_is_finite_when_each_component_evicts_others(tmp_path: Path, model: str) -> None:
    """A component that is not on the card when it is called raises an error."""
    handle = opened(model, tmp_path)
    assert decode(handle, small_runs.sampled(handle, model)[0])[0].isfinite().all()
