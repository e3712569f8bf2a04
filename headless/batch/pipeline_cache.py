"""What jobs share when they are run one after the other: the cache key by which they are sorted, and the pipelines that
a worker keeps for it."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..hosts.result import RunResult
from ..workflow.graph import Graph, Link

# Names of inputs that decide which weights are read, how they compute, and for which shapes they are compiled: of this
# pack's nodes, of ComfyUI's, and by convention of others'. Changing any other input is taken to cost nothing.
MODEL = frozenset({"model", "hub_id", "revision", "lora", "transformer", "ckpt", "unet", "vae", "clip"})
MODEL_ENDINGS = ("_name", "_name1", "_name2", "_name3")  # ckpt_name, unet_name, lora_name, clip_name1
NO_MODEL = frozenset({"sampler_name", "scheduler_name"})
PLAN = frozenset(
    {"precision", "backend", "offload", "accumulation", "attention", "dynamic", "mode", "fullgraph", "weight_dtype"}
)
SHAPE = frozenset({"width", "height", "frames", "length", "num_frames", "video_frames", "batch_size"})


@dataclass(frozen=True, order=True)
class CacheKey:
    """What has to be loaded and compiled for a job, each part as a short hash. Jobs are sorted by it: what takes
    longest to change changes least often."""

    model: str
    plan: str
    shape: str


def cache_key_of(graph: Graph) -> CacheKey:
    parts: dict[str, dict[str, object]] = {"model": {}, "plan": {}, "shape": {}}
    for node in graph.nodes.values():
        for name, value in node.inputs.items():
            if not isinstance(value, Link) and (part := _part(name)):
                parts[part][f"{node.class_type}.{node.id}.{name}"] = value
    return CacheKey(**{part: _short_hash(found) for part, found in parts.items()})


def _part(name: str) -> str | None:
    last = name.rpartition(".")[2]
    if last in PLAN:
        return "plan"
    if last in SHAPE:
        return "shape"
    return "model" if last in MODEL or (last.endswith(MODEL_ENDINGS) and last not in NO_MODEL) else None


def _short_hash(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


class PipelineCache:
    """The pipelines of the last `size` models, loaded and compiled. One whose plan changes is loaded anew."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: OrderedDict[str, tuple[str, list[Any]]] = OrderedDict()  # model → plan, handles; the last used last

    def evict_for(self, key: CacheKey) -> None:
        """Free what the next job cannot use, or needs the memory of."""
        if key.model in self._kept and self._kept[key.model][0] == key.plan:
            return
        before = len(self._kept)
        self._kept.pop(key.model, None)
        while len(self._kept) >= self._size:
            self._kept.popitem(last=False)
        if len(self._kept) < before:
            _free_memory()

    def put(self, key: CacheKey, result: RunResult) -> None:
        """Keep the pipelines that a run loaded."""
        from ...pipelines.run.handle import PipelineHandle

        handles = [value for values in result.results.values() for value in values if isinstance(value, PipelineHandle)]
        self._kept[key.model] = key.plan, list({id(handle.store): handle for handle in handles}.values())
        self._kept.move_to_end(key.model)

    def clear(self) -> None:
        """Keep nothing, after a run that failed and may have left anything."""
        self._kept.clear()
        _free_memory()


def _free_memory() -> None:
    gc.collect()  # modules hold reference cycles
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
