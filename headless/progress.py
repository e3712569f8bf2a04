"""Progress of a run as lines on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from .hosts.result import ProgressCallback, RunProgress


@contextmanager
def printed_progress(stream: TextIO) -> Iterator[ProgressCallback]:
    """Prints each node as it starts, and on a terminal its steps too."""
    node, open_line = "", False

    def tell(progress: RunProgress) -> None:
        nonlocal node, open_line
        if progress.node != node:
            print(f"\n{progress.node}" if open_line else progress.node, file=stream, flush=True)
            node, open_line = progress.node, False
        if stream.isatty() and progress.maximum:
            print(f"\r  {progress.value or 0:g} of {progress.maximum:g}", end="", file=stream, flush=True)
            open_line = True

    try:
        yield tell
    finally:
        if open_line:
            print(file=stream, flush=True)


@contextmanager
def libraries_without_bars() -> Iterator[None]:
    """diffusers and transformers draw none while they read or write weights: nodes tell their own progress."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as restored:
        for library in (of_diffusers, of_transformers):
            if library.is_progress_bar_enabled():
                library.disable_progress_bar()
                restored.callback(library.enable_progress_bar)
        yield
