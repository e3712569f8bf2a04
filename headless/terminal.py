"""The gate for text that leaves for a terminal: whatever the command prints or logs, other people's words are in it."""

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
    """A stream that passes on text and line ends, and nothing that a terminal obeys. A carriage return may begin what
    is written at once, as lines of progress do."""

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
    """Both streams behind the gate. Characters that they cannot write become question marks. One that is closed, as
    `>&-` does it and pythonw, goes nowhere."""
    with ExitStack() as restored:
        _take_closed_descriptors()
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if isinstance(stream, io.TextIOWrapper):  # a console of Windows may have no arrow, and be told the rest
                stream.reconfigure(errors="replace")
            if stream is None:
                stream = restored.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            restored.enter_context(redirect(cast("TextIO", Cleaned(stream))))
        yield


def drop_output() -> None:
    """What is still in the streams' buffers, and what follows, goes nowhere: whoever read it has gone."""
    with Path(os.devnull).open("wb") as nowhere:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                os.dup2(nowhere.fileno(), stream.fileno())


def _take_closed_descriptors() -> None:
    """Else a file that is opened later gets the number of a standard stream, and libraries write messages into it."""
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
