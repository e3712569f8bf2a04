"""Bytes that a run copies between main memory and the card, and how often the host waits for a value from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TO_CARD, TO_HOST, WAITS = "bytes_to_card", "bytes_to_host", "waits"
_HOST = "cpu"


class Moves(TorchDispatchMode):
    """Counts inside `with`, in its thread. Compiled code runs unchanged, and is not compiled again.

    card: its device type. For "cpu", nothing is counted.
    """

    def __init__(self, card: str):
        super().__init__()
        self._ways = {} if card == _HOST else {(_HOST, card): TO_CARD, (card, _HOST): TO_HOST}
        self.counts: Counter[str] = Counter({TO_CARD: 0, TO_HOST: 0, WAITS: 0})

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            self.counts[WAITS] += args[0].device.type != _HOST
        elif name in ("_to_copy", "copy_"):
            source: torch.Tensor = args[1] if name == "copy_" else args[0]
            if way := self._ways.get((source.device.type, made.device.type)):
                self.counts[way] += made.nbytes
        return made
