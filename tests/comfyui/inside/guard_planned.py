"""NaN Guard (native) with Comfy Compiler (ComfyUI 0.35 and newer), which records a network's allocations, repeats them
in later calls, and breaks its plan if a call differs. Its functions have stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import difference, guarded, texts, wrapped
from native_models import CPU, sample, with_fp32_twin
from torch.utils._python_dispatch import TorchDispatchMode

AVAILABLE = find_spec("comfy.model_prefetch") is not None
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this ComfyUI has no dynamic VRAM")
PREFETCH: Any = import_module("comfy.model_prefetch") if AVAILABLE else None
STEPS = 5


class Plan(TorchDispatchMode):
    """A memory plan: bytes of each allocation, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = self.paused = False
        self.known: list[int] = []
        self.now: list[int] = []
        self.calls = self.breaks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if self.recording and not self.paused:
            tensors = [each for each in (made if isinstance(made, (tuple, list)) else [made]) if torch.is_tensor(each)]
            storages = [each.untyped_storage() for each in tensors]
            self.now += [each.nbytes() for each in storages if each.data_ptr() not in inputs]
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
    def installed(self) -> Iterator[None]:
        """Install the stand-ins as functions of ComfyUI."""
        own = {"enabled": lambda _device: True, "begin": self.begin, "end": self.end}
        functions = {f"malloc_graph_{name}": function for name, function in own.items()}
        with patch.multiple(PREFETCH, create=True, pause_malloc_graph=self.pause, **functions), self:
            yield


def planned(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A network's forward pass with a memory plan, as in newer ComfyUIs."""
    PREFETCH.malloc_graph_begin(CPU)
    made = executor(*args, **kwargs)
    PREFETCH.malloc_graph_end()
    return made


@pytest.mark.parametrize(
    ("hot", "how", "planned_calls", "reported"),
    [
        (False, {}, STEPS, False),
        (True, {}, STEPS, True),
        (False, {"precision": "fp16"}, 0, True),
        (True, {"scope": "learned"}, 1, True),
    ],
)
@pytest.mark.parametrize("family", ["wan", "flux"])
def test_recomputed_and_protected_steps_stay_out_of_memory_plan(
    family: str, hot: bool, how: dict[str, Any], planned_calls: int, reported: bool
) -> None:
    plan, (patcher, twin) = Plan(), with_fp32_twin(family, hot=hot)
    with plan.installed():
        made = sample(wrapped(guarded(patcher, **how), planned), steps=STEPS)
    assert difference(made, sample(twin, steps=STEPS)) <= 1e-2
    assert (plan.calls, plan.breaks) == (planned_calls, 0) and (not planned_calls or plan.known)
    line = "Comfy Compiler plans no memory for recomputed or protected steps: they need extra memory"
    assert (line in texts[-1]) == reported
