"""Errors whose message is meant for the person at the canvas: what was found, what was expected, what to do."""


class BadFolder(ValueError):
    """A model folder that cannot be used."""


class BadSize(ValueError):
    """Width, height or frame count that the model cannot make."""


class BadInput(ValueError):
    """Something wired to a node does not fit."""


class BackendUnavailable(RuntimeError):
    """The compile backend that was asked for does not work here."""
