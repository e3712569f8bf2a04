"""The filter for terminal output: whatever the command prints or logs may contain foreign text."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from ..trust.message import for_terminal


class Cleaned:
    """A stream that removes control characters, except line ends. A carriage return may start a write, as progress
    lines do."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        again = text.startswith("\r") and not text.startswith("\r\n")
        self.stream.write("\r" + for_terminal(text[1:]) if again else for_terminal(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextmanager
def cleaned_output() -> Iterator[None]:
    """Filter stdout and stderr. Characters that they cannot encode become question marks. A closed stream (`>&-`,
    pythonw) discards its text."""
    with ExitStack() as restored:
        _take_closed_descriptors()
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if isinstance(stream, io.TextIOWrapper):  # a Windows console may lack single characters
                stream.reconfigure(errors="replace")
            if stream is None:
                stream = restored.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            restored.enter_context(redirect(cast("TextIO", Cleaned(stream))))
        yield


def drop_output() -> None:
    """Discard the streams' buffers and all later output: the reader is gone."""
    with Path(os.devnull).open("wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(nowhere.fileno(), stream.fileno())


def _take_closed_descriptors() -> None:
    """Occupy closed standard descriptors. Otherwise a file opened later gets one, and libraries write messages to
    it."""
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
