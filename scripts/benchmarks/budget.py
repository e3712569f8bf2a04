"""The time that a stage may take: rounds are made until it is used, and what would not fit is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

SECONDS = 420  # a stage's. With what starts and ends around it, less than 8 minutes
LEAST_ROUNDS = 2  # a median needs more than one
PREPARING = 0.7  # of a stage's time: no contestant begins to compile after that


class Budget:
    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._started = clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._started

    def too_late(self) -> str:
        """Why nothing more is to be prepared; "" while there is time."""
        if self.spent < PREPARING * self.seconds:
            return ""
        return f"left out: {self.spent:.0f} of the stage's {self.seconds:.0f} s were over"

    def rounds(self, seconds: Iterable[float], most: int, *, share: float = 1.0) -> int:
        """How many rounds fit in a share of what is left, but for the one that is thrown away.

        seconds: that each contestant takes.
        """
        left = share * (self.seconds - self.spent)
        fitting = left / max(sum(seconds), 1e-9) - 1
        return int(min(max(fitting, LEAST_ROUNDS), max(most, LEAST_ROUNDS)))
