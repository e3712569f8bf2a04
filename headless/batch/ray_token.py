"""The token that a Ray asks for: whoever reads it can run anything as this user. Ray itself writes it readable."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from stat import S_ISVTX

from ..errors import HostError

MODE, TOKEN, PLACE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # variables that Ray reads


def token_file() -> Path | None:
    """Where Ray reads its token; None where it has it from a variable."""
    if os.environ.get(TOKEN):
        return None
    return Path(os.environ.get(PLACE) or Path.home() / ".ray" / "auth_token")


def keep_private(*, make: bool) -> None:
    """Have the token be this user's alone before Ray starts, and closed to others where they could read or change it.

    make: one, where there is none.

    Raises:
        HostError: it is somebody else's, or cannot be closed or written.
    """
    file = token_file()
    if file is None or os.environ.get(MODE, "token").lower() != "token":
        return
    try:
        if make and not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(file)
        elif file.exists() and os.name == "posix":
            _close(file.parent, 0o022)  # who may write in it may put another token there
            _close(file, 0o077)
    except OSError as error:
        raise HostError(
            f"Ray's token {file} is not safe, and cannot be made so: {error.strerror or error}. Others could connect "
            f"to the Ray and run code as you. Delete that file, and its folder where others can write in it; or set "
            f"{PLACE} to a file of your own, or {TOKEN} to the token."
        ) from error


def _make(file: Path) -> None:
    """A file in one step, so that nobody reads it half, or before it is closed to them."""
    temporary = file.with_name(f".{file.name}-{secrets.token_hex(8)}")
    temporary.touch(0o600, exist_ok=False)
    with temporary.open("r+", encoding="ascii") as stream:
        stream.write(secrets.token_hex(32))
    temporary.replace(file)


def _close(path: Path, bits: int) -> None:
    """Take rights from others. Raises OSError, also where the path is another user's, who could take them back."""
    found = path.stat()
    if path.is_dir() and found.st_uid in (0, os.geteuid()) and (not found.st_mode & bits or found.st_mode & S_ISVTX):
        return  # /tmp, for one, where each can remove but what is his
    if found.st_uid != os.geteuid():
        raise PermissionError(None, f"{path} belongs to another user (number {found.st_uid})")
    if found.st_mode & bits:
        path.chmod(found.st_mode & 0o777 & ~bits)
