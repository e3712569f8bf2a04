"""The Precision Report node: what would run, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..trust.message import BadInput, message_of
from . import inputs
from .node import Node

if TYPE_CHECKING:
    from ..pipelines.insight.diagnosis import Diagnosis
    from ..pipelines.run.handle import PipelineHandle
    from ..precision.arch import Architecture

THIS_CARD = "this card"


def with_surroundings(diagnosis: Diagnosis) -> Diagnosis:
    """The same with what lies around the pipelines: the compile cache, and ComfyUI."""
    from ..pipelines.compile.cache import room_in_words
    from ..pipelines.insight.diagnosis import ComfyUI

    return replace(
        diagnosis,
        compile_cache=room_in_words(host.compiled_directory()),
        comfyui=ComfyUI(host.version(), host.TESTED, host.flags()),
    )


def architecture_of(name: str | None) -> Architecture | None:
    """Look an architecture up by its name; None for this card. Raises BadInput where nobody has heard of it."""
    from ..precision.arch import named

    if name is None or name == THIS_CARD:
        return None
    try:
        return named(name)
    except ValueError as error:
        raise BadInput(message_of(error)) from None


class PrecisionReport(Node):
    """Pipeline → what each of its components runs in, and why, as text."""

    TITLE = "Precision Report"
    CATEGORY = inputs.DIAGNOSE
    SEARCH_ALIASES = [*inputs.PRECISION_WORDS, "doctor", "diagnosis", "black image", "black video", "architecture"]
    DESCRIPTION = (
        "Shows what runs here and why, before anything runs: card, driver and packages, compile backends, "
        "half-precision switches and who set them, and the precision of each part of the model. "
        "It can show the plan for another card too."
    )
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("report",)
    OUTPUT_TOOLTIPS = ("The report as text, for nodes that show or save text.",)
    OUTPUT_NODE = True
    FUNCTION = "show"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..precision.arch import ARCHITECTURES

        return {
            "required": {"pipeline": inputs.pipeline()},
            "optional": {
                "architecture": inputs.choice(
                    (THIS_CARD, *ARCHITECTURES),
                    "Show the plan for another card. Nothing changes for this one.",
                ),
            },
            "hidden": inputs.node_id(),
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        """It always is, since variables, drivers and packages change without the graph."""
        return float("nan")

    def show(
        self, pipeline: PipelineHandle, architecture: str = THIS_CARD, node_id: str | None = None
    ) -> dict[str, Any]:
        from ..pipelines.insight.diagnosis import diagnose_pipeline

        diagnosis = with_surroundings(diagnose_pipeline(pipeline, architecture_of(architecture)))
        text = diagnosis.text()
        host.say(node_id, text, as_it_is=True)
        return {"ui": {"text": [text], "onediff_guard": [diagnosis.as_dict()]}, "result": (text,)}
