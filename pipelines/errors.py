"""Errors whose message is meant for the person at the canvas: what was found, what was expected, what to do."""

from __future__ import annotations

from ..trust.message import Told


class BadFolder(Told, ValueError):
    """A model folder that cannot be used."""


class LibraryFailed(Told, RuntimeError):
    """A Python library that does not work here, whatever the model."""


class BadSize(Told, ValueError):
    """Width, height or frame count that the model cannot make."""


class BackendUnavailable(Told, RuntimeError):
    """The compile backend that was asked for does not work here."""


class DeviceGone(Told, RuntimeError):
    """A device that gives no answer any more."""


class BadLora(Told, ValueError):
    """A LoRA file that cannot be used with this model."""


class BadCompiled(Told, ValueError):
    """A file of compiled code that cannot be used."""


class HubError(Told, RuntimeError):
    """A model that cannot be had from the hub."""

    unreachable = False  # the hub gave no answer, so that a copy from before may be used


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is a user's interrupt: ComfyUI's, an Exception until 2026, or the host's."""
    return type(error).__name__ in ("InterruptProcessingException", "Interrupted")
