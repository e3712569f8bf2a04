"""What failures taught: pure data, so that a report or a profile costs no import of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Learned:
    """What failures taught about a module in one half-precision dtype."""

    wide: bool = False  # the residual stream is float32
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more

    @property
    def to_share(self) -> Learned:
        """What a profile may hold of it."""
        return Learned(islands=self.islands)


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
