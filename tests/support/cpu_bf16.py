"""`auto` and the compilers depend on whether the CPU multiplies bf16. This fixture makes tests assume that it does, on
any CPU; `tests/precision/test_arch.py` tests the others."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cpu_multiplies_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfyui_onediff_guard.precision.arch._cpu_multiplies_bf16", lambda: True)
