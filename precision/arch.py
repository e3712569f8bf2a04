"""What a device's architecture can do in half precision: one table, read by compute capability."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Architecture:
    """What the policy needs to know of a device."""

    name: str  # "sm75", "gfx1100", "cpu", "mps"
    label: str  # the vendor's name of the generation
    native_bf16: bool  # in hardware; PyTorch's is_bf16_supported() counts emulation too
    fast_fp16: bool  # half precision is worth having for speed
    tf32: bool
    fp8: bool
    accumulation_risk: bool  # OneFlow's fused attention accumulates in half precision here
    known: bool = True

    def __str__(self) -> str:
        return self.label if self.label.lower() == self.name else f"{self.name} ({self.label})"


_CUDA: dict[tuple[int, int], Architecture] = {
    (major, minor): Architecture(f"sm{major}{minor}", label, bf16, fp16, tf32, fp8, risk)
    #  capability        generation     bf16   fp16   tf32   fp8    accumulation risk
    for (major, minor), (label, bf16, fp16, tf32, fp8, risk) in {
        (6, 0): ("Pascal", False, True, False, False, True),
        (6, 1): ("Pascal", False, False, False, False, True),
        (7, 0): ("Volta", False, True, False, False, False),
        (7, 2): ("Volta", False, True, False, False, True),
        (7, 5): ("Turing", False, True, False, False, True),
        (8, 0): ("Ampere", True, True, True, False, True),
        (8, 6): ("Ampere", True, True, True, False, True),
        (8, 7): ("Ampere", True, True, True, False, True),
        (8, 9): ("Ada", True, True, True, True, True),
        (9, 0): ("Hopper", True, True, True, True, True),
        (10, 0): ("Blackwell", True, True, True, True, True),
        (10, 3): ("Blackwell", True, True, True, True, True),
        (12, 0): ("Blackwell", True, True, True, True, True),
        (12, 1): ("Blackwell", True, True, True, True, True),
    }.items()
}

_ROCM: dict[str, Architecture] = {
    prefix: Architecture(prefix, label, bf16, True, False, False, False)
    for prefix, (label, bf16) in {
        "gfx906": ("Vega 20", False),
        "gfx908": ("CDNA", True),
        "gfx90a": ("CDNA 2", True),
        "gfx94": ("CDNA 3", True),
        "gfx95": ("CDNA 4", True),
        "gfx101": ("RDNA", False),
        "gfx103": ("RDNA 2", False),
        "gfx11": ("RDNA 3", True),
        "gfx12": ("RDNA 4", True),
    }.items()
}

CPU = Architecture("cpu", "CPU", True, False, False, False, False)
MPS = Architecture("mps", "Apple GPU", False, True, False, False, False)


def detect(device: torch.device) -> Architecture:
    """The architecture of the device that a pipeline runs on. A device that no table knows gets a safe row."""
    import torch

    if device.type == "cpu":
        return CPU
    if device.type == "mps":
        return MPS
    if device.type == "cuda" and torch.version.hip:
        return by_gfx(torch.cuda.get_device_properties(device).gcnArchName)
    if device.type == "cuda":
        return by_capability(*torch.cuda.get_device_capability(device))
    return Architecture(device.type, "not in the table", False, True, False, False, True, known=False)


def by_capability(major: int, minor: int) -> Architecture:
    """NVIDIA compute capability → row; one newer than the table takes the nearest older row, marked unknown."""
    if row := _CUDA.get((major, minor)):
        return row
    older = [capability for capability in _CUDA if capability < (major, minor)]
    nearest = _CUDA[max(older)] if older else _CUDA[min(_CUDA)]
    label = f"not in the table, treated as {nearest.name}"
    return replace(nearest, name=f"sm{major}{minor}", label=label, accumulation_risk=True, known=False)


def by_gfx(name: str) -> Architecture:
    """ROCm's gcnArchName (`gfx90a:sramecc+:xnack-`) → row, by the longest prefix that is in the table."""
    gfx = name.split(":", 1)[0]
    prefixes = [prefix for prefix in _ROCM if gfx.startswith(prefix)]
    if prefixes:
        return replace(_ROCM[max(prefixes, key=len)], name=gfx)
    return Architecture(gfx, "not in the table", False, True, False, False, True, known=False)
