"""Runs of a pipeline in which there is no room on the card for one of the components that are moved there.

The card is `cpu:0`, which is main memory by another name: what is moved there is written down.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import Placement
from comfyui_onediff_guard.precision.policy import Precision
from diffusers.hooks.group_offloading import ModuleGroup

CARD = torch.device("cpu", 0)
_HOST = torch.device("cpu")


class Card:
    """What `nn.Module.to` moved to it and not back. Put in place of `nn.Module.to`, which moves as ever."""

    def __init__(self, to: Callable[..., Any]):
        self.moves = 0  # to the card, of whole modules or what else comes at once
        self.fails_at = 0  # the number of the move for which there is no room; 0: none
        self.fails_on = False  # nor for any that follows
        self._to = to
        self._failed: list[weakref.ref[torch.Tensor]] = []
        self._here: dict[int, weakref.ref[torch.Tensor]] = {}
        self.arrived = 0  # bytes, ever

    def to(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = args[0] if args else kwargs.get("device")
        tensors = [*module.parameters(), *module.buffers()]
        if device == CARD:
            self.arrive(tensors)
        elif device in (_HOST, torch.device("meta")):
            self.go(tensors)
        moved = self._to(module, *args, **kwargs)
        if device == CARD:  # where buffers are new tensors
            self._hold(module.buffers())
        return moved

    def arrive(self, tensors: Sequence[torch.Tensor]) -> None:
        self.moves += 1
        fails = self.moves == self.fails_at or (self.fails_on and 0 < self.fails_at < self.moves)
        new = [tensor for tensor in tensors if not self._holds(tensor)]
        self.arrived += sum(tensor.nbytes for tensor in new)
        self._hold(tensors[: len(tensors) // 2] if fails else tensors)
        if fails:
            self._failed = [weakref.ref(tensor) for tensor in new]
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    def _hold(self, tensors: Iterable[torch.Tensor]) -> None:
        self._here |= {id(tensor): weakref.ref(tensor) for tensor in tensors}

    def go(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._here.pop(id(tensor), None)

    def fail_at(self, move: int, *, on: bool = False) -> None:
        """The next moves are counted from 1. on: nor is there room after that one."""
        self.moves, self.fails_at, self.fails_on = 0, move, on

    @property
    def left_behind(self) -> int:
        """Bytes that are here of what could not be moved."""
        return sum(t.nbytes for t in _alive(self._failed) if self._holds(t))

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in _alive(self._here.values()))

    def bytes_of(self, *modules: torch.nn.Module) -> int:
        """That are here. What several of them hold counts once."""
        tensors = {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
        return sum(tensor.nbytes for tensor in tensors if self._holds(tensor))

    def _holds(self, tensor: torch.Tensor) -> bool:
        known = self._here.get(id(tensor))
        return known is not None and known() is tensor


def tensors_of(group: ModuleGroup) -> list[torch.Tensor]:
    """Which diffusers brings and sends away together."""
    found = [tensor for module in group.modules for tensor in (*module.parameters(), *module.buffers())]
    return [*found, *group.parameters, *group.buffers]


def _alive(known: Iterable[weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    """What was let go takes no room."""
    return [tensor for tensor in (each() for each in known) if tensor is not None]


def opened(folder: Path, offload: str, placement: Placement) -> PipelineHandle:
    """Each with a store of its own."""
    stores._STORES.clear()
    options: dict[str, Any] = {"backend": "eager", "offload": offload, "placement": placement}
    return load(folder, family_of(folder), precision=Precision("fp32"), **options)


def whether_there(card: Card, handle: PipelineHandle) -> dict[str, set[bool]]:
    """For each component, filled as it is called: whether all of it was on the card."""
    found: dict[str, set[bool]] = {}
    checks = handle.store._checked

    def watched(name: str, module: torch.nn.Module, dtype: str) -> list[str]:
        size = sum(t.nbytes for t in {*module.parameters(), *module.buffers()})

        def called(*_: Any) -> None:
            found.setdefault(name, set()).add(card.bytes_of(module) == size)

        said = checks(name, module, dtype)
        for layer in module.modules():
            layer.register_forward_pre_hook(called)
        return said

    handle.store._checked = watched
    return found


def frames(handle: PipelineHandle, seed: int = 3) -> torch.Tensor:
    handle.store.prompts.clear()  # the text encoder is needed each time
    (positive, negative), _ = encode_prompts(handle, ["a red kite", "grey"])
    settings = SampleSettings(32, 32, steps=1, seed=seed, frames=5, guidance_scale=6.0)
    latents, _ = sample(handle, positive, negative, settings)
    return decode(handle, latents)[0]


BEFORE: dict[str, Callable[[PipelineHandle, Lora], object]] = {  # the run that fails
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


def what_is_wrong(card: Card, begun: Callable[[], PipelineHandle], step: int = 1) -> list[str]:
    """After each move that fails: whether the run is right where it fails once; and where there is no room from then
    on, what is left halfway, and whether the next run is right."""
    handle = begun()
    card.fail_at(0)
    expected, wrong = frames(handle), []
    for move in range(1, card.moves + 1, step):
        handle = begun()
        card.fail_at(move)
        if not torch.equal(frames(handle), expected):
            wrong.append(f"move {move}: the run in which it failed once is not right")
        card.fail_at(0)
        handle = begun()
        card.fail_at(move, on=True)
        try:
            frames(handle)
            wrong.append(f"move {move} did not fail")
        except torch.OutOfMemoryError:
            pass
        card.fail_at(0)
        gc.collect()
        store = handle.store
        if card.left_behind:
            wrong.append(f"move {move}: {card.left_behind} bytes of what could not be moved are there")
        loaded = card.bytes_of(*(module for _, module in (*store._modules.values(), *store._with_loras.values())))
        if card.bytes != loaded:
            wrong.append(f"move {move}: {card.bytes - loaded} bytes are there that belong to no component")
        if not torch.equal(frames(handle), expected):
            wrong.append(f"move {move}: the next run is not right")
    return wrong
