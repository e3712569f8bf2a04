"""How large the values of a call are: of what it was given, of what it put out, and of what it reached inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .dtypes import FP16_MAX
from .observe import Agree, alone, floating


@dataclass(frozen=True)
class Range:
    """How large the values of some tensors are."""

    finite: bool
    largest: float | None  # max |x|; None where there was nothing to measure or it is not finite

    def outcome(self, dtype: str, inside: Range) -> str:
        """Return the outcome of a call whose output has this range, as the report names it.

        dtype: what the call computed in.
        inside: the range of what the stage computed on the way, where that is watched.
        """
        if not self.finite or not inside.finite:
            return "non-finite"
        if dtype == "fp16" and max(self.largest or 0, inside.largest or 0) >= FP16_MAX:
            return "saturated"
        return "finite"


class Pending:
    """Numbers of a run that are read along with the next ranges that are measured, so that the host waits for none of
    them by itself."""

    def __init__(self) -> None:
        self._asked: dict[str, torch.Tensor] = {}
        self._known: dict[str, float] = {}

    def ask(self, name: str, value: torch.Tensor) -> None:
        """Have a number read, in place of an earlier one of that name. value: [], not negative."""
        self._asked[name] = value.detach().float()

    def take(self, name: str) -> float | None:
        """Return a number that was read, and forget it; None where none was."""
        return self._known.pop(name, None)

    def drop(self, name: str) -> None:
        """Forget a number, read or not."""
        self._asked.pop(name, None)
        self._known.pop(name, None)

    def asked(self) -> list[torch.Tensor]:
        return [*self._asked.values()]

    def known(self, numbers: list[float]) -> None:
        """Take what was asked for. numbers: in the order of `asked`."""
        self._known.update(zip(self._asked, numbers, strict=True))
        self._asked.clear()


def measured(
    given: Any,
    made: Any,
    inside: torch.Tensor | None = None,
    timestep: Any = None,
    agree: Agree = alone,
    pending: Pending | None = None,
) -> tuple[Range, Range, Range, float | None]:
    """Return the ranges of some inputs, of the output and of what is inside, and the timestep, all by one transfer
    to the host.

    pending: what else is read with them.
    """
    given, made, pending = floating(given), floating(made), pending or Pending()
    values = [bound.float() for tensor in (*given, *made) for bound in torch.aminmax(tensor.detach())]
    inside_at = len(values)
    if inside is not None:
        values.append(inside)
    if isinstance(timestep, torch.Tensor) and timestep.numel():
        values.append(timestep.detach().reshape(-1)[0].float())
    else:
        timestep = None
    own = len(values)
    values += pending.asked()
    numbers: list[float] = []
    if values:
        numbers = agree(torch.stack([value.to(values[0].device) for value in values])).tolist()
    pending.known(numbers[own:])
    numbers = numbers[:own]
    bounds, rest = numbers[:inside_at], numbers[inside_at:]
    return (
        _range_of(bounds[: 2 * len(given)]),
        _range_of(bounds[2 * len(given) :]),
        _range_of(rest[:1] if inside is not None else []),
        rest[-1] if timestep is not None else None,
    )


def _range_of(bounds: list[float]) -> Range:
    if not bounds:
        return Range(True, None)
    if all(abs(bound) < float("inf") for bound in bounds):  # false for NaN too
        return Range(True, max(map(abs, bounds)))
    return Range(False, None)
