"""Estimates the time left of a stepwise task from its last steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..trust.message import Message

_LAST = 8  # steps that count: the speed changes, since a guard reruns steps or a network throttles


def in_words(seconds: float) -> str:
    """Return "40 s left", "3 min left" or "1.5 h left"."""
    if seconds < 59.5:
        return Message("{:.0f} s left", max(seconds, 1))
    if seconds < 3600 - 30:
        return Message("{:.0f} min left", seconds / 60)
    return Message("{:.1f} h left", seconds / 3600)


class Pace:
    """Estimates the time left, in words, from the amounts done.

    The first step counts only until others follow: it also loads, compiles and measures.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._marks: deque[tuple[float, float]] = deque(maxlen=_LAST + 1)  # amount done, seconds
        self._first = True

    def left(self, done: float, total: float) -> str:
        """Return "40 s left", "3 min left" or "1.5 h left"; "" if that is unknown, or nothing is left.

        done, total: amounts in any unit.
        """
        if not self._marks or done > self._marks[-1][0]:
            if self._first and len(self._marks) == 2:
                self._marks.popleft()
                self._first = False
            self._marks.append((done, self._now()))
        (begun, since), (reached, at) = self._marks[0], self._marks[-1]
        if reached <= begun or total <= reached:
            return ""
        return in_words((total - reached) * (at - since) / (reached - begun))
