"""Islands: blocks, and parts outside of them, that run in fp32 inside a module that runs in half precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dtypes import DTYPES
from .findings import Anatomy
from .folding import bits_for, fold
from .learned import Learned
from .shells import replaced, with_forward
from .upcast import run_in_fp32


@dataclass(frozen=True)
class Attempt:
    """What is called in half precision."""

    run: Any  # a module, or another callable
    eager: Any  # the same, not compiled: layers can be watched in it
    bits: int = 0  # the stream is scaled by 2^-bits


def half_attempt(
    module: torch.nn.Module,
    anatomy: Anatomy,
    learned: Learned,
    dtype: str,
    *,
    compiled: Callable[[torch.nn.Module, int], torch.nn.Module] = lambda folded, _bits: folded,
    onloaded: Callable[[torch.nn.Module, torch.nn.Module], torch.nn.Module] = lambda shell, _folded: shell,
    tf32: bool = False,
) -> Attempt:
    """The module as what was learned asks for: folded, then compiled, then with islands, which leave what is compiled.

    compiled: from the folded module and the fold's bits to a shell of it with compiled blocks; remembered by whoever
        gives it, since islands change nothing about it.
    onloaded: from a shell, and the folded module that it is one of, to one that brings its weights to the device.
    Raises CannotFold.
    """
    peak = learned.stream_peak if anatomy.folds(dtype) else None
    bits = bits_for(peak) if peak is not None else 0
    folded = fold(module, anatomy.stream, bits) if bits and anatomy.stream else module
    shell = compiled(folded, bits)
    blocks = onloaded(folded, folded)
    eager = with_islands(blocks, learned.islands, dtype, tf32=tf32)
    run = eager
    if shell is not folded:
        run = with_islands(onloaded(shell, folded), learned.islands, dtype, source=blocks, tf32=tf32)
    return Attempt(run, eager, bits)


def with_islands(
    module: torch.nn.Module,
    names: Iterable[str],
    dtype: str,
    *,
    source: torch.nn.Module | None = None,
    tf32: bool = False,
) -> torch.nn.Module:
    """A shell of `module` in which the named submodules of `source` (itself by default) run in fp32.

    Their floating outputs are cast to `dtype`, and contiguous, as those of their neighbours are; one that does not fit
    is infinite there, for the guard to find.
    """
    origin = source or module

    def island(name: str) -> Callable[[torch.nn.Module], torch.nn.Module]:
        block = origin.get_submodule(name)
        return lambda _replaced: with_forward(block, _InFp32(block, DTYPES[dtype], tf32))

    found = {name: island(name) for name in names}
    return replaced(module, found) if found else module


class _InFp32:
    """A block's forward in fp32."""

    def __init__(self, block: torch.nn.Module, dtype: torch.dtype, tf32: bool):
        self._block = block
        self._dtype = dtype
        self._tf32 = tf32

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = run_in_fp32(self._block, *args, tf32=self._tf32, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._narrowed, made)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype, memory_format=torch.contiguous_format)
