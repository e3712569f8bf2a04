"""The gate for text that leaves for a terminal: whatever the command prints or logs, other people's words are in it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

from ..trust.text import for_terminal


class Cleaned(io.TextIOBase):
    """A stream that passes on text and line ends, and nothing that a terminal obeys. A carriage return may begin what
    is written at once, as lines of progress do."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str, /) -> int:
        again = text.startswith("\r") and not text.startswith("\r\n")
        self.stream.write("\r" + for_terminal(text[1:]) if again else for_terminal(text))
        return len(text)

    def flush(self) -> None:
        if not self.stream.closed:
            self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.stream.encoding


@contextmanager
def cleaned_output() -> Iterator[None]:
    """Both streams behind the gate. Characters that they cannot write become question marks."""
    with ExitStack() as restored:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(
                    errors="replace"
                )  # a console of Windows may have no arrow, and still be told the rest
            if stream is not None:  # pythonw has none
                restored.enter_context(redirect(Cleaned(stream)))
        yield
