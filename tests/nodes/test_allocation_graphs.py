"""Comfy Compiler (ComfyUI 0.35 and newer) plans a block's memory: tensors that outlive it are allocated outside."""

from __future__ import annotations

import sys
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import host, model_calls
from comfyui_onediff_guard.comfyui_host.rerun_layers import products_in_fp32
from comfyui_onediff_guard.precision import process_state, scaled_products
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts, LearningMode
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Records the storages that are allocated while the plan is recorded, and keeps them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = False
        self.recorded: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        outputs = func(*args, **(kwargs or {}))
        for each in outputs if isinstance(outputs, (tuple, list)) else [outputs]:
            if isinstance(each, torch.Tensor) and not self.paused:
                storage = each.untyped_storage()
                if storage.data_ptr() not in inputs:
                    self.recorded.setdefault(storage.data_ptr(), storage)
        return outputs

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self.recorded


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Allocations:
    module, plan = ModuleType("comfy.model_prefetch"), Allocations()

    @contextmanager
    def pause() -> Generator[None]:
        plan.paused = True
        try:
            yield
        finally:
            plan.paused = False

    module.pause_malloc_graph = pause  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return plan


def test_recompute_disables_plan_only_in_its_own_thread(plan: Allocations) -> None:
    module = sys.modules["comfy.model_prefetch"]
    module.malloc_graph_enabled = enabled = lambda _device: True  # type: ignore[attr-defined]

    def is_planned() -> bool:
        return module.malloc_graph_enabled("cuda")

    with products_in_fp32(torch.nn.Linear(1, 1)), ThreadPoolExecutor(1) as pool:
        assert not is_planned() and pool.submit(is_planned).result()
    assert module.malloc_graph_enabled is enabled


def test_version_of_comfyui_without_plans_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer of a step needs it, and reading a package's files each time would take longer than a layer."""
    reads: list[str] = []
    monkeypatch.setitem(sys.modules, "folder_paths", ModuleType("folder_paths"))
    monkeypatch.delitem(sys.modules, "comfyui_version", raising=False)
    monkeypatch.setattr(host.metadata, "version", lambda package: reads.append(package) or "0.33.0")
    host._installed_version.cache_clear()
    try:
        for _ in range(3):
            with process_state.lasting():
                assert host.version() == "0.33.0"
    finally:
        host._installed_version.cache_clear()
    assert reads == ["comfyui"]


def test_weight_limits_are_allocated_outside_plan(plan: Allocations) -> None:
    assert process_state.lasting is model_calls._outside_of_allocation_graphs
    layer = torch.nn.Linear(8, 8).half()
    limits = scaled_products._WeightBoundsCache()
    with plan, torch.no_grad():
        *_, is_new = limits.get(layer.weight, torch.float16, transposed=False)
        limits.poison(layer.weight, torch.tensor(True))
    (known,) = limits._known.values()
    assert is_new and known[2].limit.isnan()
    assert not [kept for kept in known[2] if kept is not None and kept in plan]


def test_clip_peak_is_allocated_outside_plan(plan: Allocations) -> None:
    clips = ClipDetector("fp16")

    def block(x: torch.Tensor) -> torch.Tensor:
        with plan:
            return torch.nan_to_num(x * 4)

    clips.wrap(block)(torch.full((4,), 60000.0, dtype=torch.float16))
    peak = clips.take()
    assert peak is not None and peak.isinf() and peak not in plan and plan.recorded


def test_recorded_peaks_of_layers_are_allocated_outside_plan(plan: Allocations) -> None:
    """In the first step, which learns scales, and in the next one, which uses them."""
    layer, products = torch.nn.Linear(8, 8).half().requires_grad_(False), LearnedProducts()
    kept: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        with plan:
            made = layer(x) * torch.rsqrt(layer(x).pow(2).mean(-1, keepdim=True))
        learning, planned = products._by_rows, products._planned
        if planned:
            kept.extend(
                [*planned._row_peaks, *planned._underflows, *(end for ends in planned._extremes for end in ends)]
            )
        elif isinstance(learning, LearningMode):
            kept.extend(learning.peaks.values)
        return made

    for _ in range(2):
        kept.clear()
        products.run(block, torch.randn(3, 8))
        assert kept and not [each for each in kept if each in plan] and plan.recorded
