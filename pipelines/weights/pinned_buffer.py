"""Main memory that is page-locked to the page, which is what a device copies from while the host goes on.

PyTorch page-locks a tensor with `pin_memory` in memory that it rounds up to a power of two: 1.78 times the weights of
CogVideoX-5B. Here the weights of a block lie in one buffer, and the buffer is registered with CUDA as it is. A copy
from registered memory is asynchronous as from PyTorch's own, but nobody keeps the memory for it: PyTorch notes such a
copy only for memory of its allocator. So the buffer stays registered until the copies' stream is done.
"""

from __future__ import annotations

import logging
import mmap
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_ALIGNED = 64  # bytes, as PyTorch aligns tensors
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for each device


class PinnedBuffer:
    """Tensors that lie together in a buffer of main memory. They stay the objects that they are, with their shapes,
    strides and values. Tensors of other classes and views with gaps are left where they are.

    The buffer has pages of its own, since CUDA registers a page once; and it is the storage of its tensors from the
    first byte on, since that is the byte of which `is_pinned` asks CUDA. While a slab is made, main memory holds at
    most its bytes beside all weights.

    stream: of all copies from it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], stream: torch.cuda.Stream):
        self.tensors = [tensor for tensor in dict.fromkeys(tensors) if _is_plain(tensor)]
        self._stream = stream
        self._unlock: weakref.finalize[..., PinnedBuffer] | None = None
        begins, n_bytes = laid_out(self.tensors)
        if not self.tensors:
            return
        self._buffer = torch.frombuffer(_pages(n_bytes), dtype=torch.uint8)
        for tensor, begin in zip(self.tensors, begins, strict=True):
            data = tensor.data
            here = self._buffer[begin : begin + data.nbytes].view(data.dtype).as_strided(data.shape, data.stride())
            tensor.data = here.copy_(data)

    def lock(self) -> None:
        """Page-lock the buffer, if it is not. Raises RuntimeError where the system does not let it."""
        if self.tensors and not (self._unlock and self._unlock.alive):
            _register(self._buffer, self._stream)
            self._unlock = weakref.finalize(self, _unregister, self._buffer, self._stream)
            self._unlock.atexit = False

    def unlock(self) -> None:
        """Let the buffer be ordinary memory again, once nothing copies from it. The tensors stay there."""
        if self._unlock:
            self._unlock()


def laid_out(tensors: Iterable[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins in a slab of them, and the slab's bytes."""
    begins, n_bytes = [], 0
    for tensor in tensors:
        begins.append(-(-n_bytes // _ALIGNED) * _ALIGNED)
        n_bytes = begins[-1] + tensor.nbytes
    return begins, n_bytes


def _is_plain(tensor: torch.Tensor) -> bool:
    data = tensor.data
    if type(data) is not torch.Tensor or data.layout is not torch.strided or data.is_quantized:
        return False
    if data.device.type != "cpu" or data.numel() == 0:
        return False
    return torch.empty_like(data, device="meta").stride() == data.stride()  # dense, in any order of dimensions


def _pages(n_bytes: int) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _register(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    cudart: Any = torch.cuda.cudart()
    error = cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE)
    if int(error):
        _take_error(stream)
        raise RuntimeError(f"CUDA error: {cudart.cudaGetErrorString(error)}")


def _unregister(buffer: torch.Tensor, stream: torch.cuda.Stream) -> None:
    cudart: Any = torch.cuda.cudart()
    try:
        stream.synchronize()
    finally:
        error = cudart.cudaHostUnregister(buffer.data_ptr())
        if int(error):
            _take_error(stream)
            logger.warning("page-locked memory cannot be given back: %s", cudart.cudaGetErrorString(error))


def _take_error(stream: torch.cuda.Stream) -> None:
    """Launch something for CUDA's latest error to be raised at, and taken: it would be at the next kernel."""
    try:
        torch.ones(1, device=stream.device).add_(1)
    except RuntimeError as error:
        logger.debug("CUDA's latest error was %s", error)
