"""What ComfyUI's networks, and the caches beside them, remember from one call to the next.

EasyCache skips the model by what it saw before; Wan's autoregressive sampler and Wan-Animate 2 keep keys, values and
activations in `transformer_options`; HiDream-O1 keeps them on itself, from one run to the next. A call that fails has
written there already, and the same call again would go on from that.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..precision.guard import GuardStopped
from ..precision.snapshot import Snapshot

_EASYCACHE = "easycache"  # in transformer_options
_REWRITTEN = ("ar_state",)  # in transformer_options: keys and values of whole videos, to which a call adds its own
# ComfyUI's memory manager, and what holds whole models: what they note of a network is no state of a call
OPAQUE = (
    *("comfy.ops.", "comfy.quant_ops.", "comfy.model_patcher.", "comfy.model_management.", "comfy.model_base."),
    *("comfy.multigpu.", "comfy.patcher_extension.", "comfy.hooks.", "comfy.sd.", "comfy.memory_management."),
    *("comfy.model_prefetch.", "comfy.pinned_memory.", "comfy_aimdo."),
)


class CallMemory:
    """For one call of a network, made once or several times: each begins with what was remembered before the first.

    The rerun that counts leaves what it wrote beside the network, in half precision where a call in half precision
    would have it so and it fits. What it wrote on the network itself is forgotten, and where every call failed, all is.

    options: ComfyUI's transformer_options. dtype: the network computes in. given: what else it is called with.
    """

    def __init__(self, network: torch.nn.Module, options: dict[str, Any], dtype: torch.dtype, given: Any = ()):
        self.options = options
        self._dtype = dtype
        self._easycache = _EasyCache(options.get(_EASYCACHE))
        self._network = network
        self._states = {name: value for name, value in options.items() if name not in (_EASYCACHE, *_REWRITTEN)}, given
        self._called = False
        self._kept: Snapshot | None = None
        self._look()

    def _look(self) -> None:
        self._beside = self._beside_now()
        self._dtypes = self._beside.dtypes  # and those of tensors that failed calls left there
        self._within = Snapshot(self._network, opaque=OPAQUE)

    def _beside_now(self) -> Snapshot:
        rewritten = [self.options.get(name) for name in _REWRITTEN]
        return Snapshot(*self._states, opaque=OPAQUE, rewritten=rewritten)

    def of_a_call(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Options for one more call. They hold what the network's caches are in, and no copy of it in float32: what a
        rerun writes there, later calls read. Raises GuardStopped where the call before it cannot be undone."""
        if self._called:
            if self._kept is None:  # else it was a rerun
                self._dtypes |= self._beside.dtypes_now()
            if lost := self._rewind():
                raise GuardStopped(
                    "A failed call has overwritten '{}', which is too large to be copied beforehand, so the same "
                    "call cannot be made again. Choose a smaller size or fewer frames, or take off the node that keeps "
                    "it from call to call.",
                    lost,
                )
        self._called = True
        return {**self.options, **self._easycache.of_a_call(), **more}

    def keep(self) -> None:
        """The latest call, a rerun, is the one that counts."""
        self._easycache.keep()
        self._kept = self._beside_now()

    def forget(self) -> None:
        """No call that was made counts."""
        self._easycache.forget()
        self._kept = None
        self._rewind()
        self._called = False

    def renewed(self) -> None:
        """The network was loaded anew, with its buffers."""
        self._look()

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
            self._kept.narrow(self._dtypes, self._dtype)

    def _rewind(self) -> str:
        return self._beside.restore() or self._within.restore()


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
