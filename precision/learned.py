"""What failures taught: pure data, so that a report or a profile costs no import of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Learned:
    """What failures taught about a module in one half-precision dtype."""

    stream_peak: float | None = None  # max |x| of the residual stream in fp32; None: not measured
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more


NOTHING = Learned()


def named(modules: tuple[str, ...]) -> str:
    """Up to three names, or how many."""
    return ", ".join(f"'{name}'" for name in modules) if len(modules) <= 3 else f"{len(modules)} parts"
