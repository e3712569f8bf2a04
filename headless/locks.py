"""Whether a file's owner still lives: who owns one keeps it open and locked, and the system unlocks what the dead
held, however they died."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import IO


def locked(file: IO[bytes]) -> bool:
    """Lock an open file, for as long as it is open. False where another process has it, or another open file of this
    one, or where the file system has no locks."""
    with suppress(OSError):
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False
