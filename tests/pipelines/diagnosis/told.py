"""What a diagnosis tells, and a model to tell something of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_config(folder: Path, component: str, **changes: Any) -> None:
    file = folder / component / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def switch(diagnosis: Any, name: str) -> Any:
    return next(switch for switch in diagnosis.switches if switch.name == name)


def one_line(diagnosis: Any) -> str:
    """The text as if no line had been broken."""
    return " ".join(diagnosis.text().split())
