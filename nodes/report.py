"""What would run here and why, with the state of the compile cache and of ComfyUI: for nodes and commands."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..comfyui_host import host
from ..trust.message import BadInput, message_of

if TYPE_CHECKING:
    from ..pipelines.insight.diagnosis import Diagnosis
    from ..precision.arch import Architecture

THIS_CARD = "this card"


def with_surroundings(diagnosis: Diagnosis) -> Diagnosis:
    """Return the diagnosis with the compile cache and ComfyUI added."""
    from ..pipelines.compile.cache import room_in_words
    from ..pipelines.insight.diagnosis import ComfyUI

    return replace(
        diagnosis,
        compile_cache=room_in_words(host.compiled_directory()),
        comfyui=ComfyUI(host.version(), host.TESTED, host.flags(), host.plans_memory()),
    )


def architecture_of(name: str | None) -> Architecture | None:
    """Return an architecture by its name; None for this card. Raises BadInput if the name is unknown."""
    from ..precision.arch import named

    if name is None or name == THIS_CARD:
        return None
    try:
        return named(name)
    except ValueError as error:
        raise BadInput(message_of(error)) from None
