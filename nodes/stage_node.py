"""Functions of the nodes that run a stage of a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..comfyui_host.language import translated
from ..trust.message import Message, joined
from .inputs import INHERIT

if TYPE_CHECKING:
    import torch

    from ..pipelines.run.handle import PipelineHandle
    from ..precision.policy import Precision
    from ..precision.report import RunReport


logger = logging.getLogger(__name__)


def requested(precision: str) -> Precision | None:
    """Return the drop-down's value as a Precision; None for 'inherit'."""
    from ..precision.policy import Precision

    return None if precision == INHERIT else Precision(precision)


# Options that ComfyUI's nodes add to a prompt → the value that changes nothing; None: any value
_NO_CHANGE = {
    "strength": 1.0,
    "mask_strength": 1.0,
    "set_area_to_bounds": False,
    "start_percent": 0.0,
    "end_percent": 1.0,
    "pooled_output": None,
}


def embeddings(conditioning: list[Any] | None, name: str) -> torch.Tensor | None:
    """Return Encode Prompt's tensor from a CONDITIONING wire: [1, tokens, channels]; None if nothing is wired.

    name: the input's name. Raises BadInput if the wire carries more than one prompt, or sets an area, a time range or a
    strength, which these pipelines cannot use.
    """
    from ..comfyui_host.tagged_tensor import plain
    from ..trust.message import BadInput

    if not conditioning:
        return None
    if len(conditioning) > 1:
        raise BadInput(
            "'{}' holds {} prompts, but this node uses one. Remove Conditioning (Combine), and write all prompts "
            "into one Encode Prompt.",
            name,
            len(conditioning),
        )
    tensor, options = conditioning[0]
    ignored = [key for key, value in options.items() if value is not None and not _changes_nothing(key, value)]
    if ignored:
        raise BadInput(
            "'{}' sets {}, which this node does not support. Connect Encode Prompt directly, without a node such as "
            "Conditioning (Set Area) or (Set Mask) in between.",
            name,
            ", ".join(ignored),
        )
    return plain(tensor)


def _changes_nothing(key: str, value: Any) -> bool:
    usual = _NO_CHANGE.get(key, value)
    return key in _NO_CHANGE and (usual is None or value == usual)


def only_first(image: torch.Tensor) -> tuple[str, ...]:
    """Return a warning if a batch of images is wired to an input that takes one."""
    return (Message("The batch has {} images; only the first is used.", len(image)),) if len(image) > 1 else ()


@contextmanager
def running(pipeline: PipelineHandle) -> Generator[None]:
    """Run a stage inside. Frees the device memory of a failed stage; keeps the store of a finished one."""
    try:
        yield
    except BaseException:
        host.release_cached_memory(pipeline.store.placement.device)
        raise
    host.linger(pipeline.store)


def counted(progress: host.Progress) -> Callable[[int, int, str], None]:
    """Return a callback by which a stage shows its calls on the node."""
    return lambda done, total, text: progress.update(done, text, total)


def ui(report: RunReport, node_id: str | None, *more: str) -> dict[str, list[Any]]:
    """Show the report and `more` on the node, line by line. Returns the node's `ui` output, for ComfyUI's history."""
    for warning in report.warnings:
        logger.warning("%s", warning)
    lines = filter(None, (report.summary(), report.finding(), *report.warnings, *more))
    text = translated(joined("\n", lines))
    host.say(node_id, text)
    return {"text": [text], "onediff_guard": [report.as_dict()]}
