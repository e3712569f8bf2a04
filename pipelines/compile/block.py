"""The modules that replace a denoiser's blocks and run their compiled code, and the progress messages for the run.

Every backend compiles when a block first meets a size. So this module reports progress, limits the number of sizes,
and has 'auto' fall back to the next compiler if one fails.
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

from ...precision.process_state import PROCESS_GATE, SharedSetting
from ...precision.shallow_copy import with_forward
from ...trust.message import Message, joined
from ..errors import BackendUnavailable, is_interrupt
from ..time_left import Pace

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
Run = Callable[..., Any]
Args = tuple[Any, ...]
KwArgs = dict[str, Any]
EAGER = "eager"
COMPILED_SIZES = 8  # limit of sizes, as dynamo's for one code object
_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def _oldest_first() -> Callable[[], None]:
    set_lru: Callable[[bool], None] = torch._C._dynamo.eval_frame._set_lru_cache  # pyright: ignore
    set_lru(False)
    return lambda: set_lru(True)


# If several graphs fit a call (one for its size, one for all sizes), dynamo takes the one that ran last: the run that
# compiles would use one graph, and later runs the other. The oldest fitting graph is always the same.
OLDEST_GRAPH = SharedSetting(_oldest_first)


@dataclass(frozen=True)
class _Listener:
    progress: Tell
    note: Tell


_listener: ContextVar[_Listener | None] = ContextVar("onediff_guard_compiling", default=None)


@contextmanager
def listening(progress: Tell, note: Tell) -> Generator[None]:
    """Have blocks call `progress` and `note` inside. progress: gets a line before each block is compiled; may raise,
    to interrupt. note: gets lines for the report, one per event."""
    token = _listener.set(_Listener(progress, note))
    try:
        yield
    finally:
        _listener.reset(token)


def graphs_compiled() -> int:
    """Return the number of graphs that dynamo compiled in this process so far. OneFlow's are not counted."""
    counters = _counters()
    return counters["stats"]["unique_graphs"] if counters else 0


def graphs_from_cache() -> int:
    """Return the number of graphs in this process so far whose code inductor found in its cache."""
    counters = _counters()
    if not counters:
        return 0
    return max(counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"])


def _counters() -> Any:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo and dynamo.counters


@dataclass
class Compiler:
    """A backend that compiles one block after another."""

    name: str
    compile_block: Callable[[torch.nn.Module], Run]
    replaceable: bool  # if it fails, the next compiler replaces it
    blocks: list[Run] = field(default_factory=list)  # the compiled blocks
    met: list[set[Any]] = field(default_factory=list)  # for each block, the sizes at which it was called


class Compiling:
    """The state that the compiled blocks of one denoiser share.

    If a compiler fails, while compiling or at a block's first call at a size, all blocks switch to the next compiler,
    compiled ones too. If the block fails uncompiled too, the error is the model's or its input's, and is raised.

    After `COMPILED_SIZES` sizes, blocks run uncompiled at further sizes. That limit is ours. Dynamo's is lifted: it
    counts graphs of one code object, which a UNet's blocks of several kinds share, and it falls back silently.
    """

    def __init__(self, compilers: Iterator[Compiler], inside: Callable[[Any], Any] | None = None):
        self.given_up: list[str] = []  # why earlier compilers were replaced
        self.sizes = 0  # number of sizes with new graphs
        self._compilers = compilers  # the first, then its fallbacks, searched when needed
        self._inside = inside  # block → the module that is compiled
        self._originals: list[torch.nn.Module] = []
        self._in_use: Compiler  # set by `compile`
        self._swapping = threading.Lock()
        self._pace = Pace()
        self._at = -1  # index of the block that was called last
        self._anew = False  # the current call of the denoiser compiled something
        self._logged: set[str] = set()

    @property
    def backend(self) -> str:
        return self._in_use.name

    def in_place_of(self, block: torch.nn.Module) -> torch.nn.Module:
        """Return a shallow copy of `block` that runs its compiled code."""
        index = len(self._originals)
        original = self._inside(block) if self._inside else block
        self._originals.append(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            compiler = self._in_use
            if compiler.name == EAGER:
                return compiler.blocks[index](*args, **kwargs)
            if index == 0:  # its inputs are slices of one tensor, whose strides would need a separate graph
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
        """Compile all blocks with the first compiler that works. Raises BackendUnavailable if a named one fails."""
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
        if index <= self._at:  # a new call of the denoiser
            self.sizes += self._anew
            self._anew = False
        self._at = index

    def _limit(self) -> str:
        if self.sizes < COMPILED_SIZES:
            return ""
        full = Message("{} reached its limit of {} sizes: this size runs uncompiled.", self.backend, self.sizes)
        return full + " " + Message("Set 'dynamic' to on in OneDiff Compile: one graph then serves all sizes.")

    def _first_call(self, compiler: Compiler, index: int, size: Any, args: Args, kwargs: KwArgs) -> Any:
        from torch._dynamo.utils import disable_cache_limit

        if listener := _listener.get():
            self._pace = self._pace if index else Pace()
            left = self._pace.left(index, len(self._originals))
            said = Message("{}: compiling block {} of {}", compiler.name, index + 1, len(self._originals))
            listener.progress(joined(" · ", filter(None, (said, left))))
        graphs = graphs_compiled()
        # a compiler that fails may have written to its inputs; expanded tensors (stride 0) cannot be written to
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
        made = self._originals[index](*args, **kwargs)  # raises if the error is not the compiler's
        with self._swapping:
            if compiler is self._in_use:  # unless another thread has replaced it
                self._give_up(compiler, failed)
                self.compile()
        return made

    def _give_up(self, compiler: Compiler, error: Exception) -> None:
        failure = _in_words(error)
        if not compiler.replaceable:
            raise BackendUnavailable(
                "{} failed ({}). Choose another backend, or 'auto', which then tries the next one.",
                compiler.name,
                failure,
            ) from error
        self.given_up.append(Message("{} failed ({})", compiler.name, failure))
        logger.warning("%s: continuing without it", self.given_up[-1])

    def _note(self, line: str) -> None:
        if listener := _listener.get():
            listener.note(line)
        if line not in self._logged:
            logger.warning("%s", line)
            self._logged.add(line)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor if it is contiguous in some memory format (such as channels last), else a contiguous copy."""
    return tensor if any(tensor.is_contiguous(memory_format=layout) for layout in _LAYOUTS) else tensor.contiguous()


def _tensors(args: Args, kwargs: KwArgs) -> list[torch.Tensor]:
    """Return the tensors in a call's arguments. Only tuples, lists and dicts need pytree, which is slow."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list, dict)):
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _in_words(error: Exception) -> str:
    """Return an error on one line: its first line, and the second if the first ends with a colon, as dynamo's does."""
    lines = str(error).strip().split("\n")
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _is_the_runs(error: Exception) -> bool:
    """Return whether another compiler would not help: memory ran out, or the user interrupted."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_interrupt(error)
