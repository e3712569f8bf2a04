"""Where a residual stream runs: pure data, so that a family's spec costs no import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """Where a denoiser's residual stream runs, by module names."""

    blocks: str  # the ModuleList of blocks
    starts: tuple[str, ...]  # layers whose output starts the stream
    writers: tuple[str, ...]  # layers in each block whose output is added to the stream
    norms: tuple[str, ...]  # layer norms in each block that read the stream
    last_norms: tuple[str, ...]  # layer norms behind the last block that read it
    readers: tuple[str, ...] = ()  # modules in each block that compute in the dtype of what they are given

    def writer_names(self, module: Any) -> list[str]:
        """Return the full names in `module` of the layers that start the stream, and of all that write to it."""
        return [*self.starts, *self._in_blocks(module, self.writers)]

    def reader_names(self, module: Any) -> list[str]:
        """Return the full names of the readers in `module`."""
        return self._in_blocks(module, self.readers)

    def norm_names(self, module: Any) -> list[str]:
        """Return the full names of all norms in `module` that read the stream."""
        return [*self._in_blocks(module, self.norms), *self.last_norms]

    def _in_blocks(self, module: Any, inner: tuple[str, ...]) -> list[str]:
        blocks = dict(module.get_submodule(self.blocks).named_children())
        return [f"{self.blocks}.{block}.{name}" for block in blocks for name in inner]
