"""OneDiff-compiled diffusion pipelines for ComfyUI that never come out black.

ComfyUI reads the attributes below when it starts; they are looked up on demand, so that importing costs nothing.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


def __getattr__(name: str) -> Any:
    if name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"):
        from . import nodes

        return getattr(nodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
