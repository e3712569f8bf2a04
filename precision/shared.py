"""What a whole process shares: settings that several runs hold at the same time, and turns where they cannot do so."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

lasting: Callable[[], AbstractContextManager[object]] = nullcontext
"""What tensors are made in that outlive the call of a model in which they are made; a host that plans the memory of
calls sets it."""


class SharedSetting:
    """A process-wide setting: the first holder applies it, the last one takes it away.

    Saving and restoring in each run would leave the setting stuck when two threads overlap
    (A enters, B enters, A restores, B restores A's value).

    apply: sets it and returns the function that restores what was there before. It is given what `held` is: of what
        runs hold at the same time, the least.
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
        """Hold the setting inside. value: for one that can be on or off, which it shall be."""
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


class Turns:
    """Turns that threads take: many compute at the same time, or one is alone and changes what all compute with.

    diffusers, transformers and peft replace `nn.Module.register_parameter`, `torch.nn.init` and PyTorch's default dtype
    while they build a module, and put back what they found. Two threads that did so at the same time would leave them
    replaced, and one that computes meanwhile would get tensors of another dtype. So a thread that changes such things
    waits until those that compute give way, between two calls of a network. Other packs' threads, and ComfyUI's own
    samplers, are not asked.

    No thread is passed twice: one that gave way comes back before another is alone again. `computing` and `alone` may
    be nested. A thread that waits for something else that another one holds is `away` meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._computing = 0  # threads that compute
        self._wanting = 0  # threads that wait to be alone
        self._taken = False  # whether a thread is alone
        self._times = 0  # how often one has been alone
        self._back: list[int] = []  # for each thread that waits to compute, `_times` when it began to wait
        self._own = _Own()

    @contextmanager
    def computing(self) -> Generator[None]:
        """Keep other threads from being `alone` inside, except where this one gives way."""
        if self._own.computes or self._own.alone:
            yield
            return
        try:
            self._come_back()
            yield
        finally:
            self._leave()

    @contextmanager
    def alone(self) -> Generator[None]:
        """Wait until no other thread is `computing` or alone, and keep them from it inside."""
        if self._own.alone:
            yield
            return
        computed = self._own.computes
        with self._changed:
            self._wanting += 1
            try:
                self._leave()
                self._changed.wait_for(lambda: not (self._taken or self._computing or self._passed()))
                self._taken = self._own.alone = True
            finally:
                self._wanting -= 1
                self._back_if(computed and not self._own.alone)
        try:
            yield
        finally:
            with self._changed:
                self._taken = self._own.alone = False
                self._times += 1
                self._back_if(computed)  # at once: nobody else was let in

    @contextmanager
    def away(self) -> Generator[None]:
        """Let other threads be alone inside, although this one is `computing`."""
        computed = self._own.computes
        self._leave()
        try:
            yield
        finally:
            if computed:
                self._come_back()

    def give_way(self) -> None:
        """Let the threads that wait to be alone have their turn, if this one is `computing`. Each has one at most: this
        thread begins to wait in the moment in which it stops computing."""
        if self._wanting and self._own.computes:
            with self._changed:
                self._leave()
                self._come_back()

    def _leave(self) -> None:
        with self._changed:
            self._computing -= self._own.computes
            self._own.computes = False
            self._changed.notify_all()

    def _come_back(self) -> None:
        with self._changed:
            since = self._times
            self._back.append(since)
            try:
                self._changed.wait_for(lambda: not self._taken and (not self._wanting or self._times > since))
            finally:  # also where a signal ends the waiting: `computing` leaves again
                self._back.remove(since)
                self._back_if(True)

    def _passed(self) -> bool:
        """Return whether a thread waits to compute that has let another be alone already while it waited."""
        return any(since < self._times for since in self._back)

    def _back_if(self, computed: bool) -> None:
        self._computing += computed
        self._own.computes = computed
        self._changed.notify_all()


class _Own(threading.local):
    computes = False
    alone = False


TURNS = Turns()  # of this process


def _without_warnings() -> Callable[[], None]:
    with ExitStack() as caught:
        caught.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return caught.pop_all().close


NO_WARNINGS = SharedSetting(_without_warnings)  # `catch_warnings` itself would leave another thread's filters behind
