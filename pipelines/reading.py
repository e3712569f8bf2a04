"""What is said while a component's weights are read from disk, which takes minutes for a large one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar

from ..trust.message import Message, joined
from .pace import in_words

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("who is told what is read", default=None)
_LEAST = 100_000_000  # bytes: smaller ones say nothing of how fast a disk is
_speeds: list[float] = []  # bytes a second, of what this process read last


@contextmanager
def listening(tell: Callable[[str], None]) -> Generator[None]:
    """Have `tell` given a line before anything is read; it may raise, to interrupt."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def reading(name: str, n_bytes: int, now: Callable[[], float] = time.monotonic) -> Generator[None]:
    """Say that a component is read, and how long that takes at the speed of the one before it."""
    if tell := _listener.get():
        from ..precision.memory import size

        said = Message("reading {}, {}", name, size(n_bytes))
        left = in_words(n_bytes / _speeds[0]) if _speeds and n_bytes >= _LEAST else ""
        tell(joined(" · ", filter(None, (said, left))))
    since = now()
    yield
    seconds = now() - since
    if n_bytes >= _LEAST and seconds > 0:
        _speeds[:] = [n_bytes / seconds]
