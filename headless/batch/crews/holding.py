"""What a worker keeps from one job to the next: the pipelines of its last models, loaded and compiled."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ...hosts.result import RunResult
from ..affinity import Landing, Warmth, landing


@dataclass
class _Held:
    plan: str
    shapes: set[str] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)


class Holding:
    """The pipelines of up to `most` models. One whose plan changes is loaded anew, since weights are there once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._models: OrderedDict[str, _Held] = OrderedDict()  # the one used last is the last

    @property
    def warm(self) -> tuple[Warmth, ...]:
        return tuple(
            Warmth(model, held.plan, shape) for model, held in self._models.items() for shape in sorted(held.shapes)
        )

    def make_room(self, warmth: Warmth) -> Landing:
        """Let go of what a job of this kind has no use or no room for; how it lands."""
        found = landing(warmth, self.warm)
        if found is Landing.COLD:
            dropped = self._models.pop(warmth.model, None) is not None
            while len(self._models) >= self._most:
                self._models.popitem(last=False)
                dropped = True
            if dropped:
                _give_back()
        return found

    def keep(self, warmth: Warmth, result: RunResult) -> None:
        """Hold what a job loaded and compiled, in place of what an earlier one of that model did."""
        from ....pipelines.run.handle import PipelineHandle

        held = self._models.setdefault(warmth.model, _Held(warmth.plan))
        held.shapes.add(warmth.shape)
        handles = [value for values in result.results.values() for value in values if isinstance(value, PipelineHandle)]
        held.handles = list({id(handle.store): handle for handle in handles}.values())
        self._models.move_to_end(warmth.model)

    def forget(self) -> None:
        """Let go of everything, after a job that failed: who knows what it left."""
        self._models.clear()
        _give_back()


def _give_back() -> None:
    gc.collect()  # modules hold reference cycles
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
