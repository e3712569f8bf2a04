"""NaN Guard (native) under Comfy Compiler (ComfyUI 0.35 and newer), which records what a network allocates, has later
calls allocate the same, and breaks its plan where one does not. Its functions are stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import difference, guarded, said, wrapped
from native_models import CPU, sample, with_its_twin
from torch.utils._python_dispatch import TorchDispatchMode

HERE = find_spec("comfy.model_prefetch") is not None
pytestmark = pytest.mark.skipif(not HERE, reason="this ComfyUI has no dynamic VRAM")
PREFETCH: Any = import_module("comfy.model_prefetch") if HERE else None
STEPS = 5


class Plan(TorchDispatchMode):
    """A plan for memory: bytes of each allocation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = self.paused = False
        self.known: list[int] = []
        self.now: list[int] = []
        self.calls = self.breaks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if self.recording and not self.paused:
            tensors = [each for each in (made if isinstance(made, (tuple, list)) else [made]) if torch.is_tensor(each)]
            storages = [each.untyped_storage() for each in tensors]
            self.now += [each.nbytes() for each in storages if each.data_ptr() not in there]
        return made

    def begin(self, device: torch.device) -> None:
        if PREFETCH.malloc_graph_enabled(device):
            self.now, self.recording = [], True

    def end(self) -> None:
        if self.recording:
            self.breaks += self.calls > 0 and self.now != self.known
            self.known, self.recording, self.calls = self.now, False, self.calls + 1

    @contextmanager
    def pause(self, sync: bool = False) -> Iterator[None]:
        before, self.paused = self.paused, True
        yield
        self.paused = before

    @contextmanager
    def held(self) -> Iterator[None]:
        """As ComfyUI of that time has it."""
        own = {"enabled": lambda _device: True, "begin": self.begin, "end": self.end}
        functions = {f"malloc_graph_{name}": function for name, function in own.items()}
        with patch.multiple(PREFETCH, create=True, pause_malloc_graph=self.pause, **functions), self:
            yield


def planned(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A network's forward, as networks of that time have it."""
    PREFETCH.malloc_graph_begin(CPU)
    made = executor(*args, **kwargs)
    PREFETCH.malloc_graph_end()
    return made


@pytest.mark.parametrize(
    ("hot", "how", "in_plan", "told"),
    [
        (False, {}, STEPS, False),
        (True, {}, STEPS, True),
        (False, {"precision": "fp16"}, 0, True),
        (True, {"scope": "learned"}, 1, True),
    ],
)
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_what_is_recomputed_or_protected_is_no_part_of_the_plan(
    family: str, hot: bool, how: dict[str, Any], in_plan: int, told: bool
) -> None:
    plan, (patcher, twin) = Plan(), with_its_twin(family, hot=hot)
    with plan.held():
        made = sample(wrapped(guarded(patcher, **how), planned), steps=STEPS)
    assert difference(made, sample(twin, steps=STEPS)) <= 1e-2
    assert (plan.calls, plan.breaks) == (in_plan, 0) and (not in_plan or plan.known)
    line = "Comfy Compiler plans no memory for recomputed or protected steps: theirs is beside it"
    assert (line in said[-1]) == told
