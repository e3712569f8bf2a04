"""Process-wide settings that several runs may hold at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


class SharedSetting:
    """A process-wide setting: the first holder applies it, the last one takes it away.

    Saving and restoring in each run would leave the setting stuck when two threads overlap
    (A enters, B enters, A restores, B restores A's value).

    apply: sets it and returns the function that restores what was there before.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]):
        self._apply = apply
        self._restore: Callable[[], None] | None = None
        self._holders = 0
        self._lock = threading.Lock()

    @contextmanager
    def held(self) -> Generator[None]:
        with self._lock:
            if self._holders == 0:
                self._restore = self._apply()
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0 and self._restore is not None:
                    restore, self._restore = self._restore, None
                    restore()
