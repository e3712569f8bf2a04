"""How the weights of convolutions lie in memory: as they were read, or with their channels last.

Tensor cores compute convolutions with channels last: where weights lie otherwise, cuDNN lays out anew what each call is
given and what it puts out. diffusers measured 3.30 s in place of 3.61 s for an image of Stable Diffusion in fp16, on a
TITAN RTX (https://huggingface.co/docs/diffusers/v0.12.0/optimization/fp16).

3D convolutions stay as they were read. With their channels last PyTorch computes them by cuDNN also where it leaves
cuDNN out since that is wrong (`precision/kernels.py`), and Wan's pictures have come out garbled
(https://github.com/sgl-project/sglang/pull/25985).
"""

from __future__ import annotations

import torch

_FORMATS = {False: torch.contiguous_format, True: torch.channels_last}


def of_layout(module: torch.nn.Module) -> list[torch.nn.Conv2d]:
    """Return the convolutions of which the layout matters: those in 2D whose windows overlap. Others are products of
    matrices."""
    return [part for part in module.modules() if isinstance(part, torch.nn.Conv2d) and _overlaps(part)]


def laid_out(module: torch.nn.Module, *, channels_last: bool) -> bool:
    """Return whether the weights of those convolutions lie so."""
    return all(part.weight.is_contiguous(memory_format=_FORMATS[channels_last]) for part in of_layout(module))


def lay_out(module: torch.nn.Module, *, channels_last: bool) -> None:
    """Lay out the weights of those convolutions that do not lie so. Parameters stay the objects that they are."""
    for part in of_layout(module):
        with torch.inference_mode(False):
            part.weight.data = part.weight.data.contiguous(memory_format=_FORMATS[channels_last])


def _overlaps(part: torch.nn.Conv2d) -> bool:
    return any(size > step for size, step in zip(part.kernel_size, part.stride, strict=True))
