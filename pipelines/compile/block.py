"""What stands in a denoiser in place of a block that is compiled, and what a run hears of it.

Every backend compiles when a block first meets a size. So it is here that progress is told, that sizes are limited,
and that 'auto' goes on to the next compiler where one does not work.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...precision.shallow_copy import with_forward
from ...precision.shared import PROCESS_GATE, SharedSetting
from ...trust.message import Message, joined
from ..errors import BackendUnavailable, is_interrupt
from ..pace import Pace

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
Run = Callable[..., Any]
Args = tuple[Any, ...]
KwArgs = dict[str, Any]
EAGER = "eager"
COMPILED_SIZES = 8  # as many as dynamo allows one piece of code
_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _oldest_first() -> Callable[[], None]:
    set_lru: Callable[[bool], None] = torch._C._dynamo.eval_frame._set_lru_cache  # pyright: ignore
    set_lru(False)
    return lambda: set_lru(True)


# Where several graphs fit a call, since one is for its size and another for all, dynamo takes the one that ran latest:
# the run that compiles would compute by one graph, and later ones by another. The oldest that fits is always the same.
OLDEST_GRAPH = SharedSetting(_oldest_first)


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


def graphs_compiled() -> int:
    """Return how many graphs dynamo compiled in this process so far. OneFlow compiles without it."""
    counters = _counters()
    return counters["stats"]["unique_graphs"] if counters else 0


def graphs_from_cache() -> int:
    """Return those whose code inductor found instead of compiling it, in this process so far."""
    counters = _counters()
    if not counters:
        return 0
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])


def _counters() -> Any:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo and dynamo.counters


@dataclass
class Compiler:
    """A backend, as it compiles one block after another."""

    name: str
    compile_block: Callable[[torch.nn.Module], Run]
    replaceable: bool  # where it fails, the next one takes its place
    blocks: list[Run] = field(default_factory=list)  # what it made of each
    met: list[set[Any]] = field(default_factory=list)  # the sizes at which each was called


class Compiling:
    """What the compiled blocks of one denoiser share.

    Where a compiler fails, at compiling or when a block is first called at a size, all blocks go on with the next one,
    also those that it had compiled. Not where a block fails uncompiled too: that is the model's error or its input's.

    Where as many sizes as `COMPILED_SIZES` had something compiled for them, blocks run uncompiled at sizes that are new
    to them. That limit is ours: dynamo's is lifted. It counts graphs for one piece of code, which blocks of several
    kinds share in a UNet, and falls back without a word.
    """

    def __init__(self, compilers: Iterator[Compiler], inside: Callable[[Any], Any] | None = None):
        self.given_up: list[str] = []  # why there is another compiler than the first
        self.sizes = 0  # that had something compiled for them
        self._compilers = compilers  # the one to begin with, then those to go on with, looked for when they are needed
        self._inside = inside  # makes of a block what is compiled
        self._originals: list[torch.nn.Module] = []
        self._in_use: Compiler  # from `compile` on
        self._swapping = threading.Lock()
        self._pace = Pace()
        self._at = -1  # index of the block that was called last
        self._anew = False  # the present call of the denoiser compiled something
        self._logged: set[str] = set()

    @property
    def backend(self) -> str:
        return self._in_use.name

    def in_place_of(self, block: torch.nn.Module) -> torch.nn.Module:
        """A shell of `block` that runs what is compiled of it."""
        index = len(self._originals)
        original = self._inside(block) if self._inside else block
        self._originals.append(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            compiler = self._in_use
            if compiler.name == EAGER:
                return compiler.blocks[index](*args, **kwargs)
            if index == 0:  # it is given slices of one tensor, whose strides would make a graph of its own for it
                args, kwargs = pytree.tree_map_only(torch.Tensor, _dense, (args, kwargs))
            self._count_sizes(index)
            size = tuple(tensor.shape for tensor in _tensors(args, kwargs))
            if size in compiler.met[index]:
                with OLDEST_GRAPH.held():
                    return compiler.blocks[index](*args, **kwargs)
            if why := self._limit():
                self._note(why)
                return original(*args, **kwargs)
            return self._first_call(compiler, index, size, args, kwargs)

        return with_forward(block, forward)

    def compile(self) -> None:
        """Compile all blocks, by the first compiler that does. Raises BackendUnavailable where none is left."""
        for compiler in self._compilers:
            try:
                compiler.blocks = [compiler.compile_block(block) for block in self._originals]
            except Exception as error:
                if _is_the_runs(error):
                    raise
                self._give_up(compiler, error)
                continue
            compiler.met = [set() for _ in compiler.blocks]
            self._in_use = compiler
            self.sizes, self._anew = 0, False
            return

    def _count_sizes(self, index: int) -> None:
        if index <= self._at:  # a call of the denoiser begins
            self.sizes += self._anew
            self._anew = False
        self._at = index

    def _limit(self) -> str:
        if self.sizes < COMPILED_SIZES:
            return ""
        full = Message("{} compiled for {} sizes, and no more: this size runs uncompiled.", self.backend, self.sizes)
        return full + " " + Message("'dynamic' on, in OneDiff Compile, makes one graph for all sizes.")

    def _first_call(self, compiler: Compiler, index: int, size: Any, args: Args, kwargs: KwArgs) -> Any:
        from torch._dynamo.utils import disable_cache_limit

        if listener := _listener.get():
            self._pace = self._pace if index else Pace()
            left = self._pace.left(index, len(self._originals))
            said = Message("{}: compiling block {} of {}", compiler.name, index + 1, len(self._originals))
            listener.progress(joined(" · ", filter(None, (said, left))))
        graphs = graphs_compiled()
        # a compiler that fails may have written into what it was given; what is expanded is not written to
        written = [each for each in _tensors(args, kwargs) if compiler.replaceable and 0 not in each.stride()]
        with torch.no_grad():
            before = [each.clone() for each in written]
        try:
            with PROCESS_GATE.exclusive(), disable_cache_limit(), OLDEST_GRAPH.held():
                made = compiler.blocks[index](*args, **kwargs)
        except Exception as error:
            if _is_the_runs(error):
                raise
            logger.debug("%s failed", compiler.name, exc_info=True)
            failed = error
        else:
            compiler.met[index].add(size)
            return made
        finally:
            self._anew |= graphs_compiled() > graphs
        with torch.no_grad():
            for tensor, copy in zip(written, before, strict=True):
                tensor.copy_(copy)
        made = self._originals[index](*args, **kwargs)  # raises what is not the compiler's
        with self._swapping:
            if compiler is self._in_use:  # and no other thread was here
                self._give_up(compiler, failed)
                self.compile()
        return made

    def _give_up(self, compiler: Compiler, error: Exception) -> None:
        failure = _in_words(error)
        if not compiler.replaceable:
            raise BackendUnavailable(
                "{} failed ({}). Choose another backend, or 'auto', which goes on with the next one.",
                compiler.name,
                failure,
            ) from error
        self.given_up.append(Message("{} failed ({})", compiler.name, failure))
        logger.warning("%s: going on without it", self.given_up[-1])

    def _note(self, line: str) -> None:
        if listener := _listener.get():
            listener.note(line)
        if line not in self._logged:
            logger.warning("%s", line)
            self._logged.add(line)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return it as it is where it is contiguous in some memory format, as with channels last; else a copy that is."""
    return tensor if any(tensor.is_contiguous(memory_format=layout) for layout in _LAYOUTS) else tensor.contiguous()


def _tensors(args: Args, kwargs: KwArgs) -> list[torch.Tensor]:
    """Of a call's arguments. Most are tensors or nothing, and need no walk through a nest, which takes its time."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _in_words(error: Exception) -> str:
    """On one line: its first, and the second where the first only leads up to it, as dynamo's does."""
    lines = str(error).strip().split("\n")
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_the_runs(error: Exception) -> bool:
    """What no other compiler would change: there is no memory, or somebody has interrupted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_interrupt(error)
