"""How long something that goes step by step will take yet, from how long its last steps took."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..trust.message import Message

_LAST = 8  # steps that are looked at: speed changes where a guard reruns, or a network throttles


def in_words(seconds: float) -> str:
    """Return "40 s left", "3 min left" or "1.5 h left"."""
    if seconds < 59.5:
        return Message("{:.0f} s left", max(seconds, 1))
    if seconds < 3600 - 30:
        return Message("{:.0f} min left", seconds / 60)
    return Message("{:.1f} h left", seconds / 3600)


class Pace:
    """Told how much is done, says in words how long the rest will take.

    The first step is left out where others follow: it loads, compiles and measures.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._marks: deque[tuple[float, float]] = deque(maxlen=_LAST + 1)  # amount done, seconds
        self._first = True

    def left(self, done: float, total: float) -> str:
        """Return "40 s left", "3 min left" or "1.5 h left"; "" while that is not known, or nothing is left.

        done, total: in any unit.
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
