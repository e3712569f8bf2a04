"""What a command with --json prints: one object, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ...trust.plain import for_json
from ..errors import HeadlessError, InterruptedRunError


def done(**facts: Any) -> None:
    _print({"status": "done", **facts})


def failed(error: HeadlessError, **facts: Any) -> None:
    _print({"status": "error", "exit_code": int(error.exit_code), "error": str(error), **facts})


@contextmanager
def errors_told(as_json: bool) -> Generator[None]:
    """Print what goes wrong as the one object, where that was asked for. Ctrl-C becomes an error like the others."""
    try:
        try:
            yield
        except KeyboardInterrupt as error:
            raise InterruptedRunError("Interrupted.") from error
    except HeadlessError as error:
        if as_json:
            failed(error)
        raise


def _print(facts: dict[str, Any]) -> None:
    print(json.dumps(for_json(facts), allow_nan=False))
