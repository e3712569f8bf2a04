"""What a diagnosis tells."""

from __future__ import annotations

from typing import Any


def switch(diagnosis: Any, name: str) -> Any:
    return next(switch for switch in diagnosis.switches if switch.name == name)


def one_line(diagnosis: Any) -> str:
    """The text as if no line had been broken."""
    return " ".join(diagnosis.text().split())
