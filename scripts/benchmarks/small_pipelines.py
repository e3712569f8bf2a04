"""The small pipelines that the tests build, by the names that they go by there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from small_families import BUILDERS  # pyright: ignore[reportMissingImports]
from small_wan import build_wan  # pyright: ignore[reportMissingImports]

BUILT: dict[str, Callable[..., Any]] = {**BUILDERS, "wan": build_wan}
