"""What failures taught: pure data, so that a report or a profile costs no import of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..trust.message import Message
from .sums import Sums


@dataclass(frozen=True)
class Learned:
    """What failures taught about a module in one half-precision dtype."""

    wide: bool = False  # the residual stream is float32
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more
    wide_parts: tuple[str, ...] = ()  # blocks, or parts outside of blocks, of which every layer is wide
    everything: bool = False  # every layer of the module is wide
    unquantised: tuple[str, ...] = ()  # layers that stay in half precision where the others are quantised
    sums: Sums | None = None  # which linear layers accumulate in fp16, where that is asked for; None: not measured yet

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that do not run in half precision as the rest does."""
        return (*self.wide_parts, *self.islands)

    @property
    def to_share(self) -> Learned:
        """Return what a profile may hold of it: nothing that belongs to one run alone."""
        return replace(self, wide=False, whole_run_fp32=False)

    def with_component(self, name: str, its: Learned) -> Learned:
        """Return what this component and another one of the same run learned.

        name, its: the other component, and what it learned. Its parts have its name before theirs; where every layer
        of it is wide, it counts as one wide part.
        """
        islands, wide_parts = (tuple(f"{name}.{part}" for part in parts) for parts in (its.islands, its.wide_parts))
        return replace(
            self,
            islands=self.islands + islands,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            wide_parts=self.wide_parts + ((name,) if its.everything else wide_parts),
            unquantised=self.unquantised + tuple(f"{name}.{layer}" for layer in its.unquantised),
        )

    def in_words(self) -> list[str]:
        """Return a few words for each thing that a run does otherwise, apart from the stream."""
        said: list[str] = [EVERYTHING] if self.everything else []
        said += [Message("{} wide", parts_in_words(self.wide_parts))] if self.wide_parts else []
        said += [Message("{} in fp32", parts_in_words(self.islands))] if self.islands else []
        said += [Message("{} unquantised", parts_in_words(self.unquantised))] if self.unquantised else []
        return said


NOTHING = Learned()
EVERYTHING = Message("every layer wide")
STREAM = Message("stream in float32")
STAY = Message("the rest of the run in fp32")


def parts_in_words(modules: tuple[str, ...]) -> str:
    """Name up to three modules; of more, say how many there are."""
    return ", ".join(f"'{name}'" for name in modules) if len(modules) <= 3 else Message("{} parts", len(modules))


def covered(name: str, islands: Iterable[str]) -> bool:
    """Return whether a module is one of the islands, or inside one."""
    return any(covers(island, name) for island in islands)


def largest_of(islands: Iterable[str]) -> tuple[str, ...]:
    """Return the islands, each once, without those that are inside another one."""
    found = tuple(dict.fromkeys(islands))
    return tuple(name for name in found if not covered(name, set(found) - {name}))


def covers(part: str, name: str) -> bool:
    return f"{name}.".startswith(f"{part}.")
