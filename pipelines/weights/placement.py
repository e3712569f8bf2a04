"""Where weights live while they are not in use, without a memory manager. ComfyUI's is `comfyui_host/host.py`'s."""

from __future__ import annotations

import threading
from typing import Protocol

import torch

MOVING = threading.RLock()  # who moves weights holds it: ComfyUI's memory manager keeps its lists without a lock


class Placement(Protocol):
    """Moves whole components between the device that computes and the host's memory."""

    device: torch.device

    def make_room(self, n_bytes: int) -> None:
        """Called before that many bytes are read."""
        ...

    def to_device(self, name: str, module: torch.nn.Module) -> None:
        """Whole, or where it raises not at all."""
        ...

    def to_host(self, name: str, module: torch.nn.Module) -> None: ...

    def forget(self, name: str) -> None:
        """The component is no longer loaded."""
        ...


class PlainPlacement:
    """Components stay where they are put."""

    def __init__(self, device: torch.device | None = None):
        self.device = device or default_device()

    def make_room(self, n_bytes: int) -> None:
        del n_bytes

    def to_device(self, name: str, module: torch.nn.Module) -> None:
        del name
        move_whole(module, self.device)

    def to_host(self, name: str, module: torch.nn.Module) -> None:
        del name
        move(module, torch.device("cpu"))

    def forget(self, name: str) -> None:
        del name
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights outside of inference mode: moved inside, they would become inference tensors."""
    with torch.inference_mode(False), torch.no_grad():
        module.to(device)


def move_whole(module: torch.nn.Module, device: torch.device) -> None:
    """Move weights to where there may be no room for all of them: then all are in main memory."""
    try:
        move(module, device)
    except BaseException:
        move(module, torch.device("cpu"))
        raise


def default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
