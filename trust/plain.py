"""Values as JSON has them: strings, finite numbers, booleans, null, lists and objects alone."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def for_json(value: Any) -> Any:
    """The same value; an enum is its value, and infinity, NaN and whatever else JSON has not are text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(for_json(key)): for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    if isinstance(value, (str, int)) or value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
