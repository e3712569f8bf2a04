"""Process-wide state: settings that several runs can hold at the same time, and a lock for those that they cannot."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

lasting: Callable[[], AbstractContextManager[object]] = nullcontext
"""A context for allocating tensors that outlive the model call in which they are made. A host that plans the memory of
calls sets it."""


class SharedSetting:
    """A process-wide setting: the first holder applies it, the last one takes it away.

    Saving and restoring in each run would leave the setting stuck when two threads overlap
    (A enters, B enters, A restores, B restores A's value).

    apply: sets it, and returns a function that restores the state before. Called with the arguments of `held`; of
        several holders', with the smallest.
    """

    def __init__(self, apply: Callable[..., Callable[[], None]]):
        self._apply = apply
        self._restore: Callable[[], None] = lambda: None
        self._now: tuple[bool, ...] | None = None
        self._holders: list[tuple[bool, ...]] = []
        self._lock = threading.Lock()

    @property
    def is_held(self) -> bool:
        return bool(self._holders)

    @contextmanager
    def held(self, *value: bool) -> Generator[None]:
        """Hold the setting inside. value: for a setting that can be on or off."""
        try:
            with self._lock:
                self._holders.append(value)
                self._update()
            yield
        finally:
            with self._lock:
                self._holders.remove(value)
                self._update()

    def _update(self) -> None:
        wanted = min(self._holders, default=None)
        if wanted != self._now:
            restore, self._restore, self._now = self._restore, lambda: None, None
            restore()
            if wanted is not None:
                self._restore, self._now = self._apply(*wanted), wanted


class ProcessGate:
    """A lock for the threads of this process: many compute and share it, or one holds it exclusively and changes what
    all compute with.

    diffusers, transformers and peft replace `nn.Module.register_parameter`, `torch.nn.init` and PyTorch's default dtype
    while they build a module, and put back what they found. Two threads that did so at the same time would leave them
    replaced, and one that computes meanwhile would get tensors of another dtype. So a thread that changes such things
    waits until those that compute yield, between two calls of a network. Other packs' threads, and ComfyUI's own
    samplers, are not asked.

    No thread is overtaken twice: one that yielded shares the gate again before the next exclusive holder. `shared` and
    `exclusive` may be nested. A thread that waits for something else that another one holds has to `release` meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sharing = 0  # threads that share it
        self._wanting = 0  # threads that wait to hold it exclusively
        self._taken = False  # whether a thread holds it exclusively
        self._times = 0  # how often one has held it exclusively
        self._returning: list[int] = []  # for each thread that waits to share it, `_times` when it began to wait
        self._own = _Own()

    @contextmanager
    def shared(self) -> Generator[None]:
        """Share it inside: no other thread holds it exclusively, except where this one yields."""
        if self._own.shares or self._own.excludes:
            yield
            return
        try:
            self._join()
            yield
        finally:
            self._leave()

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Wait until no other thread shares or holds it, and hold it exclusively inside."""
        if self._own.excludes:
            yield
            return
        shared = self._own.shares
        with self._changed:
            self._wanting += 1
            try:
                self._leave()
                self._changed.wait_for(lambda: not (self._taken or self._sharing or self._overtaken()))
                self._taken = self._own.excludes = True
            finally:
                self._wanting -= 1
                self._share_if(shared and not self._own.excludes)
        try:
            yield
        finally:
            with self._changed:
                self._taken = self._own.excludes = False
                self._times += 1
                self._share_if(shared)  # at once: nobody else was let in

    @contextmanager
    def release(self) -> Generator[None]:
        """Let other threads hold it exclusively inside, although this one shares it."""
        shared = self._own.shares
        self._leave()
        try:
            yield
        finally:
            if shared:
                self._join()

    def yield_(self) -> None:
        """Let the threads that wait to hold it exclusively do so, if this one shares it. Each does once at most: this
        thread begins to wait in the moment in which it stops sharing."""
        if self._wanting and self._own.shares:
            with self._changed:
                self._leave()
                self._join()

    def _leave(self) -> None:
        with self._changed:
            self._sharing -= self._own.shares
            self._own.shares = False
            self._changed.notify_all()

    def _join(self) -> None:
        with self._changed:
            since = self._times
            self._returning.append(since)
            try:
                self._changed.wait_for(lambda: not self._taken and (not self._wanting or self._times > since))
            finally:  # also where a signal ends the waiting: `shared` leaves again
                self._returning.remove(since)
                self._share_if(True)

    def _overtaken(self) -> bool:
        """Return whether a thread that waits to share it has been overtaken already."""
        return any(since < self._times for since in self._returning)

    def _share_if(self, shared: bool) -> None:
        self._sharing += shared
        self._own.shares = shared
        self._changed.notify_all()


class _Own(threading.local):
    shares = False
    excludes = False


PROCESS_GATE = ProcessGate()  # of this process


def _without_warnings() -> Callable[[], None]:
    with ExitStack() as caught:
        caught.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return caught.pop_all().close


NO_WARNINGS = SharedSetting(_without_warnings)  # `catch_warnings` itself would leave another thread's filters behind
