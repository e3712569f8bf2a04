"""Peaks of a module's layers, by hooks that exist for one call, in one thread."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .overrides import Peak

SAMPLED = 256  # rows of a layer's input that are sampled: half evenly spaced, half the largest

# all-reduce: float32 values [n] of this process → max |x| over all processes, NaN where any has NaN
Agree = Callable[[torch.Tensor], torch.Tensor]


def alone(values: torch.Tensor) -> torch.Tensor:
    """The all-reduce of a single process: returns its values."""
    return values


def floating(tree: Any) -> list[torch.Tensor]:
    """Return the non-empty floating tensors of a nest of tuples, lists and dicts."""
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()]


def non_finite(tensor: torch.Tensor) -> int:
    """Count the values that are not finite. fp8 is cast to float32: PyTorch has no isfinite for it."""
    tensor = tensor.detach()
    return int((~torch.isfinite(tensor.float() if tensor.itemsize < 2 else tensor)).sum())


def broken_weight(module: torch.nn.Module) -> tuple[str, int, int] | None:
    """Return the name of a weight or buffer with non-finite values, their number, and the number of all its values;
    None if all are finite."""
    for name, weight in (*module.named_parameters(), *module.named_buffers()):
        if broken := non_finite(weight) if weight.is_floating_point() else 0:
            return name, broken, weight.numel()
    return None


def largest(tree: Any) -> torch.Tensor:
    """Return max |x| over all floating tensors, as a float32 scalar on their device; 0 where there are none."""
    found = [bound.float() for tensor in floating(tree) for bound in torch.aminmax(_measurable(tensor.detach()))]
    return torch.stack([bound.to(found[0].device) for bound in found]).abs().amax() if found else torch.zeros(())


def _measurable(tensor: torch.Tensor) -> torch.Tensor:
    """Cast 8-bit floats, as an fp8 embedding returns them, to float32: PyTorch has no aminmax for them."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def difference(made: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    """Return the error of outputs as a share of the right ones' norm. float32 []; inf if one is not finite."""
    off = torch.stack([(a.float() - b.float()).square().sum() for a, b in zip(made, right, strict=True)]).sum()
    norm = torch.stack([b.float().square().sum() for b in right]).sum()
    return (off / norm.clamp(min=torch.finfo(torch.float32).tiny)).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


def sampled(rows: torch.Tensor) -> torch.Tensor:
    """Return a sample of rows: evenly spaced ones, and as many with the largest norms, which overflow first."""
    n = len(rows)
    if n <= SAMPLED:
        return rows
    spaced = torch.arange(SAMPLED // 2, device=rows.device) * n // (SAMPLED // 2)
    largest = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).topk(SAMPLED // 2).indices
    return rows[torch.cat([spaced, largest])]


def leaf_peaks(
    module: torch.nn.Module, call: Callable[[], Any], also: Iterable[str] = (), agree: Agree = alone
) -> dict[str, Peak]:
    """Return the peaks of each layer (a module without children) that runs while `call` does, over all of the layer's
    calls, in the order in which the layers ran first.

    also: names of other modules to watch.
    """
    seen = _watched(leaves(module) | {name: module.get_submodule(name) for name in also}, call, agree)
    peaks: dict[str, Peak] = {}
    for name, peak in seen:
        peaks[name] = peaks.get(name, peak).widened(peak)
    return peaks


def first_broken(
    module: torch.nn.Module, call: Callable[[], Any], limit: float = math.inf, agree: Agree = alone
) -> str | None:
    """Return the name of the first module whose output, and not its input, has a NaN or an |x| of `limit` or more while
    `call` runs. "" is `module` itself; None if there is none."""
    seen = _watched(dict(module.named_modules()), call, agree)
    broken = [(name, not peak.input < limit) for name, peak in seen if not peak.output < limit]
    here = (name for name, given_broken in broken if not given_broken)
    return next(here, broken[0][0] if broken else None)


def block_names(module: torch.nn.Module, parts: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a module's blocks, in the order in which they are called.

    parts: names of blocks, or of lists of blocks.
    """
    names: list[str] = []
    for part in parts:
        found = module.get_submodule(part)
        is_list = isinstance(found, torch.nn.ModuleList)
        names += [f"{part}.{name}" for name, _ in found.named_children()] if is_list else [part]
    return tuple(names)


def _watched(modules: Mapping[str, torch.nn.Module], call: Callable[[], Any], agree: Agree) -> list[tuple[str, Peak]]:
    """Return the peaks of each call of the modules while `call` runs, in the order in which the calls end. They are
    read in one transfer."""
    names: list[str] = []
    peaks: list[torch.Tensor] = []

    def see(name: str, _layer: torch.nn.Module, given: Any, made: Any) -> None:
        names.append(name)
        output = largest(made)
        peaks.append(torch.stack([largest(given).to(output.device), output]))

    with hooked(modules, see):
        call()
    numbers: list[list[float]] = []
    if peaks:
        found = torch.stack([peak.to(peaks[0].device) for peak in peaks])
        numbers = agree(found.flatten()).view(-1, 2).tolist()
    return [(name, Peak(*pair)) for name, pair in zip(names, numbers, strict=True)]


@contextmanager
def hooked(
    layers: Mapping[str, torch.nn.Module], see: Callable[[str, torch.nn.Module, Any, Any], None]
) -> Generator[None]:
    """Inside, call `see(name, layer, input, output)` after each call of the layers in this thread."""
    here = threading.get_ident()  # another thread may run the same module

    def hook_for(name: str) -> Callable[..., None]:
        def hook(layer: torch.nn.Module, args: Any, *rest: Any) -> None:
            if threading.get_ident() == here:  # in others, the keywords may be missing while a hook comes or goes
                kwargs, made = rest
                with torch._C.DisableTorchFunction():  # the fp32 rerun's mode would copy the tensors
                    see(name, layer, (*args, *kwargs.values()), made)

        return hook

    handles = [layer.register_forward_hook(hook_for(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def leaves(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Map the names of a module's layers (modules without children) to the layers. Without activations that are used in
    several places: one name would stand for all of them."""
    places = Counter(id(part) for _, part in module.named_modules(remove_duplicate=False))
    layers = {name: layer for name, layer in module.named_modules() if not has_children(layer)}
    return {
        name: each for name, each in layers.items() if places[id(each)] == 1 or any(True for _ in each.parameters())
    }


def has_children(module: torch.nn.Module) -> bool:
    """Return whether a module has children. `bool(module)` does not tell: it asks for a length, which a compiled module
    lacks."""
    return next(module.children(), None) is not None


def error_of(made: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the error of [rows, features]: the root mean square of the rows' relative errors, so that a large row
    hides no other. float32 []; inf if a value is not finite and should be."""
    whole = right.isfinite().all(dim=1, keepdim=True)
    off = torch.linalg.vector_norm(torch.where(whole, made - right, 0.0), dim=1)
    norms = torch.linalg.vector_norm(torch.where(whole, right, 0.0), dim=1)
    least = (norms.median() / 100).clamp(min=torch.finfo(torch.float32).tiny)  # rows that cancel to less do not count
    return (off / norms.maximum(least)).square().mean().sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)
