"""Which weights rest in main memory while a stage runs, and the backends that work with that."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import torch

from ...trust.message import Message
from ..compile.backends import BackendChoice, choose_backend
from ..errors import BackendUnavailable


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


class OffloadPolicy(Protocol):
    """A component's weights, which come to the device as they are needed inside `with`.

    most_bytes: on the device at once, of weights that come and go.
    """

    most_bytes: int

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return a shell of `module` (the component, or a shell of it) that brings its weights when they are needed.

        like: an eager shell of the same component, where `module` has something else in place of blocks.
        """
        ...

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...


class NoOffload:
    """Weights that are on the device already."""

    most_bytes = 0

    def shell(self, module: torch.nn.Module, like: torch.nn.Module | None = None) -> torch.nn.Module:
        del like
        return module

    def __enter__(self) -> NoOffload:
        return self

    def __exit__(self, *_: object) -> None: ...


def brings_parts_to(device: torch.device) -> bool:
    """Return whether weights that rest in main memory have to be brought to the device."""
    return device.type != "cpu"


_LASTING = {  # backend → why what it compiled cannot follow weights that move
    "oneflow": "its graphs keep the memory in which the weights were first",
    "nexfort": "whether its graphs follow weights that move block by block has not been seen",
    "inductor": "a compiled block is one piece, and cannot wait for each layer's weights",
}
_REFUSED = {
    Offload.AUTO: (),
    Offload.NONE: (),
    Offload.MODEL: ("oneflow",),
    Offload.GROUP: ("oneflow", "nexfort"),
    Offload.SEQUENTIAL: ("oneflow", "nexfort", "inductor"),
}


def backend_with(choice: BackendChoice, offload: Offload, device: torch.device) -> BackendChoice:
    """Return the backend, or where 'auto' chose one that does not work with `offload`, the next one that does.

    Raises BackendUnavailable where a backend that does not work was asked for by name.
    """
    refused = _REFUSED[offload] if brings_parts_to(device) else ()
    if choice.name not in refused:
        return choice
    missing = Message("{} does not work with offload '{}': {}", choice.name, offload.value, _LASTING[choice.name])
    if not choice.automatic:
        others = "', '".join(backend for backend in ("inductor", "eager") if backend not in refused)
        kinds = "', '".join(kind.value for kind, backends in _REFUSED.items() if choice.name not in backends)
        raise BackendUnavailable("{}. Choose backend '{}', or offload '{}'.", missing, others, kinds)
    for name in ("inductor", "eager"):
        try:
            following = choose_backend(name, device)
        except BackendUnavailable:
            continue
        if name not in refused:
            return BackendChoice(following.name, f"auto: {missing}", automatic=True)
    raise AssertionError("eager works everywhere")
