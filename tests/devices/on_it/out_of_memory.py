"""Memory runs out while a component is moved: the run continues, or fails and leaves nothing half moved; the next run
is right."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from moving import BEFORE, CASES, CUDA, Moves, failures_after_oom, opened
from trained_lora import train_lora


@pytest.fixture
def moves(card: Any) -> Generator[Moves]:
    watched = Moves()
    yield watched
    watched.end()


@pytest.fixture(scope="module")
def lora(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Lora:
    return train_lora(tmp_path_factory.mktemp("loras"), model_folder("2b"))


FEW = (("a LoRA", "model", False), ("second use", "model", True))
WAYS = [(*case, with_lora) for case in CASES for with_lora in (False, True)]


@pytest.mark.parametrize(
    ("before", "offload", "with_lora"),
    [pytest.param(*way, marks=[] if way in FEW else pytest.mark.long) for way in WAYS],
)
def test_next_run_is_right_after_any_failed_move(
    moves: Moves, model_folder: Callable[..., Path], lora: Lora, before: str, offload: str, with_lora: bool
) -> None:
    def begun() -> PipelineHandle:
        handle = opened(model_folder("2b"), offload, PlainPlacement(CUDA))
        BEFORE[before](handle, lora)
        return add_lora(handle, lora) if with_lora else handle

    assert failures_after_oom(moves, begun) == []
    assert moves.n >= 2


@pytest.mark.parametrize(
    ("offload", "step"),
    [("group", 5), *(pytest.param(*way, marks=pytest.mark.long) for way in (("group", 1), ("sequential", 7)))],
)
def test_next_run_is_right_after_any_failed_part(
    moves: Moves, model_folder: Callable[..., Path], offload: str, step: int
) -> None:
    assert failures_after_oom(moves, lambda: opened(model_folder("2b"), offload, PlainPlacement(CUDA)), step) == []
    assert moves.n >= 10
