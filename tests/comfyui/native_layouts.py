"""The families of ComfyUI's own models that the tests run, each as small as it goes.

Imported by ComfyUI's interpreter alone, after its options have been read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A family: what its network is given, and a weight by which fp16 overflows and fp32 does not."""

    config: str  # its class in comfy.supported_models
    sizes: Mapping[str, Any]  # of the network, in place of those that ComfyUI finds
    latents: Shape
    context: Shape
    hot: Mapping[str, float]  # weight → what it is multiplied by
    marks: Mapping[str, Shape] = field(default_factory=dict)  # weights that ComfyUI's detection tells it by
    not_in_fp8: tuple[str, ...] = ()  # ends of the names of weights that ComfyUI does not take in fp8
    sound: Shape | None = None  # latents of it, where the family makes pictures and sound
    cfg: float = 4.0
    scheduler: str = "simple"
    extra: Mapping[str, Shape] = field(default_factory=dict)  # further conditions, by shape
    ones: Mapping[str, Shape] = field(default_factory=dict)  # those that are whole numbers: masks, tokens

    @property
    def streams(self) -> tuple[Shape, ...]:
        """Shapes of the latents, pictures first."""
        return (self.latents, self.sound) if self.sound else (self.latents,)

    @property
    def block(self) -> str:
        """Of the network, that overflows."""
        (weight,) = self.hot
        parts = weight.split(".")
        return ".".join(parts[: 3 if parts[0] == "input_blocks" else 2])

    def split(self, made: torch.Tensor) -> list[torch.Tensor]:
        """Streams of latents that stand behind one another."""
        if len(self.streams) == 1:
            return [made]
        parts = made.split([math.prod(shape) for shape in self.streams])
        return [part.reshape(shape) for part, shape in zip(parts, self.streams, strict=True)]

    def settings(self) -> dict[str, Any]:
        """Its network's, as ComfyUI's own detection would have them of a checkpoint, with our sizes in place of its
        own. So a parameter that a newer ComfyUI adds has the value that it gives it."""
        detect = import_module("comfy.model_detection").detect_unet_config
        marks = _Checkpoint({name: torch.zeros(shape) for name, shape in self.marks.items()})
        return {**(detect(marks, "") or {}), **self.sizes}


class _Checkpoint(dict[str, torch.Tensor]):
    """Weights by which a family is told. Any other that detection measures is of one value: its sizes are ours."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.zeros((1,) * 5)
