"""ComfyUI nodes for diffusion pipelines that detect NaN and infinite steps and recompute them in fp32.

ComfyUI reads the attributes below at startup; they are imported on demand, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


def __getattr__(name: str) -> Any:
    if name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"):
        from . import nodes

        return getattr(nodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
