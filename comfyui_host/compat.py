"""Where this ComfyUI lacks a function that we use, or has another one: what needs it is off, says why, and no run ends.

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
    """What this ComfyUI has otherwise than we know it, by an error that our own code met as it asked ComfyUI; "" of all
    other errors, which are ComfyUI's, another pack's or the user's."""
    if isinstance(error, NotInComfyUI):
        return message_of(error)
    if not isinstance(error, _KINDS) or isinstance(error, Told):
        return ""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    while frames and frames[-1].co_name == "__getattr__":  # a module of PyTorch's looks for its parts
        frames.pop()
    if not frames or not frames[-1].co_filename.startswith(_HERE):
        return ""
    return Message("this ComfyUI is not as this pack knows it ({}: {})", type(error).__name__, shown(str(error), 200))


_HERE = what_changed.__code__.co_filename[: -len("compat.py")]  # as frames have it, however the pack was imported


def unless_changed(off: str, default: Any, *, kinds: tuple[type[Exception], ...] = ()) -> Callable[[F], F]:
    """Have a function that asks ComfyUI return a default where ComfyUI has changed, and the log tell it once.

    off: what does not work then. kinds: errors that tell of a change wherever they are raised, since ComfyUI is handed
    something of ours to use.
    """

    def decorated(function: F) -> F:
        @wraps(function)
        def asking(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                why = what_changed(error) or (isinstance(error, kinds) and f"{type(error).__name__}: {error}")
                if not why or getattr(error, "lost", ""):  # what was there before is gone
                    raise
                tell_once(off, why)
            return default

        return cast("F", asking)

    return decorated


@lru_cache(maxsize=256)
def tell_once(off: str, why: str) -> None:
    """Say in the log that something is off, and why."""
    logger.warning("Off: %s; %s", off, why)
