"""State that other packs keep between calls, in variables of their modules and classes, as step caches do.

A repeated call must find the state that the first one found. Only variables that hold tensors are restored, and numeric
variables, which may be counters. Restoring a part of the others (queues, flags, settings) would be worse than nothing:
a pack notes in one variable that it has set itself up, and reads its setup from another. Reading never raises.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..precision.dtypes import HALF_DTYPES

_ENTRIES = 5_000  # container entries, at most, that are read
_COPIED = 2**25  # bytes of tensors, at most, that are copied
_NUMBERS = (int, float)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_ABSENT: Any = object()
_PLAIN = torch._C.DisableTorchFunction  # out of the fp32 rerun's mode, in which half tensors look like float32
Place = tuple[Any, ...]  # a module, a class of it or "", a variable, and keys


def modules_of_packs(network: torch.nn.Module, functions: Iterable[Any]) -> list[ModuleType]:
    """Return other packs' modules whose classes and functions a call runs, and modules of the same packs that those
    use. functions: what packs have put into the call's options."""
    ahead = set(map(_module_of, functions))
    for module in network.modules():
        ahead.add(_module_of(type(module)))
        ahead.update(_module_of(value) for value in vars(module).values() if callable(value))
    found: dict[str, ModuleType] = {}
    while ahead:
        name = ahead.pop()
        module = sys.modules.get(name)
        if name in found or type(module) is not ModuleType or not _is_of_a_pack(vars(module).get("__file__")):
            continue
        found[name] = module
        uses = [each for each in [*vars(module).values()] if type(each) in (type, ModuleType, FunctionType)]
        ahead |= {used for used in map(_module_of, uses) if used.partition(".")[0] == name.partition(".")[0]}
    return [found[name] for name in sorted(found)]


def _module_of(value: Any) -> str:
    value = value.func if type(value) is partial else value
    with suppress(Exception):
        name = value.__name__ if type(value) is ModuleType else value.__module__
        return name if type(name) is str else ""
    return ""


@lru_cache
def _is_of_a_pack(file: Any) -> bool:
    """Return whether a module's file is below a folder that ComfyUI loads packs from, and is not this pack's."""
    if type(file) is not str or Path(__file__).parents[1] in (path := Path(file)).parents:
        return False
    if "custom_nodes" in path.parts:
        return True
    with suppress(Exception):
        folders = sys.modules["folder_paths"].get_folder_paths("custom_nodes")
        return any(Path(folder) in path.parents for folder in folders)
    return False


@dataclass
class _Variable:
    """The value of a variable, and the tensors and containers inside it."""

    value: Any
    tensors: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    containers: list[tuple[Place, Any, Any]] = field(default_factory=list)  # with its items
    values: list[torch.Tensor | None] = field(default_factory=list)  # copies of the tensors; None: not copied


