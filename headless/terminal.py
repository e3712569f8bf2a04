"""The gate for text that leaves for a terminal: whatever the command prints or logs, other people's words are in it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import TextIO

from ..trust.text import for_terminal
from .errors import ExitCode


class NobodyReadsError(SystemExit):
    """Whoever read the output has gone (`| head`): the command ends, with all that it has to put in order."""


class Cleaned(io.TextIOBase):
    """A stream that passes on text and line ends, and nothing that a terminal obeys. A carriage return may begin what
    is written at once, as lines of progress do."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str, /) -> int:
        again = text.startswith("\r") and not text.startswith("\r\n")
        with self._read():
            self.stream.write("\r" + for_terminal(text[1:]) if again else for_terminal(text))
        return len(text)

    def flush(self) -> None:
        if not self.stream.closed:
            with self._read():
                self.stream.flush()

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Raises NobodyReadsError. What is still in the stream's buffer then, and what follows, goes nowhere."""
        try:
            yield
        except BrokenPipeError:
            with suppress(OSError), Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())
            raise NobodyReadsError(ExitCode.NOBODY_READS) from None

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
    """Both streams behind the gate. Characters that they cannot write become question marks. One that is closed, as
    `>&-` does it and pythonw, goes nowhere."""
    with ExitStack() as restored:
        _take_closed_descriptors()
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if isinstance(stream, io.TextIOWrapper):  # a console of Windows may have no arrow, and be told the rest
                stream.reconfigure(errors="replace")
            if stream is None:
                stream = restored.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
            restored.enter_context(redirect(Cleaned(stream)))
        yield


def _take_closed_descriptors() -> None:
    """Else a file that is opened later gets the number of a standard stream, and libraries write messages into it."""
    with suppress(OSError):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(number)
