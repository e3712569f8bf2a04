"""Finds a network's residual stream by tracing one call: the layers that start it, and those that write to it.

Every call of PyTorch's functions is recorded, with what went in and what came out. Sums of two tensors of one size make
chains, through whatever only moves values about; the longest chains are the stream. What each of their sums adds is
followed back, through products and norms, to the layer that made it, a writer; a chain's beginning to the layer that
starts it.

Nothing is known of the network, so what is found has to be proved before it is used: in float32 it must change nothing,
and in half precision a stream far beyond fp16's range must come out right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .observe import floating
from .shells import replaced, with_forward
from .upcast import run_in_fp32
from .wide import LAYERS, CannotWiden, with_wide_stream

LEAST_SUMS = 3  # of a chain, to be a stream
GAIN = 2.0**20  # of writers, in the proof: it takes any stream far beyond fp16's range
AGREE = 1e-4  # relative, in float32
NEAR = 2e-2  # relative, of half precision with that gain: below what bf16 loses

_SUMS = frozenset({"add", "add_", "__add__", "__iadd__", "__radd__", "addcmul", "addcmul_", "sub", "__sub__"})
_PRODUCTS = frozenset({
    "mul", "mul_", "__mul__", "__imul__", "__rmul__", "div", "div_", "__truediv__", "true_divide", "tanh", "sigmoid",
})  # fmt: skip
_MOVES = frozenset({
    "dropout", "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "contiguous", "to",
    "float", "half", "bfloat16", "type", "type_as", "clone", "detach", "cat", "concat", "stack", "split", "chunk",
    "unbind", "split_with_sizes", "__getitem__", "__setitem__", "narrow", "select", "unsqueeze", "squeeze", "expand",
    "expand_as", "view_as", "repeat", "swapaxes", "pad", "index_select", "masked_fill", "where", "gather", "roll",
    "div", "div_", "__truediv__", "clip", "clamp", "clamp_", "nan_to_num", "nan_to_num_",
})  # fmt: skip
_NORMS = frozenset({"layer_norm", "rms_norm", "group_norm", "native_layer_norm"})
_LINEAR = frozenset({"linear", "conv1d", "conv2d", "conv3d"})
_SILENT = frozenset({"__get__", "__set__", "size", "dim", "stride", "is_floating_point", "numel", "__len__"})

Call = Callable[[torch.nn.Module], Any]


class NotFound(ValueError):
    """No stream was found, or what was found is not proved; the message says why."""


@dataclass(frozen=True)
class Found:
    """A stream, by module names."""

    starts: tuple[str, ...]
    writers: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all layers that have to be wide."""
        return tuple(dict.fromkeys((*self.starts, *self.writers)))


def find_stream(module: torch.nn.Module, call: Call, dtype: torch.dtype) -> Found:
    """The module's stream, proved.

    call: runs the module that it is given, which may be a shell of `module`, on a small input, and returns its output.
    dtype: half precision's, of the weights.

    Raises NotFound.
    """
    found = discover(module, call)
    prove(module, call, found, dtype)
    return found


def discover(module: torch.nn.Module, call: Call) -> Found:
    """The module's stream, as one call shows it. Raises NotFound."""
    graph = _traced(module, call)
    depths = _depths(graph)
    longest = max(depths, default=0)
    if longest < LEAST_SUMS:
        raise NotFound(f"no chain of {LEAST_SUMS} sums or more runs through it")
    starts: dict[str, None] = {}
    writers: dict[str, None] = {}
    seen: set[int] = set()
    for value in range(len(graph)):
        if depths[value] >= max(LEAST_SUMS, longest / 2):
            _follow(graph, depths, value, seen, starts, writers)
    for name in (*starts, *writers):
        if not isinstance(module.get_submodule(name), LAYERS):
            raise NotFound(f"'{name}' writes to the stream, and is neither a linear layer nor a convolution")
    if not writers:
        raise NotFound("no layer writes to the chain of sums in it")
    return Found(_everywhere(module, starts), _everywhere(module, writers))


