"""The GPU's memory by ComfyUI's memory manager, as offload 'auto' uses it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.placement import ComfyPlacement

GIB = 2**30


def management(device: str, free: int, **more: Any) -> Any:
    return SimpleNamespace(
        get_torch_device=lambda: torch.device(device),
        get_free_memory=lambda _: free,
        get_total_memory=lambda _: 8 * GIB,
        current_loaded_models=[],
        **more,
    )


@pytest.mark.parametrize(
    ("free", "reserved", "expected"),
    [
        (5 * GIB, GIB, 4 * GIB),  # --reserve-vram
        (GIB // 2, GIB, 0),
        (GIB, GIB, 0),
        (5 * GIB, None, 5 * GIB),  # 0.0.1 reserves nothing
    ],
)
def test_memory_that_comfyui_reserves_is_not_free(free: int, reserved: int | None, expected: int) -> None:
    more = {} if reserved is None else {"extra_reserved_memory": lambda: reserved}
    memory = ComfyPlacement(management("cuda:0", free, **more)).memory()
    assert memory is not None and (memory.total, memory.free) == (8 * GIB, expected)


def test_cpu_has_no_memory_figures() -> None:
    assert ComfyPlacement(management("cpu", GIB)).memory() is None
