"""Snapshots of all state that a call may change, so that a failed call can be undone and repeated.

A call may write to its arguments, to lists, dicts, objects and buffers that its modules keep, and it draws random
numbers. A walk from the arguments and modules finds what to restore. It goes by identity, so cycles do no harm.
Parameters are never copied, and PyTorch's own layers are skipped.
"""

from __future__ import annotations

import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from .dtypes import HALF_DTYPES

COPIED = 2**29  # most bytes of tensors that a snapshot copies. Of others it notices only that they changed
_ENTRIES = 200_000  # most entries of containers that a snapshot visits
_COPIED_IN_FUNCTIONS = 2**25  # most bytes of tensors that it copies of those that functions keep
_OWN = f"{__name__.rpartition('.precision.')[0]}."  # this package: guards and reports are not a model's state
_FOREIGN = ("torch.", "threading.", "queue.", "concurrent.", "asyncio.", "logging.", "weakref.", "accelerate.", _OWN)
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, slice, Enum, type, torch.nn.Parameter),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_TORCH = frozenset(vars(torch.nn.Module()))  # torch.nn.Module's own attributes: parameters, hooks, children
_ABSENT: Any = object()
_AS_IT_IS = torch._C.DisableTorchFunction  # leaves the fp32 rerun's mode, in which half tensors look like float32
Path = tuple[Any, ...]  # the number of a root, then keys and attribute names
_Look = Callable[[Any, Any, Path], Iterable[tuple[Any, Any]]]


class _Held(NamedTuple):
    """A container and its items: by key, by attribute name, or in order."""

    container: Any
    items: dict[Any, Any] | list[Any]
    path: Path


