"""The base classes of all nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..comfyui_host.language import speaking

PACK = Path(__file__).parents[1].name  # the name of the pack's folder


class Node:
    """A node with ComfyUI's classic interface. It holds no state."""

    RELATIVE_PYTHON_MODULE = f"custom_nodes.{PACK}"  # where the page looks for help; ComfyUI sets it, some forks do not
    TITLE: str  # shown to users. Its id, saved in their workflow files, is OneDiffGuard and the class's name
    CATEGORY: str
    SEARCH_ALIASES: list[str]
    DESCRIPTION: str
    RETURN_TYPES: tuple[str, ...]
    RETURN_NAMES: tuple[str, ...]
    OUTPUT_TOOLTIPS: tuple[str, ...]
    FUNCTION: str  # the method that runs it
    TOGETHER: bool | str = False  # True: all processes of a parallel run execute it. False: the first one alone.
    # The name of an input: all if that input is not 0

    def __init_subclass__(cls) -> None:
        """Wrap the node's method, so that its errors begin in the page's language."""
        if run := vars(cls).get(getattr(cls, "FUNCTION", "")):
            setattr(cls, cls.FUNCTION, speaking()(run))

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        raise NotImplementedError


class PipelineChange(Node):
    """A node that returns its input pipeline with a change."""

    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    OUTPUT_TOOLTIPS = ("Wire it to a sampler of the same family and to Decode Latents.",)
    FUNCTION = "apply"


def titled(kind: type[Node]) -> list[type[Any]]:
    """Return the node classes of a kind that have a title of their own, by title. Only classes of imported modules are
    found; `nodes/__init__.py` imports all."""
    below, found = [kind], set()
    while below:
        node = below.pop()
        below += node.__subclasses__()
        found |= {node} if "TITLE" in vars(node) else set()
    return sorted(found, key=lambda node: node.TITLE)
