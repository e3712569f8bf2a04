"""The calls of one network that a stage is made of: how many there will be, and which one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...precision.shared import PROCESS_GATE
from ...trust.message import Message

CallTold = Callable[[int, int, str], None]  # calls done, calls in all, a line of text; may raise, to interrupt


@dataclass
class Calls:
    """Tells each call of a stage before it runs, and when the last one is done: an interrupt waits for one at most,
    and so do other threads that want to load."""

    what: str  # a Message's template: "decoding part {} of {}", of a call and how many there are
    told: CallTold
    total: int = 0  # set before the first call; 0 where that cannot be told
    done: int = 0

    def telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            self._tell(self.done + 1)
            PROCESS_GATE.yield_()
            made = call(*args, **kwargs)
            self.done += 1
            if self.done >= self.total:
                self._tell(self.done)
            return made

        return told

    def tell(self, text: str) -> None:
        """Tell what takes long within a call."""
        self.told(self.done, self.total, text)

    def _tell(self, at: int) -> None:
        total = max(self.total, at)
        self.told(self.done, total, Message(self.what, at, total))
