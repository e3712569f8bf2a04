"""What `auto` and the compilers do on a CPU hangs on whether it multiplies bf16. Tests that import this fixture mean
one that does, whatever they run on; `tests/precision/test_arch.py` has the others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cpu_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyui_onediff_guard.precision.arch._cpu_multiplies_bf16", lambda: True)
