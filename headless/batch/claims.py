"""Which of several commands with one folder of outputs computes a job: a locked file for each job that runs.

The system takes a lock away when its owner ends, however that happens. Where a network folder has no locks, two
commands may compute the same job, and the first result stays.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ...trust.atomic_files import locked, temporary_in

SUFFIX = ".claim"


class Claims:
    """The claims of one command. folder: OUT/.running, which is there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, BinaryIO] = {}
        with temporary_in(folder) as (_, probe):
            self._has_locks = locked(probe)

    def take(self, content: str) -> bool:
        """Claim a job; False where another command has it. Raises OSError."""
        file = self._folder / f"{content}{SUFFIX}"
        while True:
            stream = file.open("ab")
            if self._has_locks and not locked(stream):
                stream.close()
                return False
            with suppress(FileNotFoundError):  # its last owner removed it between opening and locking
                if os.path.samestat(os.fstat(stream.fileno()), file.stat()):
                    self._held[content] = stream
                    return True
            stream.close()

    def release(self, content: str) -> None:
        if stream := self._held.pop(content, None):
            with stream, suppress(OSError):  # Windows removes no open file: an empty one stays, and is free
                (self._folder / f"{content}{SUFFIX}").unlink()

    def release_all(self) -> None:
        for content in [*self._held]:
            self.release(content)