def _everywhere(module: torch.nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """With the other names of modules that stand in several places."""
    wanted = {id(module.get_submodule(name)) for name in names}
    return tuple(name for name, part in module.named_modules(remove_duplicate=False) if id(part) in wanted)


def prove(module: torch.nn.Module, call: Call, found: Found, dtype: torch.dtype) -> None:
    """Raises NotFound where the module with a wide stream is not the module."""
    exact = floating(run_in_fp32(call, module))
    hot = floating(run_in_fp32(call, _gained(module, found.writers)))
    try:
        shell = with_wide_stream(module, found.names, dtype)
        same = floating(run_in_fp32(call, shell))
        half = floating(call(_gained(shell, found.writers)))
    except CannotWiden as error:
        raise NotFound(str(error)) from None
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotFound(f"it does not run with a wide stream: {str(error).strip().splitlines()[0]}") from error
    if not (apart := _apart(same, exact)) <= AGREE:
        raise NotFound(f"in float32 a wide stream changes the result by {apart:.2g}")
    if not (apart := _apart(half, hot)) <= NEAR:
        raise NotFound(
            f"beyond fp16's range a wide stream comes out {apart:.2g} wrong: a layer reads it without a norm"
        )


def _gained(module: torch.nn.Module, writers: Iterable[str]) -> torch.nn.Module:
    def louder(layer: torch.nn.Module) -> torch.nn.Module:
        return with_forward(layer, lambda *args, **kwargs: layer(*args, **kwargs) * GAIN)

    return replaced(module, dict.fromkeys(writers, louder))


def _apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The relative difference; NaN where something is not finite."""
    if [each.shape for each in found] != [each.shape for each in expected]:
        return float("inf")
    gone = sum((a.double() - b.double()).square().sum() for a, b in zip(found, expected, strict=True))
    whole = sum(b.double().square().sum() for b in expected)
    return float((gone / whole).sqrt()) if whole else float("inf")


@dataclass(frozen=True)
class _Value:
    """What one call put out."""

    function: str  # "" where it came from outside
    inputs: tuple[int, ...]  # values, in order
    size: int  # elements
    module: str  # the innermost that was running


class _Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[_Value] = []
        self.running: list[str] = []  # modules, the innermost last
        self._latest: dict[int, int] = {}  # tensor → value
        self._alive: list[torch.Tensor] = []  # another tensor would get its place in memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _SILENT:
            return func(*args, **kwargs)
        given = [self._value(tensor) for tensor in _floats((args, kwargs))]
        made = func(*args, **kwargs)
        outputs = _floats(args[0]) if name == "__setitem__" else _floats(made)
        for tensor in outputs:
            self._add(tensor, _Value(name, tuple(given), tensor.numel(), self.running[-1] if self.running else ""))
            base = tensor._base
            if base is not None and id(base) in self._latest and any(tensor is arg for arg in args):
                # it was written to in place, and what it is a view of with it
                inputs = self._latest[id(base)], self._latest[id(tensor)]
                self._add(base, _Value("__setitem__", inputs, base.numel(), ""))
        return made

    def _value(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._latest:
            self._add(tensor, _Value("", (), tensor.numel(), ""))
        return self._latest[id(tensor)]

    def _add(self, tensor: torch.Tensor, value: _Value) -> None:
        self._latest[id(tensor)] = len(self.values)
        self.values.append(value)
        self._alive.append(tensor)


def _floats(tree: Any) -> list[torch.Tensor]:
    return [t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _traced(module: torch.nn.Module, call: Call) -> list[_Value]:
    recorder, names = _Recorder(), {id(part): name for name, part in module.named_modules()}

    here = threading.get_ident()  # another thread may run the same module

    def enter(part: torch.nn.Module, _args: Any) -> None:
        if threading.get_ident() == here:
            recorder.running.append(names[id(part)])

    def leave(_part: torch.nn.Module, _args: Any, _made: Any) -> None:
        if threading.get_ident() == here:
            recorder.running.pop()

    handles = [part.register_forward_pre_hook(enter) for part in module.modules()]
    handles += [part.register_forward_hook(leave, always_call=True) for part in module.modules()]
    try:
        with torch.inference_mode(False), torch.no_grad(), recorder:
            call(module)
    finally:
        for handle in handles:
            handle.remove()
    return recorder.values


def _depths(graph: list[_Value]) -> list[int]:
    """How many sums of two tensors of a value's own size lead to it, through nothing but moves."""
    depths: list[int] = []
    for value in graph:
        if value.function in _SUMS:
            terms = _terms(graph, value)
            depths.append(max((depths[term] for term in terms), default=0) + (len(terms) > 1))
        elif value.function in _MOVES:
            depths.append(max((depths[each] for each in value.inputs), default=0))
        else:
            depths.append(0)
    return depths


def _terms(graph: list[_Value], value: _Value) -> list[int]:
    """What is summed, without what is spread over it: a bias, a shift."""
    terms = [each for each in value.inputs if graph[each].size == value.size]
    return list(dict.fromkeys(terms))


def _follow(
    graph: list[_Value],
    depths: list[int],
    end: int,
    seen: set[int],
    starts: dict[str, None],
    writers: dict[str, None],
) -> None:
    """Along the stream from a value in it to its start. seen: where others have been."""

    def before(index: int) -> Iterable[int]:
        value = graph[index]
        if value.function in _SUMS:
            terms = sorted(_terms(graph, value), key=lambda term: -depths[term])
            for branch in terms[1:]:
                _made_by(graph, branch, writers)
            return terms[:1]
        if value.function in _MOVES:
            return value.inputs
        _made_by(graph, index, starts)
        return ()

    _back(end, before, seen)


def _made_by(graph: list[_Value], end: int, layers: dict[str, None]) -> None:
    """The linear layers and convolutions behind a value, through products, sums, norms and moves."""

    def before(index: int) -> Iterable[int]:
        value = graph[index]
        if value.function in _LINEAR:
            layers[value.module] = None
        if value.function in _NORMS:
            return value.inputs[:1]
        if value.function in _PRODUCTS | _SUMS:
            return [each for each in value.inputs if graph[each].size >= value.size]
        return value.inputs if value.function in _MOVES else ()

    _back(end, before, set())


def _back(end: int, before: Callable[[int], Iterable[int]], seen: set[int]) -> None:
    """From value to value, each once. before: the values that one leads to."""
    left = [end]
    while left:
        index = left.pop()
        if index not in seen:
            seen.add(index)
            left += before(index)
