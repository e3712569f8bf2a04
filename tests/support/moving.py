"""Pipeline runs in which memory runs out while a component is moved to the second device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import second_device
import small_runs
import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement, tensors_of
from comfyui_onediff_guard.precision.policy import Precision
from diffusers.hooks.group_offloading import ModuleGroup
from small_runs import CUDA


class Moves:
    """Counts moves of modules or parts to the device; in one of them memory runs out halfway."""

    def __init__(self) -> None:
        self.n = 0
        self.fails_at = 0  # number of the move that fails; 0: none
        self.fails_on = False  # whether all later moves fail too
        to, onload = torch.nn.Module.to, ModuleGroup._onload_from_memory

        def moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            device = args[0] if args else kwargs.get("device")
            if not isinstance(device, (torch.device, str)) or torch.device(device).type != CUDA.type:
                return to(module, *args, **kwargs)
            return self._made(tensors_of(module), lambda: to(module, *args, **kwargs))

        def onloaded(group: ModuleGroup) -> Any:
            return self._made(group.parameters, lambda: onload(group))

        self._patches = [
            mock.patch.object(torch.nn.Module, "to", moved),
            mock.patch.object(ModuleGroup, "_onload_from_memory", onloaded),
        ]
        for patch in self._patches:
            patch.start()

    def end(self) -> None:
        for patch in self._patches:
            patch.stop()

    def _made(self, tensors: Iterable[torch.Tensor], move: Callable[[], Any]) -> Any:
        coming = sum(tensor.device.type == "cpu" for tensor in {*tensors})
        self.n += bool(coming)
        fails = coming and (self.n == self.fails_at or (self.fails_on and 0 < self.fails_at < self.n))
        second_device.card.fail_in(coming // 2 + 1 if fails else 0)
        try:
            return move()
        finally:
            second_device.card.fail_in(0)

    def fail_at(self, move: int, *, on: bool = False) -> None:
        """Count the next moves from 1. on: all later moves fail too."""
        self.n, self.fails_at, self.fails_on = 0, move, on


def opened(folder: Path, offload: str, placement: PlainPlacement) -> PipelineHandle:
    """A handle with a new store."""
    return small_runs.opened_fresh(folder, offload, placement=placement)


def card_bytes(*modules: torch.nn.Module) -> int:
    """Bytes of the modules on the device; shared tensors count once."""
    return sum(t.nbytes for t in {t for module in modules for t in tensors_of(module)} if t.device == CUDA)


def frames(handle: PipelineHandle, seed: int = 3) -> torch.Tensor:
    return small_runs.frames(handle, (32, 32, 5), steps=1, seed=seed)


BEFORE: dict[str, Callable[[PipelineHandle, Lora], object]] = {  # before the run that fails
    "first use": lambda _handle, _lora: None,
    "second use": lambda handle, _lora: frames(handle, seed=1),
    "another dtype": lambda handle, _lora: frames(replace(handle, precision=Precision("bf16"))),
    "a LoRA": lambda handle, lora: frames(add_lora(handle, lora)),
}
CASES = [
    ("first use", "none"),
    ("second use", "model"),
    ("another dtype", "none"),
    ("another dtype", "model"),
    ("a LoRA", "none"),
    ("a LoRA", "model"),
]


def failures_after_oom(moves: Moves, begun: Callable[[], PipelineHandle], step: int = 1) -> list[str]:
    """Let each move fail. If it fails once, the run must be right; if all later moves fail too, nothing may stay half
    moved, and the next run must be right. Returns the failures."""
    handle = begun()
    moves.fail_at(0)
    expected, wrong = frames(handle), []
    for move in range(1, moves.n + 1, step):
        handle = begun()
        moves.fail_at(move)
        if not torch.equal(frames(handle), expected):
            wrong.append(f"move {move}: the run in which it failed once is not right")
        moves.fail_at(0)
        handle = begun()
        moves.fail_at(move, on=True)
        try:
            frames(handle)
            wrong.append(f"move {move} did not fail")
        except torch.OutOfMemoryError:
            pass
        moves.fail_at(0)
        gc.collect()
        torch.cuda.synchronize()
        store = handle.store
        left = second_device.card.used() - card_bytes(
            *(part for each in store.components.values() for part in (each.module, each.adapted) if part)
        )
        if left:
            wrong.append(f"move {move}: {left} bytes are there that belong to no component")
        if not torch.equal(frames(handle), expected):
            wrong.append(f"move {move}: the next run is not right")
    return wrong
