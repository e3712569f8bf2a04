"""Write locales/en/nodeDefs.json from the node classes: `make docs`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.headless.workflow import schema
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

FILE = Path(__file__).resolve().parents[1] / "locales" / "en" / "nodeDefs.json"


def texts() -> dict[str, Any]:
    """Return the nodes' texts, nested as in ComfyUI's locales."""
    said = {}
    for name, node in NODE_CLASS_MAPPINGS.items():
        said[name] = {
            "display_name": NODE_DISPLAY_NAME_MAPPINGS[name],
            "description": node.DESCRIPTION,
            "inputs": {
                spec.name: {"name": spec.name, "tooltip": spec.config["tooltip"]}
                for spec in schema.from_class(name, node).inputs.values()
            },
            "outputs": {
                str(i): {"name": output, "tooltip": tooltip}
                for i, (output, tooltip) in enumerate(zip(node.RETURN_NAMES, node.OUTPUT_TOOLTIPS, strict=True))
            },
        }
    return said


def render() -> str:
    return json.dumps(texts(), indent=2, ensure_ascii=False) + "\n"


def main(file: Path = FILE) -> None:
    """Write the file, with the same bytes on every system."""
    file.write_text(render(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