@dataclass
class _Reachable:
    """All mutable objects that can be reached from some roots."""

    opaque: tuple[str, ...]
    on_meta: bool = False  # whether tensors on "meta" count too
    functions: list[tuple[Any, Path]] | None = None  # functions found, to be walked later; None: functions are skipped
    _in_functions: bool = False
    held: dict[int, _Held] = field(default_factory=dict)
    tensors: dict[int, tuple[torch.Tensor, Path]] = field(default_factory=dict)
    generators: dict[int, Any] = field(default_factory=dict)
    _kinds: dict[type, _Look | None] = field(default_factory=dict)  # unbound methods: a cycle would keep all alive
    _left: int = _ENTRIES

    def walk(self, roots: Iterable[Any]) -> None:
        """Visit all that can be reached from the roots without passing through functions."""
        self._walk([(root, (number,)) for number, root in enumerate(roots)])

    def walk_functions(self) -> None:
        """Visit all that can be reached through the functions found so far."""
        self._in_functions = True
        self._walk(self.functions or [])

    def _walk(self, ahead: list[tuple[Any, Path]]) -> None:
        ahead = ahead[::-1]
        while ahead:
            value, path = ahead.pop()
            kind = type(value)
            look = self._kinds[kind] if kind in self._kinds else self._kinds.setdefault(kind, self._visitor_of(kind))
            if look is None or id(value) in self.held or id(value) in self.tensors:
                continue
            for key, inside in look(self, value, path):
                if self._kinds.get(type(inside), _ABSENT) is not None:
                    ahead.append((inside, (*path, key)))

    def _visitor_of(self, kind: type) -> _Look | None:
        """Return the method that visits values of a class; None if they cannot change, or are no state of a call."""
        if self.functions is not None and kind in _IN_FUNCTIONS:
            return _IN_FUNCTIONS[kind]
        if issubclass(kind, _LEAVES):
            return None
        if issubclass(kind, torch.Tensor):
            return None if hasattr(kind, "__tensor_flatten__") else _Reachable._tensor  # of those, only weights
        if issubclass(kind, torch.nn.Module):
            return _Reachable._module
        numpy: Any = sys.modules.get("numpy.random")
        if issubclass(kind, (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy else ()))):
            return _Reachable._generator
        if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
            return _Reachable._array
        if issubclass(kind, dict):
            return _Reachable._dict
        if issubclass(kind, (list, deque, set, bytearray)):
            return _Reachable._items
        if issubclass(kind, (tuple, frozenset)):
            return lambda _found, value, _path: enumerate(value)
        if issubclass(kind, partial):
            return lambda _found, value, _path: enumerate((value.func, value.args, value.keywords))
        if f"{kind.__module__}.".startswith(_FOREIGN):
            return None
        if any(f"{each.__module__}.".startswith(self.opaque) for each in kind.__mro__):  # another pack's class, too
            return None
        return _Reachable._object

    def _tensor(self, value: torch.Tensor, path: Path) -> Iterable[tuple[Any, Any]]:
        # others cannot be copied: sparse and nested tensors, and PyTorch's own quantised kinds, which are weights
        strided = value.layout is torch.strided and not value.is_nested and not value.is_quantized
        if strided and (value.device.type != "meta" or self.on_meta):
            self.tensors[id(value)] = value, path
        return ()

    def _array(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        # without a version counter, since NumPy's writes would not change it
        with suppress(TypeError, ValueError), torch.inference_mode():  # of objects, or of strides that no tensor has
            if value.flags.writeable:
                self.tensors[id(value)] = torch.from_numpy(value), path
        return ()

    def _generator(self, value: Any, _path: Path) -> Iterable[tuple[Any, Any]]:
        self.generators[id(value)] = value
        return ()

    def _function(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        if f"{value.__module__}.".startswith((*_FOREIGN, *self.opaque)) or self._defer(value, path):
            return ()
        return zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)

    def _method(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        of = value.__self__
        if not self._defer(value, path):
            yield "function", value.__func__
            if not isinstance(of, torch.nn.Module):  # a network is a root of its own
                yield "self", of

    def _defer(self, function: Any, path: Path) -> bool:
        if not self._in_functions and self.functions is not None:
            self.functions.append((function, path))
        return not self._in_functions

    def _cell(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        try:
            held = {_CONTENTS: value.cell_contents}
        except ValueError:  # it is empty
            held = {}
        inside = self._hold(value, held, path)
        return () if isinstance(held.get(_CONTENTS), torch.nn.Module) else inside

    def _dict(self, value: dict[Any, Any], path: Path) -> Iterable[tuple[Any, Any]]:
        return self._hold(value, dict(value), path)

    def _items(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        return self._hold(value, [*value], path)

    def _object(self, value: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        names = (name for name in _slots(type(value)) if hasattr(value, name))
        slots = {name: getattr(value, name) for name in names}
        if not slots:
            return self._hold(vars(value), dict(vars(value)), path) if hasattr(value, "__dict__") else ()
        state = vars(value) if hasattr(value, "__dict__") else {}
        return self._hold(value, slots | state, path)

    def _module(self, value: torch.nn.Module, path: Path) -> Iterable[tuple[Any, Any]]:
        """Visit a module. PyTorch's and opaque layers without children and buffers, most of a network, hold no
        state."""
        children, buffers, kind = value._modules, value._buffers, type(value)
        foreign = (
            len(path) > 1
            and kind is not torch.nn.Module
            and f"{kind.__module__}.".startswith((*_FOREIGN, *self.opaque))
        )
        if foreign and not children and not buffers:
            self.held[id(value)] = _Held(None, [], path)
            return
        yield from self._hold(value, _own(vars(value)), path)
        yield from self._hold(buffers, dict(buffers), path)
        yield from children.items()

    def _hold(self, container: Any, items: Any, path: Path) -> Iterable[tuple[Any, Any]]:
        if len(items) > self._left or id(container) in self.held:
            return ()
        self._left -= len(items)
        self.held[id(container)] = _Held(container, items, path)
        return items.items() if isinstance(items, dict) else enumerate(items)


_CONTENTS = "cell_contents"
_IN_FUNCTIONS: dict[type, _Look] = {
    types.FunctionType: _Reachable._function,
    types.MethodType: _Reachable._method,
    types.CellType: _Reachable._cell,
}


class _Copy(NamedTuple):
    """A tensor as it was. alias: the same memory, with the shape and strides that it had. values: a copy; None if too
    large. mark: differs after a change; None if there is a copy, and comparing marks would wait for the device."""

    tensor: torch.Tensor
    alias: torch.Tensor
    values: torch.Tensor | None
    mark: Any
    path: Path


class Snapshot:
    """Arguments, state and random state as they are now.

    roots: arguments, modules, and whatever else a call may change.
    opaque: module prefixes ("package.module.") of classes whose instances are no state of the call.
    rewritten: roots whose tensors are not copied, since every call writes before it reads there.
    in_functions: whether to visit what functions and methods keep (with a smaller limit of copied bytes).
    """

    def __init__(
        self, *roots: Any, opaque: tuple[str, ...] = (), rewritten: Iterable[Any] = (), in_functions: bool = False
    ):
        found = _Reachable(opaque, functions=[] if in_functions else None)
        with _AS_IT_IS():
            found.walk(rewritten)
            left_out = {*found.tensors}
            found.walk(roots)
            given = [found.tensors[each] for each in found.tensors if each not in left_out]
            self._tensors = [*_copy_tensors(given, COPIED)]
            left_out |= {*found.tensors}
            found.walk_functions()
            in_them = [found.tensors[each] for each in found.tensors if each not in left_out]
            self._tensors += _copy_tensors(in_them, _COPIED_IN_FUNCTIONS, only_what_fits=True)
        self._held = [held for held in found.held.values() if held.container is not None]
        self._random = _RandomState(found.generators.values(), {copy.alias.device for copy in self._tensors})
        self._roots, self._rewritten = roots, tuple(rewritten)
        self._opaque, self._in_functions = opaque, in_functions

    @property
    def whole(self) -> bool:
        """Whether all tensors were copied."""
        return all(copy.values is not None for copy in self._tensors)

    def restore(self, *, waits: bool = True) -> str:
        """Restore everything. Unchanged objects are not touched, since other threads may read them. Returns the name of
        a tensor that changed and was too large to be copied; "" if there is none.

        waits: whether to wait for the device to compare values. Without, a tensor is restored if its version counter
            has grown, or if it has none (of inference mode); a change through `.data` is missed.
        """
        with _AS_IT_IS():
            for container, items, _ in self._held:
                _put_back(container, items)
            lost = [".".join(map(str, copy.path[1:])) for copy in self._tensors if not _restore(copy, waits)]
        self._random.restore()
        return lost[0] if lost else ""

    def first_nan(self) -> str:
        """Return the name of a tensor that held NaN; "" if none did."""
        with _AS_IT_IS():
            for _, _, held, _, path in self._tensors:  # None: too large to be copied
                if (
                    held is not None
                    and held.is_floating_point()
                    and (held.float() if held.itemsize < 2 else held).isnan().any()
                ):
                    return ".".join(map(str, path[1:]))
        return ""

    @contextmanager
    def replayed(self, *made: Any) -> Generator[bool]:
        """Inside, everything is as it was, so that the call can be repeated; afterwards, it is as it is now.

        made: the call's output, which may share memory with its arguments.
        Yields False, and changes nothing, if something is too large to be restored.
        """
        after = Snapshot(
            *self._roots, *made, opaque=self._opaque, rewritten=self._rewritten, in_functions=self._in_functions
        )
        if not (self.whole and after.whole):
            yield False
            return
        self.restore()
        try:
            yield True
        finally:
            after.restore()

    @property
    def dtypes(self) -> dict[Path, torch.dtype]:
        """The dtype of each tensor, by its path, when the snapshot was taken."""
        with _AS_IT_IS():
            return {copy.path: copy.alias.dtype for copy in self._tensors}

    def dtypes_now(self) -> dict[Path, torch.dtype]:
        """Return the present dtype of each tensor, by its path."""
        with _AS_IT_IS():
            return {path: tensor.dtype for tensor, path in self._now().tensors.values()}

    def tensor_ids(self) -> set[int]:
        """Return the ids of the snapshot's tensors."""
        return {id(copy.tensor) for copy in self._tensors}

    def cast_to_half(
        self, dtypes: dict[Path, torch.dtype], otherwise: torch.dtype | None = None, but: Collection[int] = ()
    ) -> None:
        """Cast float32 tensors that an fp32 call left to the dtype that a half-precision call leaves, if they fit.

        dtypes: of the tensors that such a call left, by path.
        otherwise: the dtype for other paths; None keeps float32.
        but: ids of tensors to keep.
        """
        with _AS_IT_IS():
            for container, items, path in self._now().held.values():
                for key, value in items.items() if isinstance(items, dict) else enumerate(items):
                    if (narrowed := _cast_to_half(value, (*path, key), dtypes, otherwise, but)) is value:
                        continue
                    if isinstance(container, (dict, list, deque)):
                        container[key] = narrowed
                    elif isinstance(container, types.CellType):
                        container.cell_contents = narrowed
                    elif not isinstance(container, set):
                        object.__setattr__(container, str(key), narrowed)

    def _now(self) -> _Reachable:
        found = _Reachable(self._opaque, functions=[] if self._in_functions else None)
        found.walk((*self._roots, *self._rewritten))
        found.walk_functions()
        return found


class _RandomState:
    """The state of all random generators that a call may use: PyTorch's, Python's, NumPy's, and those it can reach."""

    def __init__(self, generators: Iterable[Any], devices: Iterable[torch.device]):
        pairs: list[tuple[Any, Any]] = [(random.getstate, random.setstate), (torch.get_rng_state, torch.set_rng_state)]
        if numpy := sys.modules.get("numpy.random"):
            pairs.append((numpy.get_state, numpy.set_state))
        for device in devices:
            its: Any = torch.get_device_module(device) if device.type != "cpu" else None
            if hasattr(its, "get_rng_state"):
                where = {} if device.type == "mps" else {"device": device}
                pairs.append((partial(its.get_rng_state, **where), partial(its.set_rng_state, **where)))
        for each in generators:
            if bits := getattr(each, "bit_generator", None):  # NumPy's
                pairs.append((partial(getattr, bits, "state"), partial(setattr, bits, "state")))
                continue
            python = isinstance(each, random.Random)
            pairs.append((each.getstate, each.setstate) if python else (each.get_state, each.set_state))
        self._states = [(put, get()) for get, put in pairs]

    def restore(self) -> None:
        for put, before in self._states:
            put(before)


def _own(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without torch.nn.Module's own."""
    return {name: state[name] for name in state.keys() - _TORCH}


def _slots(kind: type) -> list[str]:
    """Return the attribute names of a class's slots."""
    found: list[str] = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _copy_tensors(
    entries: Iterable[tuple[torch.Tensor, Path]], left: int, *, only_what_fits: bool = False
) -> Generator[_Copy]:
    for tensor, path in entries:
        alias = tensor.detach()
        values = _distinct(alias)
        fits = values.nbytes <= left and torch._debug_has_internal_overlap(values) != 1
        left -= values.nbytes * fits
        if only_what_fits and not fits:
            continue
        mark = None if fits and tensor.is_inference() else _mark(tensor)
        yield _Copy(tensor, alias, values.clone() if fits else None, mark, path)


def copies(*roots: Any) -> list[torch.Tensor]:
    """Return the copies that a Snapshot of the roots makes, for tensors on "meta" too."""
    found = _Reachable((), on_meta=True)
    with _AS_IT_IS():
        found.walk(roots)
        return [copy.values for copy in _copy_tensors(found.tensors.values(), COPIED) if copy.values is not None]


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Return an expanded tensor without its repeated values."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if stride == 0 and size > 1 else tensor
    return tensor


def _mark(tensor: torch.Tensor) -> Any:
    """Return a mark that differs after a tensor changed: its version counter, or a sum over its bits for tensors of
    inference mode, which have no counter."""
    if not tensor.is_inference():
        return tensor._version
    return _bits(tensor).sum(dtype=torch.int64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits as integers, so that NaN equals itself."""
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_BITS[tensor.itemsize])


def _restore(copy: _Copy, waits: bool) -> bool:
    """Restore a tensor. Returns whether that was possible: without a copy, only if it did not change."""
    tensor, alias, values, mark, _ = copy
    if values is None:
        return bool(_mark(tensor) == mark)
    if not waits and mark is not None and _mark(tensor) == mark and _same_view(tensor, alias):
        return True
    with torch.inference_mode(alias.is_inference()), torch.no_grad():
        if tensor.device == alias.device and not _same_view(tensor, alias):  # else it was moved, and stays there
            tensor.data = alias
        now = _distinct(tensor)
        if not waits or now.device != values.device or not torch.equal(_bits(now), _bits(values)):
            now.copy_(values)
    return True


def _same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    looks = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (one, other)]
    return looks[0] == looks[1]


def _put_back(container: Any, items: Any) -> None:
    if isinstance(container, types.CellType):
        _put_back_cell(container, items)
    elif isinstance(container, torch.nn.Module):
        _put_back_names(vars(container), _own(vars(container)), items)
    elif isinstance(container, dict):
        _put_back_names(container, container, items)
        if [*map(id, container)] != [*map(id, items)]:
            container.clear()
            container.update(items)
    elif isinstance(items, dict):
        for name, value in items.items():
            if getattr(container, name, _ABSENT) is not value:
                object.__setattr__(container, name, value)
        state = [*_slots(type(container)), *getattr(container, "__dict__", ())]
        for name in state:
            if name not in items and hasattr(container, name):
                object.__delattr__(container, name)
    elif isinstance(container, list):
        if [*map(id, container)] != [*map(id, items)]:
            container[:] = items  # at once, for other threads
    elif [*map(id, container)] != [*map(id, items)]:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(items)


def _put_back_cell(cell: types.CellType, items: dict[str, Any]) -> None:
    with suppress(ValueError):  # it is empty
        if cell.cell_contents is items.get(_CONTENTS, _ABSENT):
            return
        del cell.cell_contents
    if items:
        cell.cell_contents = items[_CONTENTS]


def _put_back_names(state: dict[Any, Any], now: dict[Any, Any], items: dict[Any, Any]) -> None:
    # the class's own, since a subclass may forbid it
    delete: Any = OrderedDict.__delitem__ if isinstance(state, OrderedDict) else dict.__delitem__
    for added in now.keys() - items.keys():
        delete(state, added)
    for name, value in items.items():
        if state.get(name, _ABSENT) is not value:
            state[name] = value


def _cast_to_half(
    value: Any, path: Path, dtypes: dict[Path, torch.dtype], otherwise: torch.dtype | None, but: Collection[int]
) -> Any:
    if isinstance(value, tuple):
        made = [_cast_to_half(each, (*path, at), dtypes, otherwise, but) for at, each in enumerate(value)]
        if all(new is old for new, old in zip(made, value, strict=True)):
            return value
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    dtype = dtypes.get(path, otherwise)
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32 or dtype not in HALF_DTYPES:
        return value
    if id(value) in but:
        return value
    narrowed = value.to(dtype)
    return narrowed if torch.isfinite(narrowed).all() else value


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
