"""State that other packs keep between calls, in variables of their modules and classes, as step caches do.

A repeated call must find the state that the first one found. Only variables that hold tensors are restored, and numeric
variables, which may be counters. Restoring a part of the others (queues, flags, settings) would be worse than nothing:
a pack notes in one variable that it has set itself up, and reads its setup from another. Reading never raises.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from ..precision.snapshot import Dtypes, Reachable, copied, narrow_held, narrowed, put_back, restored
from ..precision.snapshot import Path as Place  # a module, a class of it or "", a variable, and keys

_ENTRIES = 5_000  # container entries, at most, that are read
_COPIED = 2**25  # bytes of tensors, at most, that are copied
_NUMBERS = (int, float)
_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_CODE = (type, FunctionType, ModuleType)
_ABSENT: Any = object()
_PLAIN = torch._C.DisableTorchFunction  # out of the fp32 rerun's mode, in which half tensors look like float32


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
        uses = [each for each in [*vars(module).values()] if type(each) in _CODE]
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


class _Variable(Reachable):
    """What is in one, and in what that holds: containers, and objects of the pack's own classes."""

    def __init__(self, value: Any, place: Place, left: int):
        """left: entries that may still be looked at."""
        super().__init__(())
        self.value = value
        self._root, self.left = place[0].partition(".")[0], left
        self.is_state = value is None or type(value) in _NUMBERS or self._looked_at(type(value)) is not None
        if self.is_state:
            self._walk([(value, place)])

    def _looked_at(self, kind: type) -> Any:
        if issubclass(kind, torch.Tensor):
            return _Variable._tensor
        if kind in _CONTAINERS:
            return super()._looked_at(kind)
        is_own = not issubclass(kind, torch.nn.Module) and _module_of(kind).partition(".")[0] == self._root
        return _Variable._attributes if is_own else None

    def _tensor(self, value: torch.Tensor, path: Place) -> Iterable[tuple[Any, Any]]:
        if not hasattr(type(value), "__tensor_flatten__"):
            self.tensors[id(value)] = value, path
        return ()

    def _attributes(self, value: Any, path: Place) -> Iterable[tuple[Any, Any]]:
        state = object.__getattribute__(value, "__dict__")
        return self._hold(state, dict(state), path) if type(state) is dict else ()

    def _hold(self, container: Any, items: Any, path: Place) -> Iterable[tuple[Any, Any]]:
        if len(items) > self.left:
            self.is_state = False
        return super()._hold(container, items, path)


class PackVariables:
    """A snapshot of the variables of some modules."""

    def __init__(self, modules: Iterable[ModuleType]):
        self._modules = [*modules]
        with _PLAIN():
            self._names = {(*place, name) for place, owner in self._owners() for name in vars(owner)}
            self._before = {(*place, name): variable for place, _, name, variable in self._variables()}
            found = [entry for variable in self._before.values() for entry in variable.tensors.values()]
            plain = [(t, at) for t, at in found if t.layout is torch.strided and not (t.is_meta or t.is_nested)]
            self._copies = [*copied(plain, _COPIED, only_what_fits=True)]

    def _owners(self) -> Iterator[tuple[Place, Any]]:
        for module in self._modules:
            yield (module.__name__, ""), module
            for name, each in [*vars(module).items()]:
                if type(each) is type and _module_of(each) == module.__name__:
                    yield (module.__name__, name), each

    def _variables(self) -> Iterator[tuple[Place, Any, str, _Variable]]:
        """Yield the variables that may be state, with their owners and names; none that hold too much."""
        for place, owner in self._owners():
            left = _ENTRIES
            for name, value in [*vars(owner).items()]:
                with suppress(Exception):
                    if name[:2] != "__" and type(value) not in _CODE:
                        variable = _Variable(value, (*place, name), left)
                        left = variable.left
                        if variable.is_state:
                            yield place, owner, name, variable

    def restore(self) -> None:
        with _PLAIN():
            for copy in self._copies:
                _attempt(restored, copy, waits=True)
            now = {(*place, name): variable for place, _, name, variable in self._variables()}
            for place, owner in self._owners():
                for name in [*vars(owner)]:
                    before, variable = self._before.get((*place, name)), now.get((*place, name))
                    if before is not None:
                        _attempt(_put_back, owner, name, before, variable)
                    elif variable and variable.tensors and (*place, name) not in self._names:
                        _attempt(delattr, owner, name)

    def holds(self) -> set[int]:
        """Return the ids of the tensors that were there."""
        return {id(tensor) for variable in self._before.values() for tensor, _ in variable.tensors.values()}

    @property
    def dtypes(self) -> Dtypes:
        return _dtypes(self._before.values())

    def dtypes_now(self) -> Dtypes:
        with _PLAIN():
            return _dtypes(variable for *_, variable in self._variables())

    def narrow(self, dtypes: Dtypes, otherwise: torch.dtype | None, but: Collection[int]) -> None:
        """Do what Snapshot.narrow does."""
        with _PLAIN():
            for place, owner, name, variable in self._variables():
                for held in variable.held.values():
                    _attempt(narrow_held, held, dtypes, otherwise, but)  # another thread may have changed it
                made = narrowed(variable.value, (*place, name), dtypes, otherwise, but)
                if made is not variable.value:
                    _attempt(setattr, owner, name, made)


def _dtypes(variables: Iterable[_Variable]) -> Dtypes:
    with _PLAIN():
        return {at: tensor.dtype for variable in variables for tensor, at in variable.tensors.values()}


def _put_back(owner: Any, name: str, before: _Variable, now: _Variable | None) -> None:
    current = vars(owner).get(name, _ABSENT)
    if before.tensors or (now and now.tensors):
        for container, items, _ in before.held.values():
            put_back(container, items)
        if current is not before.value:
            setattr(owner, name, before.value)
    elif type(current) in _NUMBERS and type(before.value) in _NUMBERS and current != before.value:
        setattr(owner, name, before.value)


def _attempt(do: Callable[..., object], *args: Any, **how: Any) -> None:
    with suppress(Exception):
        do(*args, **how)
