"""Changes in ComfyUI: if a function that we use is missing or different, its feature is off and says why; no run fails.

docs/comfyui-surface.md lists what we use.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from ..trust.message import Message, Told, message_of, shown

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_KINDS = (AttributeError, LookupError, TypeError)


class NotInComfyUI(Told):
    """This ComfyUI lacks something that a feature needs."""


def what_changed(error: BaseException) -> str:
    """Return what is different in this ComfyUI, for an error that our own code met while using it; "" for all other
    errors, which are ComfyUI's, another pack's or the user's."""
    if isinstance(error, NotInComfyUI):
        return message_of(error)
    if not isinstance(error, _KINDS) or isinstance(error, Told):
        return ""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and frames[-1].co_name == "__getattr__":  # the attribute lookup of a torch.nn.Module
        frames.pop()
    if not frames or not frames[-1].co_filename.startswith(_HERE):
        return ""
    return Message("this version of ComfyUI is not supported ({}: {})", type(error).__name__, shown(str(error), 200))


_HERE = what_changed.__code__.co_filename[: -len("compat.py")]  # as frames name it, however the pack was imported


def unless_changed(off: str, default: Any, *, kinds: tuple[type[Exception], ...] = ()) -> Callable[[F], F]:
    """Make a function that uses ComfyUI return a default if ComfyUI has changed; the log says so once.

    off: the feature that does not work then. kinds: errors that mean a change wherever they are raised, for functions
    that pass ComfyUI an object of ours.
    """

    def decorated(function: F) -> F:
        @wraps(function)
        def asking(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                why = what_changed(error) or (isinstance(error, kinds) and f"{type(error).__name__}: {error}")
                if not why or getattr(error, "lost", ""):  # lost: state that cannot be restored
                    raise
                tell_once(off, why)
            return default

        return cast("F", asking)

    return decorated


@lru_cache(maxsize=256)
def tell_once(off: str, why: str) -> None:
    """Log once that a feature is off, and why."""
    logger.warning("Off: %s; %s", off, why)
