"""What ComfyUI's networks, and the caches beside them, remember from one call to the next.

EasyCache skips the model by what it saw before; Wan's autoregressive sampler and Wan-Animate 2 keep keys, values and
activations in `transformer_options`; HiDream-O1 keeps them on itself, from one run to the next. A call that fails has
written there already, and the same call again would go on from that.
"""

from __future__ import annotations

import copy
import threading
import types
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_EASYCACHE = "easycache"  # in transformer_options
_TORCH = frozenset(vars(torch.nn.Module()))
_STATELESS = (torch.nn.Module, torch.Tensor, type, types.ModuleType)


class CallMemory:
    """For one call of a network, made once or several times: each begins with what was remembered before the first.

    The rerun that counts leaves what it wrote beside the network, in half precision where that holds it, as a call in
    half precision would. What it wrote on the network itself is forgotten, and where every call failed, all is.

    options: ComfyUI's transformer_options. dtype: the network computes in.
    """

    def __init__(self, network: torch.nn.Module, options: dict[str, Any], dtype: torch.dtype):
        self.options = options
        self._dtype = dtype
        self._easycache = _EasyCache(options.get(_EASYCACHE))
        self._beside = _Snapshot(_states(options))
        self._within = _Snapshot([vars(network)])
        self._kept: _Snapshot | None = None

    def of_a_call(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Options for one more call. They hold what the network's caches are in, and no copy of it in float32: what a
        rerun writes there, later calls read."""
        self._rewind()
        return {**self.options, **self._easycache.of_a_call(), **more}

    def keep(self) -> None:
        """The latest call, a rerun, is the one that counts."""
        self._easycache.keep()
        self._kept = _Snapshot(_states(self.options))

    def forget(self) -> None:
        """No call that was made counts."""
        self._easycache.forget()
        self._kept = None

    @contextmanager
    def settled(self) -> Generator[None]:
        """Around all calls."""
        try:
            yield
        except BaseException:
            self._rewind()
            raise
        self._easycache.settle()
        if self._kept is not None:
            self._within.restore()
            self._kept.restore()
            self._kept.narrow(self._dtype, self._beside)

    def _rewind(self) -> None:
        self._beside.restore()
        self._within.restore()


def _states(options: dict[str, Any]) -> list[Any]:
    """What may change in them: themselves, and the attributes of objects in them."""
    values = [value for name, value in options.items() if name != _EASYCACHE and not isinstance(value, _STATELESS)]
    return [*values, *(vars(value) for value in values if hasattr(value, "__dict__") and not callable(value))]


class _Snapshot:
    """What dicts and lists hold, those inside of them too. Tensors stay where they are, as they are."""

    def __init__(self, containers: Iterable[Any]):
        self._held: dict[int, tuple[Any, Any]] = {}
        for container in containers:
            self._enter(container)

    def _enter(self, value: Any) -> None:
        if isinstance(value, tuple):
            for inside in value:
                self._enter(inside)
        if not isinstance(value, (dict, list)) or id(value) in self._held:
            return
        held = _without_torch(value) if isinstance(value, dict) else [*value]
        self._held[id(value)] = value, held
        for inside in held.values() if isinstance(held, dict) else held:
            self._enter(inside)

    def narrow(self, dtype: torch.dtype, before: _Snapshot) -> None:
        """Bring float32 tensors that were not there before to a dtype, where they fit."""
        known = {id(value) for _, _, value in before._entries()}
        for container, key, value in self._entries():
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32 and id(value) not in known:
                narrowed = value.to(dtype)
                if torch.isfinite(narrowed).all():
                    container[key] = narrowed

    def _entries(self) -> Generator[tuple[Any, Any, Any]]:
        for container, held in self._held.values():
            for key, value in held.items() if isinstance(held, dict) else enumerate(held):
                yield container, key, value

    def restore(self) -> None:
        """Touches only what changed: other threads may read the rest."""
        for container, held in self._held.values():
            if isinstance(container, list):
                if [*map(id, container)] != [*map(id, held)]:
                    container[:] = held
                continue
            for added in _without_torch(container).keys() - held.keys():
                del container[added]
            container.update((name, value) for name, value in held.items() if container.get(name, held) is not value)


def _without_torch(state: dict[Any, Any]) -> dict[Any, Any]:
    """Without what torch.nn.Module keeps of its own: parameters, hooks, children."""
    return {name: value for name, value in state.items() if name not in _TORCH}


class _EasyCache:
    """What ComfyUI's EasyCache and LazyCache remember of the steps before, by which they skip the model.

    They sit inside the guard, and several GPUs share them. So each call for one step starts from the same, in a copy,
    and the one that counts leaves what it changed: else a rerun, with the inputs of the attempt before it, would be
    skipped for what the attempt left. What another thread's call leaves at the same time stays.
    """

    def __init__(self, holder: Any):
        self._holder = holder
        self._before = self._copied(holder)
        self._made: Any = None
        self._kept: Any = None

    def of_a_call(self) -> dict[str, Any]:
        if self._holder is None:
            return {}
        self._made = self._copied(self._before)
        return {_EASYCACHE: self._made}

    def keep(self) -> None:
        self._kept = self._made

    def forget(self) -> None:
        self._kept = None

    def settle(self) -> None:
        if self._made is None:
            return
        before, after = vars(self._before), vars(self._kept or self._made)
        with _SETTLING:
            now = vars(self._holder)
            now.update({name: _settled(before.get(name), value, now.get(name)) for name, value in after.items()})

    @staticmethod
    def _copied(holder: Any) -> Any:
        copied = copy.copy(holder)
        if holder is not None:
            with _SETTLING:
                state = vars(holder).items()
                vars(copied).update((name, copy.copy(v) if isinstance(v, (dict, list)) else v) for name, v in state)
        return copied


_SETTLING = threading.Lock()


def _settled(before: Any, after: Any, now: Any) -> Any:
    """A value as it is now, with what one call changed in it."""
    if isinstance(after, dict) and isinstance(before, dict) and isinstance(now, dict):
        changed = {key: value for key, value in after.items() if before.get(key) is not value}
        return {key: value for key, value in now.items() if key in after or key not in before} | changed
    if isinstance(after, list) and isinstance(before, list):
        return now if [*map(id, after)] == [*map(id, before)] else after
    return now if after is before else after
