"""Half-precision accumulation in OneFlow's fused attention, switched by architecture while a pipeline samples.

OneFlow reads the switches at kernel launch, so they must hold during sampling, not at compile time. Unset counts as
True, which comes out as NaN or black on the architectures at risk (OneDiff issues 722, 955, 958).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from .arch import Architecture

ATTENTION_SWITCH = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION"
SWITCHES = (ATTENTION_SWITCH, "ONEFLOW_KERNEL_FMHA_ENABLE_TRT_FLASH_ATTN_IMPL")
_TRUE = frozenset({"1", "true", "yes", "on", "y"})  # what OneFlow itself takes for true


@dataclass(frozen=True)
class Switch:
    """An environment variable as it stands while sampling, and who set it."""

    name: str
    value: str
    set_by: str  # "user" or "onediff-guard"
    reason: str


class _Holders:
    """Runs that sample at this moment; the process-wide switch takes the safest of their values."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: list[bool] = []
        self.before: dict[str, str | None] = {}

    def apply(self) -> None:
        for name in self.before:
            if self.before[name] is None:
                os.environ[name] = "1" if all(self.wanted) else "0"

    def restore(self) -> None:
        for name, value in self.before.items():
            if value is None:
                os.environ.pop(name, None)
        self.before.clear()


_HOLDERS = _Holders()


@contextmanager
def accumulation(architecture: Architecture) -> Generator[tuple[Switch, ...]]:
    """Hold the switches for one run; yields them as they stand. A value that the user exported is left alone."""
    allowed = not architecture.accumulation_risk
    with _HOLDERS.lock:
        if not _HOLDERS.wanted:
            _HOLDERS.before = {name: os.environ.get(name) for name in SWITCHES}
        _HOLDERS.wanted.append(allowed)
        _HOLDERS.apply()
        switches = tuple(_describe(name, architecture) for name in SWITCHES)
    try:
        yield switches
    finally:
        with _HOLDERS.lock:
            _HOLDERS.wanted.remove(allowed)
            if _HOLDERS.wanted:
                _HOLDERS.apply()
            else:
                _HOLDERS.restore()


def _describe(name: str, architecture: Architecture) -> Switch:
    value = os.environ[name]
    if _HOLDERS.before[name] is None:
        others = " (another run in this process needs the safer value)" if len(set(_HOLDERS.wanted)) > 1 else ""
        risk = "at risk" if architecture.accumulation_risk else "not at risk"
        return Switch(name, value, "onediff-guard", f"{architecture} is {risk}{others}")
    plain = value.strip().lower()
    if plain in _TRUE or plain in {"0", "false", "no", "off", "n", ""}:
        return Switch(name, value, "user", "exported before start, respected")
    return Switch(name, value, "user", f"exported as '{value}', which OneFlow takes for false; write 0 or 1")
