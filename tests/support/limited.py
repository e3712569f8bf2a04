"""A card that has so many bytes, for weights and for what stages compute with: beyond them, memory runs out.

Weights are counted where they are moved, as `moving` does it. What a stage makes is counted tensor by tensor, while its
guard runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement
from comfyui_onediff_guard.precision.activations import Alive
from comfyui_onediff_guard.precision.guard import StageGuard
from diffusers.hooks.group_offloading import ModuleGroup
from moving import CARD, Card, tensors_of
from torch.utils._python_dispatch import _disable_current_modes


class LimitedCard(Card):
    def __init__(self, to: Callable[..., Any]):
        super().__init__(to)
        self.room = float("inf")  # bytes
        self.only = ""  # the stage that the limit is for; "": all, and all moves
        self.stage = ""  # that computes
        self.most = 0  # bytes that were there at once
        self.made: Counter[str] = Counter()  # of these, the most that one call of a stage made

    def arrive(self, tensors: Any) -> None:
        new = sum(tensor.nbytes for tensor in {*tensors} if not self._holds(tensor))
        self.take(new)
        super().arrive(tensors)

    def take(self, more: int) -> None:
        """Raise where that many bytes have no room beside the weights."""
        if self.only not in ("", self.stage):
            return
        if self.bytes + more > self.room:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {more} bytes.")
        self.most = max(self.most, self.bytes + more)

    @contextmanager
    def limited(self, room: float, only: str = "") -> Generator[None]:
        self.room, self.only, self.most = room, only, 0
        try:
            yield
        finally:
            self.room, self.only = float("inf"), ""


class Computing(Alive):
    """What a stage makes on the card."""

    def __init__(self, card: LimitedCard):
        super().__init__()
        self._card = card

    def _note(self, more: int = 0) -> None:
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self._counted = sum(n_bytes for _, n_bytes in self._held.values())
        self.most = max(self.most, self._counted + more)
        self._card.take(self._counted + more)


class CardPlacement(PlainPlacement):
    def __init__(self, card: LimitedCard):
        super().__init__(CARD)
        self._card = card
        self.asked: list[int] = []  # room beside a component's weights

    def to_device(self, name: str, module: torch.nn.Module, beside: int = 0) -> None:
        self.asked.append(beside)
        super().to_device(name, module, beside)

    def memory(self) -> DeviceMemory:
        total = int(min(self._card.room, 1e15))
        return DeviceMemory(total, total - self._card.bytes)


@contextmanager
def limited_card() -> Generator[LimitedCard]:
    """A card in place of everything that moves weights or computes in a stage."""
    card = LimitedCard(torch.nn.Module.to)
    called, send_away = StageGuard.__call__, ModuleGroup._offload_to_memory

    def onload(group: ModuleGroup) -> None:
        card.arrive(tensors_of(group))
        with _disable_current_modes():  # what arrived is counted
            group._process_tensors_from_modules(None)

    def guarded(guard: StageGuard, *args: Any, **kwargs: Any) -> Any:
        card.stage = guard.stage
        try:
            with Computing(card) as computing:
                made = called(guard, *args, **kwargs)
        finally:
            card.stage = ""
        card.made[guard.stage] = max(card.made[guard.stage], computing.most)
        return made

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch.nn.Module, "to", lambda *args, **kwargs: card.to(*args, **kwargs)),
            (StageGuard, "__call__", guarded),
            (ModuleGroup, "_onload_from_memory", onload),
            (stores, "bytes_on", lambda _device, module: card.bytes_of(module)),
            (ModuleGroup, "_offload_to_memory", lambda group: (send_away(group), card.go(tensors_of(group)))),
            *((module, "brings_parts_to", lambda _device: True) for module in (handles, offloading, stores)),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield card
