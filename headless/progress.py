"""Progress of a run as lines on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from .hosts.result import Progress


class ProgressPrinter:
    """Prints each node as it starts, and on a terminal its steps too. A context manager that ends the last line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.on_terminal = stream.isatty()
        self.node = ""
        self.open_line = False

    def __enter__(self) -> ProgressPrinter:
        return self

    def __exit__(self, *_error: object) -> None:
        self._end_line()

    def __call__(self, progress: Progress) -> None:
        if progress.node != self.node:
            self._end_line()
            self.node = progress.node
            print(progress.node, file=self.stream, flush=True)
        if self.on_terminal and progress.maximum:
            line = f"\r  {progress.value or 0:g} of {progress.maximum:g}"
            print(line, end="", file=self.stream, flush=True)
            self.open_line = True

    def _end_line(self) -> None:
        if self.open_line:
            print(file=self.stream, flush=True)
            self.open_line = False


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
