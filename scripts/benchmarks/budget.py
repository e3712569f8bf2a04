"""The time limit of a stage: rounds run until it is used up, and contestants that do not fit are left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

SECONDS = 420  # per stage; with start and end, less than 8 minutes
LEAST_ROUNDS = 2  # a median needs more than one
PREPARING = 0.7  # share of a stage's time; later no contestant starts to compile


class Budget:
    def __init__(self, seconds: float = SECONDS, clock: Callable[[], float] = time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._started = clock()

    @property
    def spent(self) -> float:
        return self._clock() - self._started

    def too_late(self) -> str:
        """Return the reason why nothing more is prepared; "" while there is time."""
        if self.spent < PREPARING * self.seconds:
            return ""
        return f"left out: {self.spent:.0f} of the stage's {self.seconds:.0f} s were over"

    def rounds(self, seconds: Iterable[float], most: int, *, share: float = 1.0) -> int:
        """Return the number of rounds that fit in a share of the remaining time, besides the warm-up round.

        seconds: of each contestant.
        """
        left = share * (self.seconds - self.spent)
        fitting = left / max(sum(seconds), 1e-9) - 1
        return int(min(max(fitting, LEAST_ROUNDS), max(most, LEAST_ROUNDS)))
