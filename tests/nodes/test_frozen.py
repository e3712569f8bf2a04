"""What saved workflows name stays: node ids, inputs with their order, options and outputs. Only additions pass.

`python tests/nodes/test_frozen.py` adds what is new to `frozen.json`, and nothing where something is gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyui_onediff_guard import NODE_CLASS_MAPPINGS

FROZEN = Path(__file__).with_name("frozen.json")
ON_DISK = {"model", "image", "lora"}  # their options are this machine's files


def nodes_now() -> dict[str, Any]:
    """By id: {input: its type, or its options}, and the outputs. Widgets are saved by their place: order counts."""
    return {
        id_: {
            "inputs": {
                name: "files" if name in ON_DISK and isinstance(spec[0], list) else spec[0]
                for part in ("required", "optional")
                for name, spec in cls.INPUT_TYPES().get(part, {}).items()
            },
            "required": [*cls.INPUT_TYPES()["required"]],
            "outputs": dict(zip(getattr(cls, "RETURN_NAMES", cls.RETURN_TYPES), cls.RETURN_TYPES, strict=True)),
        }
        for id_, cls in NODE_CLASS_MAPPINGS.items()
    }


def as_text(nodes: dict[str, Any]) -> str:
    return json.dumps(nodes, indent=1) + "\n"


def test_what_saved_workflows_name_is_still_there() -> None:
    frozen, now = json.loads(FROZEN.read_text(encoding="utf-8")), json.loads(as_text(nodes_now()))
    for id_, node in frozen.items():
        assert now[id_]["required"] == node["required"], f"{id_}: saved API files lack what becomes required"
        for kind, named in ((kind, node[kind]) for kind in ("inputs", "outputs")):
            there = now[id_][kind]
            assert [*there][: len(named)] == [*named], f"{id_}: {kind} may only be added, at the end"
            for name, what in named.items():
                lost = set(what) - set(there[name]) if isinstance(what, list) else {what} - {there[name]}
                assert not lost, f"{id_}.{name}: {lost}"


def test_it_is_up_to_date() -> None:
    assert FROZEN.read_text(encoding="utf-8") == as_text(nodes_now()), "run python tests/nodes/test_frozen.py"


if __name__ == "__main__":
    if FROZEN.is_file():
        test_what_saved_workflows_name_is_still_there()
    FROZEN.write_text(as_text(nodes_now()), encoding="utf-8")
