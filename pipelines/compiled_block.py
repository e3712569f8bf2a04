"""What stands in a denoiser in place of a block that is compiled, and what a run hears of it.

Every backend compiles when a block first meets a size. So it is here that progress is told, that sizes are limited,
and that 'auto' goes on without a compiler that does not work.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..precision.shells import with_forward

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
COMPILED_SIZES = 8  # as many as dynamo allows one piece of code


def graphs_compiled() -> int:
    """By dynamo, in this process so far. OneFlow compiles without it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


@dataclass(frozen=True)
class _Listener:
    progress: Tell
    note: Tell


_listener: ContextVar[_Listener | None] = ContextVar("onediff_guard_compiling", default=None)


@contextmanager
def listening(progress: Tell, note: Tell) -> Generator[None]:
    """progress: told which block is being compiled; may raise, to interrupt. note: told what the report should say, as
    often as it happens."""
    token = _listener.set(_Listener(progress, note))
    try:
        yield
    finally:
        _listener.reset(token)


@dataclass
class Compiling:
    """What the compiled blocks of one denoiser share.

    Where as many sizes as `COMPILED_SIZES` had something compiled for them, blocks run uncompiled at sizes that are new
    to them. That limit is ours: dynamo's is lifted. It counts graphs for one piece of code, which blocks of several
    kinds share in a UNet, and falls back without a word.
    """

    backend: str
    falls_back: bool  # to running uncompiled, where the compiler turns out not to work
    blocks: int = 0
    sizes: int = 0  # that had something compiled for them
    _broken: str = ""  # why nothing is compiled any more
    _at: int = 0  # number of the block that was called last
    _anew: bool = False  # the present call of the denoiser compiled something
    _logged: set[str] = field(default_factory=set)

    def in_place_of(self, block: torch.nn.Module, compiled: Callable[..., Any]) -> torch.nn.Module:
        """A shell of `block` that runs what was compiled of it."""
        self.blocks += 1
        number = self.blocks
        met: set[Any] = set()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if number == 1:  # it is given slices of one tensor, whose strides would make a graph of its own for it
                args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
            self._count_sizes(number)
            size = tuple(t.shape for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
            if size in met and not self._broken:
                return compiled(*args, **kwargs)
            if why := self._broken or self._limit():
                self._note(why)
                return block(*args, **kwargs)
            made = self._compile(number, block, compiled, args, kwargs)
            met.add(size)
            return made

        return with_forward(block, forward)

    def _count_sizes(self, number: int) -> None:
        if number <= self._at:  # a call of the denoiser begins
            self.sizes += self._anew
            self._anew = False
        self._at = number

    def _limit(self) -> str:
        if self.sizes < COMPILED_SIZES:
            return ""
        return (
            f"{self.backend} compiled for {self.sizes} sizes, and no more: this size runs uncompiled. 'dynamic' on, in "
            "OneDiff Compile, makes one graph for all sizes"
        )

    def _compile(self, number: int, block: Any, compiled: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from torch._dynamo.exc import TorchDynamoException
        from torch._dynamo.utils import disable_cache_limit

        if listener := _listener.get():
            listener.progress(f"{self.backend}: compiling block {number} of {self.blocks}")
        graphs = graphs_compiled()
        try:
            with disable_cache_limit():
                return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if not self.falls_back:
                raise
            first_line = str(error).strip().split("\n", 1)[0]
            self._broken = f"{self.backend} could not compile ({first_line}); running without it"
            self._note(self._broken)
            return block(*args, **kwargs)
        finally:
            self._anew |= graphs_compiled() > graphs

    def _note(self, line: str) -> None:
        if listener := _listener.get():
            listener.note(line)
        if line not in self._logged:
            logger.warning("%s", line)
            self._logged.add(line)