class PackVariables:
    """A snapshot of the variables of some modules."""

    def __init__(self, modules: Iterable[ModuleType]):
        self._modules, left = [*modules], _COPIED
        self._before: dict[Place, _Variable] = {}
        self._names: set[Place] = set()
        with _PLAIN():
            for place, owner in self._owners():
                self._names |= {(*place, name) for name in vars(owner)}
                for name, variable in _variables(place, owner):
                    self._before[(*place, name)] = variable
                    for _, tensor in variable.tensors:
                        plain = tensor.layout is torch.strided and tensor.device.type != "meta"
                        fits = plain and tensor.nbytes <= left
                        left -= tensor.nbytes if fits else 0
                        variable.values.append(tensor.detach().clone() if fits else None)

    def _owners(self) -> Iterator[tuple[Place, Any]]:
        for module in self._modules:
            yield (module.__name__, ""), module
            for name, each in [*vars(module).items()]:
                if type(each) is type and _module_of(each) == module.__name__:
                    yield (module.__name__, name), each

    def restore(self) -> None:
        with _PLAIN():
            for place, owner in self._owners():
                now = dict(_variables(place, owner))
                for name in [*vars(owner)]:
                    before, variable = self._before.get((*place, name)), now.get(name)
                    if before is not None:
                        _attempt(_put_back, owner, name, before, variable)
                    elif variable and variable.tensors and (*place, name) not in self._names:
                        _attempt(delattr, owner, name)

    @property
    def tensors(self) -> set[int]:
        """The ids of the tensors in the snapshot."""
        return {id(tensor) for variable in self._before.values() for _, tensor in variable.tensors}

    @property
    def dtypes(self) -> dict[Place, torch.dtype]:
        """Place → dtype of the tensors in the snapshot."""
        with _PLAIN():
            return {at: tensor.dtype for variable in self._before.values() for at, tensor in variable.tensors}

    def dtypes_now(self) -> dict[Place, torch.dtype]:
        with _PLAIN():
            return {
                at: tensor.dtype
                for place, owner in self._owners()
                for _, variable in _variables(place, owner)
                for at, tensor in variable.tensors
            }

    def narrow(self, dtypes: Mapping[Place, torch.dtype], otherwise: torch.dtype | None, but: Collection[int]) -> None:
        """Cast tensors that are float32 now to the half precision that a call in half precision left there, if they
        fit. Arguments: as Snapshot.narrow has them."""

        def narrowed(at: Place, value: Any) -> Any:
            dtype = dtypes.get(at, otherwise)
            if type(value) is not torch.Tensor or value.dtype is not torch.float32 or dtype not in HALF_DTYPES:
                return value
            made = value.to(dtype)
            return value if id(value) in but or not made.isfinite().all() else made

        with _PLAIN():
            for place, owner in self._owners():
                for name, variable in _variables(place, owner):
                    for at, container, items in variable.containers:
                        for key, value in items.items() if isinstance(items, dict) else enumerate(items):
                            made = narrowed((*at, key), value)
                            if made is not value and type(container) not in (tuple, set):
                                _attempt(container.__setitem__, key, made)  # another thread may have changed it
                    if (made := narrowed((*place, name), variable.value)) is not variable.value:
                        _attempt(setattr, owner, name, made)


def _variables(place: Place, owner: Any) -> Iterator[tuple[str, _Variable]]:
    """Yield the variables of a module or class that may be state, with their names; none with too many entries."""
    left = [_ENTRIES]
    for name, value in [*vars(owner).items()]:
        with suppress(Exception):
            if name[:2] != "__" and (variable := _looked_at(value, (*place, name), left)):
                yield name, variable


def _looked_at(value: Any, place: Place, left: list[int]) -> _Variable | None:
    """Read a variable; None if it is no state, or too large. left: [entries that may still be read]; changed."""
    root = place[0].partition(".")[0]
    if not (value is None or type(value) in _NUMBERS or isinstance(value, torch.Tensor) or _held(value, root)):
        return None
    found, seen, ahead = _Variable(value), set[int](), [(value, place)]
    while ahead:
        each, at = ahead.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found.tensors += [] if hasattr(type(each), "__tensor_flatten__") else [(at, each)]
        elif held := _held(each, root):
            if len(held[0]) > left[0]:
                return None
            left[0] -= len(held[0])
            items = dict(held[0]) if isinstance(held[0], dict) else [*held[0]]
            found.containers.append((at, held[0], items))
            pairs = items.items() if isinstance(items, dict) else enumerate(items)
            ahead += [(part, (*at, key)) for key, part in pairs]
    return found


def _held(value: Any, root: str) -> tuple[Any] | None:
    """Return (container,) or, for an object of the pack's own class, (its attributes,); None for other values."""
    kind = type(value)
    if kind in _CONTAINERS:
        return (value,)
    if issubclass(kind, torch.nn.Module) or _module_of(kind).partition(".")[0] != root:
        return None
    state = object.__getattribute__(value, "__dict__")
    return (state,) if type(state) is dict else None


def _put_back(owner: Any, name: str, before: _Variable, now: _Variable | None) -> None:
    current = vars(owner).get(name, _ABSENT)
    if before.tensors or (now and now.tensors):
        for _, container, items in before.containers:
            if isinstance(container, dict):
                if [*container] != [*items] or any(container[key] is not items[key] for key in items):
                    container.clear()
                    container.update(items)
            elif [*map(id, container)] != [*map(id, items)]:
                container.clear()
                (container.update if type(container) is set else container.extend)(items)
        for (_, tensor), values in zip(before.tensors, before.values, strict=True):
            if values is not None and not torch.equal(tensor, values):
                with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                    tensor.copy_(values)
        if current is not before.value:
            setattr(owner, name, before.value)
    elif type(current) in _NUMBERS and type(before.value) in _NUMBERS and current != before.value:
        setattr(owner, name, before.value)


def _attempt(do: Callable[..., object], *args: Any) -> None:
    with suppress(Exception):
        do(*args)
