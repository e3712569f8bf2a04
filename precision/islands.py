"""Islands: blocks, and parts outside of them, that run in fp32, or with every layer wide, inside a module that runs in
half precision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .dtypes import DTYPES
from .findings import Anatomy
from .fp16_sums import LinearSums
from .half_products import HalfProducts, run_with_half_products
from .learned import EVERYTHING, STREAM, Learned
from .quantised import QuantisedLinears
from .shells import Make, replaced, with_forward
from .streams import Stream
from .sums import Sums
from .upcast import run_in_fp32
from .wide import with_wide_stream


@dataclass(frozen=True)
class Attempt:
    """What is called in half precision."""

    run: Any  # a module, or another callable
    eager: Any  # the same, but not compiled: layers can be watched in it
    wide: bool = False  # its residual stream is float32
    everything: bool = False  # all of it is float32, but for products that are scaled to fit
    quantised: tuple[str, ...] = ()  # names of its layers that are quantised
    sums: Sums | None = None  # what its linear layers accumulate in; None where all of them do so in fp32
    probe: Callable[[Callable[[], Any]], Sums] | None = None  # finds that out, given one call of `eager`
    measure: Callable[[Callable[[], Any]], None] | None = None  # finds out what may be quantised, by the same

    @property
    def in_words(self) -> str:
        """What of the attempt is float32; "" where nothing is."""
        return EVERYTHING if self.everything else STREAM if self.wide else ""


def half_attempt(
    module: torch.nn.Module,
    anatomy: Anatomy,
    learned: Learned,
    dtype: str,
    *,
    wide: bool = False,
    everything: bool = False,
    quantised: QuantisedLinears | None = None,
    sums: LinearSums | None = None,
    compiled: Callable[[torch.nn.Module, bool], torch.nn.Module] = lambda shell, _wide: shell,
    onloaded: Callable[[torch.nn.Module, torch.nn.Module], torch.nn.Module] = lambda shell, _eager: shell,
    device: torch.device | None = None,
    tf32: bool = False,
) -> Attempt:
    """Build the attempt that the plan and what was learned ask for: the module with sums in fp16, then with a wide
    stream, then quantised, then compiled, then with islands, which leave what is compiled, and are not quantised.

    wide, everything: the plan's, which hold whatever was learned.
    quantised: the module's quantised layers, where the plan asks for them. Until their errors are measured, `eager`
        computes in half precision and measures them, and nothing is compiled.
    sums: its linear layers, where the plan has those accumulate in fp16 that are right with it. Until that is measured,
        nothing is compiled.
    compiled: makes a shell with compiled blocks, given the module and whether its stream is wide. Whoever passes it
        remembers the shell, since islands change nothing about it.
    onloaded: makes a shell that brings its weights to the device, given a shell and the eager module that it is one of.
    device: where it computes, if its weights are elsewhere until they are needed.

    Raises CannotWiden where the stream is to be wide and a layer of it cannot be.
    """
    if dtype == "fp16" and (everything or learned.everything):
        products = HalfProducts(DTYPES[dtype])
        run = partial(run_with_half_products, onloaded(module, module), products=products, tf32=tf32)
        return Attempt(run, run, everything=True)
    wide = anatomy.widens(dtype) and (wide or learned.wide)
    stream = anatomy.stream if wide else None
    base = sums.shell(module, learned.sums) if sums else module
    half = _with_wide_stream(base, stream, DTYPES[dtype], device) if stream else base
    made = "fp32" if wide else dtype
    blocks = onloaded(half, half)
    left = {*learned.unquantised, *quantised.left} if quantised else ()
    names = tuple(name for name in quantised.names if name not in left) if quantised else ()
    fewer = quantised.shell(half, left) if quantised and names else half
    watched, measure = quantised.measuring(half) if quantised and names and not quantised.errors else (fewer, None)
    probe = sums.probed if sums and learned.sums is None else None
    shell = fewer if probe or measure else compiled(fewer, wide)
    eager = with_islands(onloaded(watched, half), learned, made, source=blocks, tf32=tf32)
    run = eager
    if shell is not watched:
        run = with_islands(onloaded(shell, half), learned, made, source=blocks, tf32=tf32)
    return Attempt(run, eager, wide, quantised=names, sums=learned.sums if sums else None, probe=probe, measure=measure)


def _with_wide_stream(
    module: torch.nn.Module, stream: Stream, dtype: torch.dtype, device: torch.device | None
) -> torch.nn.Module:
    writers, readers = stream.writer_names(module), stream.reader_names(module)
    return with_wide_stream(module, writers, dtype, readers=readers, device=device)


def with_islands(
    module: torch.nn.Module,
    learned: Learned,
    dtype: str,
    *,
    source: torch.nn.Module | None = None,
    tf32: bool = False,
) -> torch.nn.Module:
    """Return a shell of `module` in which some submodules of `source` (`module` by default) run in fp32, or wide: those
    for which that was learned.

    Their floating outputs are cast to `dtype`, and contiguous, as those of their neighbours are. A value that does not
    fit is infinite there, for the guard to find.
    """
    origin = source or module

    def island(name: str, run: Callable[..., Any]) -> Make:
        block = origin.get_submodule(name)
        return lambda _replaced: with_forward(block, _Island(partial(run, block, tf32=tf32), DTYPES[dtype]))

    wide = partial(run_with_half_products, products=HalfProducts(torch.float16))
    found = {name: island(name, wide) for name in learned.wide_parts}
    found |= {name: island(name, run_in_fp32) for name in learned.islands}
    return replaced(module, found) if found else module


class _Island:
    """A block's forward, which `run` computes in float32. Its output is cast to its neighbours' dtype."""

    def __init__(self, run: Callable[..., Any], dtype: torch.dtype):
        self._run = run
        self._dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._run(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self._narrowed, made)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(self._dtype, memory_format=torch.contiguous_format)
