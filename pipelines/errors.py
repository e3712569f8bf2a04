"""Errors whose message is meant for the person at the canvas: what was found, what was expected, what to do."""

from __future__ import annotations

import errno

from ..trust.message import Message, Told

_HTTP_LIBRARIES = {"httpcore", "httpcore2", "httpx", "httpx2", "requests", "urllib3"}  # by huggingface_hub's version


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

    @classmethod
    def of(cls, error: Exception, hub_id: str, revision: str) -> HubError:
        """What huggingface_hub, its HTTP library or the disk raised, in words."""
        from huggingface_hub import errors

        if isinstance(error, cls):
            return error
        if isinstance(error, (errors.LocalEntryNotFoundError, ValueError)) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        status = getattr(getattr(error, "response", None), "status_code", 0)
        libraries = {base.__module__.split(".")[0] for base in type(error).__mro__}
        again = "Run it again: files that are complete are kept."
        unreachable = False
        if isinstance(error, errors.GatedRepoError):
            text = Message(
                "'{}' is gated. Accept its terms on its page, and set HF_TOKEN to a token of that account.", hub_id
            )
        elif isinstance(error, errors.RepositoryNotFoundError):
            text = Message(
                "There is no '{}' on the hub, or it is private or gated. Check the spelling; where it is private, set "
                "HF_TOKEN to a token that may read it.",
                hub_id,
            )
        elif isinstance(error, errors.RevisionNotFoundError):
            text = Message(
                "'{}' has no revision '{}'. Write a branch (main), a tag or a commit that it has.", hub_id, revision
            )
        elif status in (401, 403):
            text = Message(
                "The hub refused '{}' (HTTP {}). Check HF_TOKEN: it may be wrong, or may not read this.", hub_id, status
            )
        elif status in (404, 410):
            text = Message(
                "A file of '{}' is gone from the hub (HTTP {}). Run it again, or name another revision.", hub_id, status
            )
        elif status:
            unreachable = True
            text = Message("The hub cannot serve '{}' now (HTTP {}). {}", hub_id, status, again)
        elif getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            text = Message("The disk is full. Make room, or set HF_HOME to a folder on a larger disk. {}", again)
        elif libraries & _HTTP_LIBRARIES or isinstance(error, (ConnectionError, TimeoutError)):
            unreachable = True
            text = Message(
                "The hub cannot be reached for '{}' ({}). Check the network, a proxy, and HF_ENDPOINT. {}",
                hub_id,
                type(error).__name__,  # its text may name an address with a token
                again,
            )
        elif isinstance(error, OSError) and error.errno is None:  # http_get's own, for a file of another length
            text = Message("A file of '{}' ended early, or too late. {}", hub_id, again)
        elif isinstance(error, OSError):
            text = Message("The cache cannot be written ({}). Set HF_HOME to a folder that can. {}", error, again)
        else:
            text = Message("'{}' could not be downloaded ({}). {}", hub_id, type(error).__name__, again)
        explained = cls(text)
        explained.unreachable = unreachable
        return explained


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is a user's interrupt: ComfyUI's, an Exception until 2026, or the host's."""
    return type(error).__name__ in ("InterruptProcessingException", "Interrupted")
