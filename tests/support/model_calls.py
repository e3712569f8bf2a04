"""Count the calls of models that the tests' own processes make: the guarded calls, each of one stage.

Calls in servers, workers and commands that tests start are not counted.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

GUARD = "comfyui_onediff_guard.precision.guard"
counted = 0
_wrapped: set[Any] = set()


def watch() -> None:
    """Count from now on, where the guard is imported. To be called again before each test."""
    module = sys.modules.get(GUARD)
    if module and module.StageGuard not in _wrapped:
        _wrapped.add(module.StageGuard)
        module.StageGuard.__call__ = _counting(module.StageGuard.__call__)


def _counting(call: Any) -> Any:
    @wraps(call)
    def count(*args: Any, **kwargs: Any) -> Any:
        global counted
        counted += 1
        return call(*args, **kwargs)

    return count
