"""-inf and the ends of dtypes that belong into an output: a mask has them in float32 too, at the same places."""

from __future__ import annotations

from typing import Any

import torch

from .dtypes import DTYPES
from .observe import floating

_ENDS = tuple(torch.finfo(dtype).max for dtype in DTYPES.values())
_KEPT = 8  # outputs whose places are remembered: a stage may be called with several shapes in turn
Places = tuple[torch.Tensor, ...]  # int8: -1 and 1 where a value is at the lower and the upper end, else 0


def only_minus_inf(output: Any) -> bool:
    """Return whether -inf is all that is not finite in an output."""
    return not any(bool(((tensor != tensor) | (tensor == torch.inf)).any()) for tensor in floating(output))


def places(output: Any, dtype: str) -> Places | None:
    """Return where the values of a call in `dtype` are beyond it; None where they are NaN or +inf: no mask has those.

    In "fp32", which holds more, those are meant that are -inf, or exactly the end of some dtype.
    """
    if not only_minus_inf(output):
        return None
    found: list[torch.Tensor] = []
    for tensor in floating(output):
        at_end = tensor.isneginf()
        if dtype == "fp32":
            for end in _ENDS:
                at_end = at_end | (tensor.abs() == end)
        else:
            at_end = at_end | (tensor.abs() >= torch.finfo(DTYPES[dtype]).max)
        found.append(torch.where(at_end, tensor.sign(), 0).to(torch.int8))
    return tuple(found)


class Extremes:
    """The places of a stage's outputs that were found to be right."""

    def __init__(self) -> None:
        self._known: list[Places] = []

    def known(self, now: Places | None) -> bool:
        return now is not None and any(_alike(now, known) for known in self._known)

    def learn(self, in_half: Places | None, in_fp32: Any) -> bool:
        """Return whether the output in fp32 has the same at the same places, and remember it."""
        right = places(in_fp32, "fp32") if in_half is not None else None
        if in_half is None or right is None or not _alike(in_half, right):
            return False
        self._known = [*self._known, in_half][-_KEPT:]
        return True


def _alike(one: Places, other: Places) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
