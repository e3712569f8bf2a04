"""A job's content hash (of all that its outputs depend on), and its cache key (what it loads and compiles)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from ...trust.message import shown
from ..errors import RunFailedError, WorkflowError
from ..hosts import input_images
from ..workflow.graph import Graph, Link
from ..workflow.schema import Schema

LENGTH = 32  # hexadecimal digits of a hash that name a folder: 128 bits
PACKAGE = "comfyui-onediff-guard"

# Names of inputs that decide which weights are read, how they compute, and for which shapes they are compiled: of this
# pack's nodes, of ComfyUI's, and by convention of others'. Changing other inputs is assumed to cost nothing.
MODEL = frozenset({"model", "hub_id", "revision", "lora", "transformer", "ckpt", "unet", "vae", "clip"})
MODEL_ENDINGS = ("_name", "_name1", "_name2", "_name3")  # ckpt_name, unet_name, lora_name, clip_name1
NO_MODEL = frozenset({"sampler_name", "scheduler_name"})
PLAN = frozenset({"precision", "backend", "offload", "accumulation", "attention", "dynamic", "mode", "weight_dtype"})
SHAPE = frozenset({"width", "height", "frames", "length", "num_frames", "video_frames", "batch_size"})


class CacheKey(NamedTuple):
    """The key of what a job loads and compiles. Jobs are sorted by it, so that what takes longest to change changes
    least often."""

    model: str
    plan: str
    shape: str


def cache_key_of(graph: Graph) -> CacheKey:
    parts: dict[str, dict[str, object]] = {"model": {}, "plan": {}, "shape": {}}
    for node in graph.nodes.values():
        for name, value in node.inputs.items():
            if not isinstance(value, Link) and (part := _part(name.rpartition(".")[2])):
                parts[part][f"{node.class_type}.{node.id}.{name}"] = value
    return CacheKey(**{part: json.dumps(found, sort_keys=True, default=str) for part, found in parts.items()})


def _part(name: str) -> str | None:
    if name in PLAN:
        return "plan"
    if name in SHAPE:
        return "shape"
    return "model" if name in MODEL or (name.endswith(MODEL_ENDINGS) and name not in NO_MODEL) else None


class JobImage(NamedTuple):
    file: Path
    digest: str  # SHA-256 of its bytes


def content_of(graph: Graph, images: Mapping[str, JobImage]) -> str:
    """Return the hash of a workflow with its settings applied, of its images, of this pack's version, and of whether it
    is guarded.

    It covers every node's id, type and inputs, but not titles, layout, or dates in file names. 20 and 20.0 are equal.
    An image counts by its bytes if it is one of `images`, else by its name; a model by its name.
    """
    nodes = graph.without_dates().to_api()
    facts = {
        "pack": version_that_matters(),
        "nodes": {node_id: [node["class_type"], node["inputs"]] for node_id, node in nodes.items()},
        "images": {name: image.digest for name, image in images.items()},
    } | ({"guarded": True} if graph.guarded else {})
    alike = json.loads(json.dumps(facts), parse_float=_whole_as_int)
    text = json.dumps(alike, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:LENGTH]


@lru_cache
def version_that_matters() -> str:
    """Return this pack's version without the patch number, which does not change frames."""
    try:
        return ".".join(metadata.version(PACKAGE).split(".")[:2])
    except metadata.PackageNotFoundError:  # a clone that is not installed
        return ""


def images_of(graph: Graph, schemas: Mapping[str, Schema], folder: Path | None) -> dict[str, JobImage]:
    """Return the workflow's images that are in the folder, by name. Raises WorkflowError if a name leads out of the
    folder, or a file is no image."""
    named = input_images.images_of(graph, schemas, folder) if folder else ()
    return {name: JobImage(file, _digest(file)) for _, _, name, file in named if file is not None}


def check_unchanged(images: Mapping[str, JobImage]) -> None:
    """Raise RunFailedError if an image is no longer the one that the job's hash covers."""
    for name, image in images.items():
        with suppress(OSError, WorkflowError):
            if _digest(image.file) == image.digest:
                continue
        raise RunFailedError(
            f"The image '{shown(name)}' changed while the batch ran. Run the same command again to use the new one."
        )


def _digest(file: Path) -> str:
    state = file.stat()
    return _digest_at(file, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=1024)
def _digest_at(file: Path, _changed: int, _size: int) -> str:
    return hashlib.sha256(input_images.read(file)).hexdigest()


def _whole_as_int(text: str) -> float:
    """Parse a number; a whole one as an integer: pages write 1 where others write 1.0."""
    value = float(text)
    return int(value) if value.is_integer() else value
