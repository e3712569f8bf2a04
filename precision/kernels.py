"""Missing memory-efficient kernels of a device: PyTorch silently falls back to one that needs many times the memory.

They are asked for ahead of a call, so that the estimate and the report are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from .arch import EXPERIMENTAL, detect
from .dtypes import DTYPES, dtype_name
from .process_state import NO_WARNINGS

_BROKEN_CUDNN = range(9_08_00, 9_15_00)  # its 3D convolutions in half precision are wrong at some sizes


@dataclass(frozen=True)
class Kernels:
    """A device's kernels. Each function returns why no memory-efficient kernel takes a call, and what to do; "" if one
    does.

    attention: takes the arguments of `scaled_dot_product_attention`.
    conv3d: takes the dtype of a 3D convolution whose kernel is larger than 1.
    """

    attention: Callable[..., str] = lambda *_, **__: ""
    conv3d: Callable[[torch.dtype], str] = lambda _: ""


LEAN = Kernels()


def kernels_of(device: torch.device) -> Kernels:
    """Return a device's kernels. Only CUDA and ROCm are asked; other devices count as having all of them."""
    if device.type != "cuda":
        return LEAN
    return Kernels(partial(no_fused_attention, device), no_cudnn_conv3d)


def no_fused_attention(device: torch.device, query: torch.Tensor, *args: Any, **kwargs: Any) -> str:
    """Return why PyTorch would use its "math" attention, which stores all scores, and what to do; "" if a fused kernel
    takes the call.

    query, args, kwargs: as `scaled_dot_product_attention` takes them, on whatever device.
    """

    def there(tensor: torch.Tensor) -> torch.Tensor:  # in as many bytes as its last dimension has
        return torch.empty(tensor.shape[-1:], dtype=tensor.dtype, device=device).expand(tensor.shape)

    args, kwargs = pytree.tree_map_only(torch.Tensor, there, (args, kwargs))
    with NO_WARNINGS.held():  # of why not
        chosen = SDPBackend(torch._fused_sdp_choice(there(query), *args, **kwargs))
    if chosen != SDPBackend.MATH:
        return ""
    architecture = detect(device)
    if not torch.version.hip:
        remedy = "Another precision may have one."
    elif architecture.attention_locked:
        remedy = f"Set {EXPERIMENTAL}=1 in the environment before the start, or get a newer PyTorch for ROCm."
    else:
        remedy = "A newer PyTorch for ROCm may have one."
    return (
        f"PyTorch has no fused attention in {dtype_name(query.dtype)} with heads of {query.shape[-1]} on "
        f"{architecture}, so all attention scores are kept in memory. {remedy}"
    )


@cache
def has_fused_attention(device: torch.device, width: int, dtype: torch.dtype) -> bool:
    """Return whether a device is known to have a fused kernel for heads of `width` channels, in whatever mode."""
    if device.type not in ("cpu", "cuda"):
        return False
    with torch._C.DisableTorchFunction():
        like = torch.empty(1, 1, 64, width, dtype=dtype, device="meta")
        return not kernels_of(device).attention(like, like, like)


def no_cudnn_conv3d(dtype: torch.dtype = torch.float16) -> str:
    """Return why this PyTorch computes 3D convolutions of a dtype without cuDNN, and what to do; "" if it uses cuDNN.

    PyTorch 2.9.0 leaves out any cuDNN from 9.8 on, later ones those that are wrong.
    """
    cudnn, version = torch.backends.cudnn.version(), TorchVersion(torch.__version__)
    if torch.version.hip or dtype not in (DTYPES["fp16"], DTYPES["bf16"]) or cudnn is None or version < "2.9":
        return ""
    if cudnn < _BROKEN_CUDNN.start or (cudnn >= _BROKEN_CUDNN.stop and version >= "2.9.1"):
        return ""
    return (
        f"PyTorch {version} computes 3D convolutions in half precision without cuDNN, because of a bug in cuDNN 9.8 "
        f"to 9.14 (here: {cudnn // 10000}.{cudnn // 100 % 100}), and unfolds their inputs in memory. Get PyTorch 2.11 "
        "or newer for CUDA 12.8 or newer; or, under Linux, PyTorch 2.9.1 or newer and nvidia-cudnn-cu12 (-cu13) 9.15 "
        "or newer."
    )
