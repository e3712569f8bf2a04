"""What would run, and why: the Precision Report node, and the same for `onediff-guard doctor`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..pipelines.errors import BadFolder, BadInput
from . import compiled, inputs
from .load import loaders
from .node import Node

if TYPE_CHECKING:
    from ..pipelines.insight.diagnosis import Diagnosis
    from ..pipelines.run.handle import PipelineHandle
    from ..precision.arch import Architecture

THIS_CARD = "this card"
BAD_REQUEST = (BadFolder, BadInput)  # what `examine` raises at a wrong request


def examine(
    model: Path | None = None, architecture: str | None = None, precision: str = "auto", accumulation: str = "auto"
) -> Diagnosis:
    """Tell what would run on this machine or on another architecture, for one model or for all variants.

    model: its folder, Stable Video Diffusion's single file, or the hub id of a model in the cache.

    Raises BadInput for an architecture that nobody has heard of, or a model that is not there, and BadFolder for one
    that cannot be used.
    """
    from ..pipelines.insight.diagnosis import diagnose
    from ..precision.accumulation import Accumulation
    from ..precision.policy import Precision

    try:
        diagnosis = diagnose(
            on_disk(model) if model else None,
            architecture_of(architecture),
            precision=Precision(precision),
            accumulation=Accumulation(accumulation),
            loaders={pipeline: loader.TITLE for pipeline, loader in loaders().items()},
        )
        return _with_surroundings(diagnosis)
    except OSError as error:
        raise BadFolder(f"'{model}' cannot be read: {error}.") from error


def _with_surroundings(diagnosis: Diagnosis) -> Diagnosis:
    from ..pipelines.insight.diagnosis import ComfyUI

    return replace(
        diagnosis,
        compile_cache=compiled.in_words(compiled.folder(None)),
        comfyui=ComfyUI(host.version(), host.TESTED),
    )


def on_disk(model: Path) -> Path:
    """Return a model's own path, or the folder of a hub id in the cache. Raises BadInput where there is neither."""
    from ..pipelines.errors import HubError
    from ..pipelines.families.table import FAMILIES
    from ..pipelines.models.hub import fetch

    if model.exists():
        return model.resolve()
    try:
        return fetch(model.as_posix(), None, *FAMILIES.values(), download=False)
    except HubError:
        raise BadInput(
            f"There is no '{model}'. Name the folder that holds the model's model_index.json, Stable Video Diffusion's "
            "single file, or the hub id of a model that a Load node has downloaded."
        ) from None


def architecture_of(name: str | None) -> Architecture | None:
    """Look an architecture up by its name; None for this card. Raises BadInput where nobody has heard of it."""
    from ..precision.arch import named

    if name is None or name == THIS_CARD:
        return None
    try:
        return named(name)
    except ValueError as error:
        raise BadInput(str(error)) from None


class PrecisionReport(Node):
    """Pipeline → what each of its components runs in, and why, as text."""

    TITLE = "Precision Report"
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

        diagnosis = _with_surroundings(diagnose_pipeline(pipeline, architecture_of(architecture)))
        text = diagnosis.text()
        host.say(node_id, text)
        return {"ui": {"text": [text], "onediff_guard": [diagnosis.as_dict()]}, "result": (text,)}
