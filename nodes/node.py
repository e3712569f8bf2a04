"""What every node class says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..comfyui_host.language import speaking

PACK = Path(__file__).parents[1].name  # the folder that it was cloned into


class Node:
    """A node of ComfyUI's classic kind, which holds no state."""

    RELATIVE_PYTHON_MODULE = f"custom_nodes.{PACK}"  # where the page looks for help; ComfyUI sets it, some forks do not
    TITLE: str  # what people see; its id is OneDiffGuard and the name of the class, and stands in their workflow files
    CATEGORY: str
    SEARCH_ALIASES: list[str]
    DESCRIPTION: str
    RETURN_TYPES: tuple[str, ...]
    RETURN_NAMES: tuple[str, ...]
    OUTPUT_TOOLTIPS: tuple[str, ...]
    FUNCTION: str  # the method that runs it
    TOGETHER: bool | str = False  # of the processes that compute one run together, all run it; else the first alone.
    # The name of an input: all do where that is not 0

    def __init_subclass__(cls) -> None:
        """Have its errors begin in the page's language."""
        if run := vars(cls).get(getattr(cls, "FUNCTION", "")):
            setattr(cls, cls.FUNCTION, speaking()(run))

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        raise NotImplementedError


class PipelineChange(Node):
    """A node that gives the pipeline that it takes, with something changed."""

    RETURN_TYPES = ("ONEDIFF_PIPELINE",)
    RETURN_NAMES = ("pipeline",)
    OUTPUT_TOOLTIPS = ("Wire it to a sampler of the same family and to Decode Latents.",)
    FUNCTION = "apply"


def titled(kind: type[Node]) -> list[type[Any]]:
    """The node classes of a kind, by title: those that have one of their own. Known are those whose module has been
    imported, as the catalogue does with all."""
    below, found = [kind], set()
    while below:
        node = below.pop()
        below += node.__subclasses__()
        found |= {node} if "TITLE" in vars(node) else set()
    return sorted(found, key=lambda node: node.TITLE)
