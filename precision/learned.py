"""What failures taught: pure data, so that a report or a profile costs no import of torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Learned:
    """What failures taught about a module in one half-precision dtype."""

    wide: bool = False  # the residual stream is float32
    islands: tuple[str, ...] = ()  # blocks, or parts outside of blocks, that run in fp32
    whole_run_fp32: bool = False  # half precision is not tried any more
    wide_parts: tuple[str, ...] = ()  # blocks, or parts outside of blocks, of which every layer is wide
    everything: bool = False  # every layer of the module is wide

    @property
    def parts(self) -> tuple[str, ...]:
        """That do not run in half precision as the rest does."""
        return (*self.wide_parts, *self.islands)

    @property
    def to_share(self) -> Learned:
        """What a profile may hold of it."""
        return replace(self, wide=False, whole_run_fp32=False)

    def with_component(self, name: str, its: Learned) -> Learned:
        """What this one and another component of the same run learned. Its parts have the component's name before
        theirs; where all of it is wide, it is such a part itself."""
        islands, wide_parts = (tuple(f"{name}.{part}" for part in parts) for parts in (its.islands, its.wide_parts))
        return replace(
            self,
            islands=self.islands + islands,
            whole_run_fp32=self.whole_run_fp32 or its.whole_run_fp32,
            wide_parts=self.wide_parts + ((name,) if its.everything else wide_parts),
        )

    def in_words(self) -> list[str]:
        """A few for each thing that a run does otherwise, apart from the stream."""
        said = [EVERYTHING] if self.everything else []
        said += [f"{parts_in_words(self.wide_parts)} wide"] if self.wide_parts else []
        return said + ([f"{parts_in_words(self.islands)} in fp32"] if self.islands else [])


NOTHING = Learned()
EVERYTHING = "every layer wide"
STREAM = "stream in float32"
STAY = "the rest of the run in fp32"


def parts_in_words(modules: tuple[str, ...]) -> str:
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
