"""What failures taught: pure data, so that a report or a profile costs no import of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# What a profile may say of a residual stream's peak. The fold by 2^-12 that the upper end leads to is level, whatever
# the stream reaches in truth (docs/folding.md).
LEAST_PEAK, MOST_PEAK = 1e-6, 65504 * 2.0**10


@dataclass(frozen=True)
class Learned:
    """What failures taught about a module in one half-precision dtype."""

    stream_peak: float | None = None  # max |x| of the residual stream in fp32; None: not measured
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more

    @property
    def to_share(self) -> Learned:
        """What a profile may hold of it."""
        fits = self.stream_peak is not None and LEAST_PEAK <= self.stream_peak <= MOST_PEAK
        return Learned(self.stream_peak if fits else None, self.islands)


NOTHING = Learned()


def named(modules: tuple[str, ...]) -> str:
    """Up to three names, or how many."""
    return ", ".join(f"'{name}'" for name in modules) if len(modules) <= 3 else f"{len(modules)} parts"


def covered(name: str, islands: Iterable[str]) -> bool:
    """Whether a module is one of the islands, or in one."""
    return any(covers(island, name) for island in islands)


def largest_of(islands: Iterable[str]) -> tuple[str, ...]:
    """Without those that are in another, each once."""
    found = tuple(dict.fromkeys(islands))
    return tuple(name for name in found if not covered(name, set(found) - {name}))


def covers(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")
