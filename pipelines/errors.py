"""Errors with messages for users: what was found, what was expected, what to do."""

from __future__ import annotations

from ..trust.message import Told


class BadFolder(Told, ValueError):
    """A model folder that cannot be used."""


class LibraryFailed(Told, RuntimeError):
    """A Python library that does not work here, with any model."""


class BadSize(Told, ValueError):
    """A width, height or frame count that the model cannot make."""


class BackendUnavailable(Told, RuntimeError):
    """The requested compile backend or attention kernel does not work here."""


class DeviceGone(Told, RuntimeError):
    """A device that no longer responds."""


class BadLora(Told, ValueError):
    """A LoRA file that cannot be used with this model."""


class BadCompiled(Told, ValueError):
    """A file of compiled code that cannot be used."""


class HubError(Told, RuntimeError):
    """A model that cannot be downloaded from the hub."""

    unreachable = False  # the hub did not answer, so an older copy in the cache may be used


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is a user's interrupt: ComfyUI's (an Exception until 2026) or the host's."""
    return type(error).__name__ in ("InterruptProcessingException", "Interrupted")
