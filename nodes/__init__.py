"""The catalogue of nodes, found in the modules of this folder: a new node is a class in one of them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ..comfyui_host import every_workflow
from .node import Node, titled

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f".{_module.name}", __package__)

NODE_CLASS_MAPPINGS: dict[str, type] = {f"OneDiffGuard{node.__name__}": node for node in titled(Node)}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {key: node.TITLE for key, node in NODE_CLASS_MAPPINGS.items()}

every_workflow.install()
