"""Progress of a run as lines on a terminal."""

from __future__ import annotations

from typing import TextIO

from .result import Progress


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
