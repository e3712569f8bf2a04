"""What a command with --json prints: one object, and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

from .errors import HeadlessError


def done(**facts: Any) -> None:
    _print({"status": "done", **facts})


def failed(error: HeadlessError) -> None:
    _print({"status": "error", "exit_code": int(error.exit_code), "error": str(error)})


def _print(facts: dict[str, Any]) -> None:
    print(json.dumps(_plain(facts), allow_nan=False))


def _plain(value: Any) -> Any:
    """The value with what JSON cannot hold as text: NaN, infinity, paths."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, (str, int, bool)) or value is None else str(value)
