"""Values in JSON's types: strings, finite numbers, booleans, null, lists and objects."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any


def for_json(value: Any) -> Any:
    """Return the value in JSON's types. An enum becomes its value; infinity, NaN and other objects become text."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(for_json(key)): for_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [for_json(item) for item in value]
    if isinstance(value, (str, int)) or value is None or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
