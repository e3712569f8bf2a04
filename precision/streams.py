"""Where a residual stream runs: pure data, so that a family's spec costs no import of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stream:
    """Where a denoiser's residual stream runs, by module names."""

    blocks: str  # the ModuleList of blocks
    embed: str  # its output starts the stream
    writers: tuple[str, ...]  # linear layers in each block whose output is added to the stream
    norms: tuple[str, ...]  # layer norms in each block that read the stream
    last_norms: tuple[str, ...]  # layer norms behind the last block that read it

    def writer_names(self, module: Any) -> list[str]:
        """Full names of the writers in `module`."""
        return self._in_blocks(module, self.writers)

    def norm_names(self, module: Any) -> list[str]:
        """Full names of all norms in `module` that read the stream."""
        return [*self._in_blocks(module, self.norms), *self.last_norms]

    def _in_blocks(self, module: Any, inner: tuple[str, ...]) -> list[str]:
        blocks = dict(module.get_submodule(self.blocks).named_children())
        return [f"{self.blocks}.{block}.{name}" for block in blocks for name in inner]
