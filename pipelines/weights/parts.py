"""The parts in which a component's weights come to the device. They are told from the module alone: nothing is moved,
and its tensors need have no values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch


class Offload(str, Enum):
    """Which weights rest in main memory. The values stand in people's workflow files."""

    AUTO = "auto"  # whichever of the others a stage has room for
    NONE = "none"
    MODEL = "model"  # a component's, while another is in use
    GROUP = "group"  # those of the denoiser and the text encoder, but for the block that computes and the next
    SEQUENTIAL = "sequential"  # the same, layer by layer

    @property
    def stays(self) -> bool:
        """Whether components stay where they are after use, until another needs the room."""
        return self in (Offload.AUTO, Offload.NONE)

    @property
    def in_parts(self) -> bool:
        """Whether a component's weights come to the device in parts."""
        return self in (Offload.GROUP, Offload.SEQUENTIAL)


def most_on_device(component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> int:
    """Return the bytes of a component's weights that are on the device at once while it computes, on CUDA. It may be on
    the "meta" device.

    blocks: names of its blocks, or of lists of blocks. Defaults to its outermost lists.
    """
    if not offload.in_parts:
        return sum(tensor.nbytes for tensor in {*tensors_of(component)})
    return Parts.of(component, offload, blocks).most_bytes(ahead=offload is Offload.GROUP)


@dataclass(frozen=True)
class Parts:
    """A component's weights, parted as they come to the device.

    places: {name of a block or of a layer: the number of its part}. Those that share a weight are one part.
    together: the modules of each part, in the order in which they run.
    n_bytes: of each part.
    rest: tensors that are in no part.
    """

    places: dict[str, int]
    together: list[list[torch.nn.Module]]
    n_bytes: list[int]
    rest: list[torch.Tensor]

    @classmethod
    def of(cls, component: torch.nn.Module, offload: Offload, blocks: tuple[str, ...] = ()) -> Parts:
        """Part the component by blocks (GROUP) or by layers (SEQUENTIAL)."""
        places: dict[str, int] = {}
        together: list[list[torch.nn.Module]] = []
        place_of: dict[torch.Tensor, int] = {}
        for name, part in _blocks(component, blocks) if offload is Offload.GROUP else _layers(component):
            tensors = list(tensors_of(part))
            place = next((place_of[t] for t in tensors if t in place_of), len(together))
            places[name] = place
            if place == len(together):
                together.append([part])
            elif not place_of.keys() >= {*tensors}:
                together[place].append(part)
            place_of |= dict.fromkeys(tensors, place)
        n_bytes = [0] * len(together)
        for tensor, place in place_of.items():
            n_bytes[place] += tensor.nbytes
        rest = [tensor for tensor in tensors_of(component) if tensor not in place_of]
        return cls(places, together, n_bytes, rest)

    def most_bytes(self, *, ahead: bool) -> int:
        """Return the bytes that are on the device at once: the rest, and the largest part, or where the next part comes
        ahead, while one computes, the two largest neighbours."""
        neighbours = map(sum, pairwise(self.n_bytes)) if ahead else ()
        return sum(tensor.nbytes for tensor in self.rest) + max((*self.n_bytes, *neighbours), default=0)


def tensors_of(module: torch.nn.Module, *, recurse: bool = True) -> Iterator[torch.Tensor]:
    """Yield a module's parameters and buffers."""
    yield from module.parameters(recurse)
    yield from module.buffers(recurse)


def _blocks(component: torch.nn.Module, parts: tuple[str, ...]) -> Iterator[tuple[str, torch.nn.Module]]:
    for part in parts or tuple(_outermost_lists(component)):
        module = component.get_submodule(part)
        if isinstance(module, torch.nn.ModuleList):
            yield from ((f"{part}.{name}", block) for name, block in _children(module))
        else:
            yield part, module


def _outermost_lists(module: torch.nn.Module, path: str = "") -> Iterator[str]:
    for name, child in _children(module):
        if isinstance(child, torch.nn.ModuleList):
            yield f"{path}{name}"
        else:
            yield from _outermost_lists(child, f"{path}{name}.")


def _layers(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the outermost modules that have weights of their own, by name. An adapted layer (peft's LoRA) is one."""
    for name, child in _children(module):
        own = any(True for _ in tensors_of(child, recurse=False)) or hasattr(child, "base_layer")
        if own:
            yield f"{path}{name}", child
        else:
            yield from _layers(child, f"{path}{name}.")


def _children(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module's children by name. One that has two names comes twice."""
    yield from ((name, child) for name, child in module._modules.items() if child is not None)
