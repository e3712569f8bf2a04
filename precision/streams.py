"""Where a residual stream runs: pure data, so that a family's spec costs no import of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """Where a denoiser's residual stream runs, by module names."""

    blocks: str  # the ModuleList of blocks
    embed: str  # its output starts the stream
    writers: tuple[str, ...]  # linear layers in each block whose output is added to the stream
    norms: tuple[str, ...]  # layer norms in each block that read the stream
    last_norms: tuple[str, ...]  # layer norms behind the last block that read it
