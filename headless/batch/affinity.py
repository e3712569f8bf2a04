"""Which job a worker that is free takes next: one for which it is warm, else one for which nobody is.

Decided on plain data alone. A worker is warm for (model, plan, shape) once it ran such a job: the weights are there,
and what is compiled for that shape. All else that a workflow sets (prompt, seed, steps) costs nothing to change.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..workflow.graph import Graph, Link

# What inputs are called that decide which weights are read, how they compute, and what shapes they are compiled for: of
# this pack's nodes, of ComfyUI's own, and by custom of others'. Any other input is taken to cost nothing.
MODEL = frozenset({"model", "hub_id", "revision", "lora", "transformer", "ckpt", "unet", "vae", "clip"})
MODEL_ENDINGS = ("_name", "_name1", "_name2", "_name3")  # ckpt_name, unet_name, lora_name, clip_name1
NO_MODEL = frozenset({"sampler_name", "scheduler_name"})
PLAN = frozenset(
    {"precision", "backend", "offload", "accumulation", "attention", "dynamic", "mode", "fullgraph", "weight_dtype"}
)
SHAPE = frozenset({"width", "height", "frames", "length", "num_frames", "video_frames", "batch_size"})


@dataclass(frozen=True)
class Warmth:
    """What a worker has to have loaded and compiled for a job, each part as a short hash."""

    model: str
    plan: str
    shape: str

    @property
    def loaded(self) -> tuple[str, str]:
        """What of it is loaded before anything is compiled for a shape."""
        return self.model, self.plan


class Landing(Enum):
    """How well a job and a worker go together."""

    WARM = "warm"
    LOADED = "loaded"  # the model is there, and nothing for this shape
    COLD = "cold"


def warmth_of(graph: Graph) -> Warmth:
    """What a workflow needs to be warm."""
    parts: dict[str, dict[str, object]] = {"model": {}, "plan": {}, "shape": {}}
    for node in graph.nodes.values():
        for name, value in node.inputs.items():
            if not isinstance(value, Link) and (part := _part(name)):
                parts[part][f"{node.class_type}.{node.id}.{name}"] = value
    return Warmth(**{part: _short(found) for part, found in parts.items()})


def landing(warmth: Warmth, warm: Collection[Warmth]) -> Landing:
    """How a job lands on a worker that is warm for these."""
    if warmth in warm:
        return Landing.WARM
    return Landing.LOADED if warmth.loaded in {each.loaded for each in warm} else Landing.COLD


def choose(
    window: Sequence[Warmth],
    own: Collection[Warmth],
    owners: Mapping[Warmth, int],
    patience: float,
    ahead: float = 1.0,
) -> int | None:
    """The place in the window of the job that a free worker takes; None: it waits.

    window: what the jobs that wait need, the oldest first.
    own: for what this worker is warm.
    owners: how many workers are warm for it, this one included.
    patience: how many warm jobs take as long as getting warm. With fewer waiting for each worker that is warm for them,
    it is sooner over where they wait for those.
    ahead: how many jobs are still to come for each in the window, that one included. They are taken to be as those are.
    """
    for place, warmth in enumerate(window):
        if warmth in own:
            return place
    loaded = {warmth.loaded for warmth in own}
    unclaimed = [place for place, warmth in enumerate(window) if not owners.get(warmth)]
    if unclaimed:
        return next((place for place in unclaimed if window[place].loaded in loaded), unclaimed[0])
    waiting = Counter(window)
    if not waiting:
        return None
    most = max(waiting, key=lambda warmth: (waiting[warmth] / owners[warmth], warmth.loaded in loaded))
    return window.index(most) if waiting[most] * ahead / owners[most] >= patience else None


def _part(name: str) -> str | None:
    last = name.rpartition(".")[2]
    if last in PLAN:
        return "plan"
    if last in SHAPE:
        return "shape"
    return "model" if last in MODEL or (last.endswith(MODEL_ENDINGS) and last not in NO_MODEL) else None


def _short(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
