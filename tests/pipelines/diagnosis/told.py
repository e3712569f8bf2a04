"""Helpers that read a diagnosis."""

from __future__ import annotations

from typing import Any


def switch(diagnosis: Any, name: str) -> Any:
    return next(switch for switch in diagnosis.switches if switch.name == name)


def one_line(diagnosis: Any) -> str:
    """The text of a diagnosis without line breaks."""
    return " ".join(diagnosis.text().split())
