"""Node ids, inputs and their order, options and outputs that saved workflows use stay. Only additions pass.

`python tests/nodes/test_frozen.py` adds new entries to `frozen.json`, unless an old one is gone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyui_onediff_guard import NODE_CLASS_MAPPINGS

FROZEN = Path(__file__).with_name("frozen.json")
ON_DISK = {"model", "image", "lora"}  # their options are this machine's files


def nodes_now() -> dict[str, Any]:
    """By node id: {input: its type or its options}, and the outputs. Widgets are saved by position: order counts."""
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


def test_no_node_input_option_or_output_is_removed() -> None:
    frozen, now = json.loads(FROZEN.read_text(encoding="utf-8")), json.loads(as_text(nodes_now()))
    for id_, node in frozen.items():
        assert now[id_]["required"] == node["required"], f"{id_}: saved API files lack what becomes required"
        for kind, named in ((kind, node[kind]) for kind in ("inputs", "outputs")):
            current = now[id_][kind]
            assert [*current][: len(named)] == [*named], f"{id_}: {kind} may only be added, at the end"
            for name, saved in named.items():
                missing = set(saved) - set(current[name]) if isinstance(saved, list) else {saved} - {current[name]}
                assert not missing, f"{id_}.{name}: {missing}"


def test_frozen_json_is_up_to_date() -> None:
    assert FROZEN.read_text(encoding="utf-8") == as_text(nodes_now()), "run python tests/nodes/test_frozen.py"


if __name__ == "__main__":
    if FROZEN.is_file():
        test_no_node_input_option_or_output_is_removed()
    FROZEN.write_text(as_text(nodes_now()), encoding="utf-8")
