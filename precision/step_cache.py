"""A step cache: steps in which most of a denoiser is not computed, but extrapolated from what it gave in steps before.

It stands in shells of the attempt and of the rerun, and the denoiser that both share stays as it is. A call's values
are kept when the guard has taken its output, and not before: an attempt that fails leaves nothing behind, and the rerun
computes everything, and leaves what it computed. course.py keeps a run's account, drift.py decides which steps are
cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from .course import Course, Guidance
from .drift import FIRST, LAST, ORDER, CachePolicy, Choice, coefficients
from .observe import floating
from .shells import Make, replaced, with_forward
from .skips import Part, Role
from .snapshot import Snapshot, copies

_SAMPLED = 7  # a signal is every so many-th value of the first part's output: it is only measured


@dataclass(frozen=True)
class _Entry:
    """What a computed step leaves for those after it."""

    at: int  # step
    signal: torch.Tensor  # [values], float32
    given: torch.Tensor  # in place of the last part: what it added to the first one's output, or what it put out

    def copied(self, at: int) -> _Entry:
        return _Entry(at, self.signal.clone(), self.given.clone())


@dataclass
class _Call:
    """One call of the denoiser."""

    entries: tuple[_Entry, ...]  # to extrapolate from; none: everything is computed
    choice: Choice | None = None
    decides: bool = False  # it is a step's first one, by whose signal the next step is decided
    skips: bool = False  # the parts behind the first one are left out
    first: Any = None  # the first part's output
    signal: torch.Tensor | None = None
    left: _Entry | None = None


@dataclass
class _Turn:
    """The calls that one call of the guard makes: one, or one for each half of a batch."""

    calls: list[_Call] = field(default_factory=list)
    apart: list[torch.Tensor] = field(default_factory=list)


_Change = Callable[[torch.Tensor], torch.Tensor]


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class StepCache:
    """What one denoiser has left of its steps in a run.

    parts: of the denoiser, in the order in which they are called.
    guidance: what the sampler makes of a step's outputs.
    own: returns the part of what the first one is given that it computes with in this process.
    whole: returns a call's whole output, of what is made of it in this process.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        course: Course,
        guidance: Guidance = (1.0,),
        own: _Change = _as_it_is,
        whole: _Change = _as_it_is,
    ):
        self.course = course
        self._guidance = guidance
        self._own, self._whole = own, whole
        self._parts = parts
        self._left: dict[int, tuple[_Entry, ...]] = {}  # call of a step → of the latest steps
        self._turn = _Turn()
        self._call = _Call(())
        self._step, self._before = 0, 0  # the present step, and how many of its calls are done

    def attempt(self, run: Callable[..., Any], made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """Return what is called in place of an attempt.

        run: a module, or a partial function of one.
        made: what else is to be made of a call, as in halves.
        """
        return self._starting(made(partial(self._attempted, self._in_place(run))))

    def rerun(self, run: torch.nn.Module, made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
        """Return the same for the rerun, in which nothing is skipped."""
        calls = self._starting(made(partial(self._computed, self._in_place(run))), again=True)
        return with_forward(run, calls)

    def keep(self, *, taken: bool = True) -> bool:
        """Keep what the latest call left. Returns whether it was cached.

        taken: its output was finite. Where the guard lets through what is not, nothing of it is kept.
        """
        self._advance()
        if not taken:
            self._turn = _Turn([_Call((), choice=call.choice) for call in self._turn.calls])
            self.course.stop("the guard let an output through that is not finite, or does not fit")
        elif any(call.left is None and call.choice is not Choice.REUSE for call in self._turn.calls):
            self.course.stop("the way in which it runs here hides what would be extrapolated")
        for number, call in enumerate(self._turn.calls, self._before):
            if call.left:
                self._left[number] = (*self._left.get(number, ()), call.left)[-ORDER - 1 :]
        self._before += len(self._turn.calls)
        self.course.keep(self._turn.apart)
        cached = any(call.choice is Choice.REUSE for call in self._turn.calls)
        self._turn, self._call = _Turn(), _Call(())
        return cached

    def forget(self) -> None:
        """Begin anew, since later calls are made otherwise: the latest one, which will be made again, is computed."""
        self._advance()
        self.course.recompute(whole=not self._before)
        self._left.clear()
        self._turn = _Turn()

    def release(self) -> None:
        """Let go of what is kept."""
        self._left.clear()

    def fill(self, calls: int) -> None:
        """Keep what the latest call left as if it were of as many steps, and calls of each, as a run ever keeps."""
        (call,) = self._turn.calls
        assert call.left is not None
        left, self._turn, self._call = call.left, _Turn(), _Call(())
        steps = range(ORDER + 1)
        self._left = {number: tuple(left.copied(at) for at in steps) for number in range(calls)}

    def _advance(self) -> None:
        self.course.calls(self)
        if self._step != self.course.ledger.at:
            self._step, self._before = self.course.ledger.at, 0

    def _starting(self, call: Callable[..., Any], again: bool = False) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            self._turn = _Turn()
            self._advance()
            if again:
                self.course.recompute(whole=not self._before)
            made = call(*args, **kwargs)
            self.course.compare(self._turn.apart, self._guidance)
            return made

        return started

    def _computed(self, shell: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._call = _Call(())
        self._turn.calls.append(self._call)
        return shell(*args, **kwargs)

    def _attempted(self, shell: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._call = self._begun()
        self._turn.calls.append(call)
        before = Snapshot(args, kwargs) if call.choice is Choice.COMPUTE else None  # the first part is called once
        made = shell(*args, **kwargs)
        if before is None:
            return made
        before.restore(waits=False)
        cached, call.skips, call.entries = made, False, ()
        made = shell(*args, **kwargs)
        self._turn.apart.append(self._whole(floating(cached)[0].float() - floating(made)[0].float()))
        return made

    def _begun(self) -> _Call:
        """Return the present call, with what becomes of it where it may be cached."""
        number = self._before + len(self._turn.calls)
        left = self._left.get(number, ())
        follows = number == 0 or self.course.chosen is not None
        if not (follows and len(left) > ORDER and self.course.ledger.may_reuse):
            return _Call(())
        return _Call(left, self.course.choose(), decides=number == 0, skips=True)

    def _in_place(self, run: Any) -> Any:
        makes: dict[str, Make] = {part.name: partial(self._stand_in, part) for part in self._parts}
        if isinstance(run, partial):
            module, *rest = run.args
            return partial(run.func, replaced(module, makes), *rest, **run.keywords)
        return replaced(run, makes)

    def _stand_in(self, part: Part, module: torch.nn.Module) -> torch.nn.Module:
        act = {Role.FIRST: self._first, Role.SKIPPED: self._skipped, Role.LAST: self._last}[part.role]
        return with_forward(module, partial(act, part, module))

    def _first(self, _part: Part, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call.first is not None:  # the same call again, in full
            return call.first
        made = call.first = module(*args, **kwargs)
        self.course.count(skipped=False)
        with torch._C.DisableTorchFunction():
            given = self._own(args[0] if args else kwargs["hidden_states"])
            call.signal = _sampled(_hidden(made)) - _sampled(given)
            if call.decides:
                expected = self._extrapolated([entry.signal for entry in call.entries])
                self.course.signal((expected - call.signal).norm() / call.signal.norm())
        return made

    def _skipped(self, _part: Part, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._call.skips:
            self._count_skip()
            return self._call.first
        self.course.count(skipped=False)
        return module(*args, **kwargs)

    def _last(self, _part: Part, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._call
        if call.skips:
            self._count_skip()
            with torch._C.DisableTorchFunction():
                first = _hidden(call.first)
                hidden = self._extrapolated([entry.given for entry in call.entries])
                return _with_hidden(call.first, (hidden + first.float()).to(first.dtype))
        self.course.count(skipped=False)
        made = module(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            given, signal = _hidden(made) - _hidden(call.first), call.signal
            assert signal is not None
            call.left = _Entry(self._step, signal, given.detach())
        return made

    def _count_skip(self) -> None:
        """Where the call is made again in full, nothing was left out."""
        if self._call.choice is Choice.REUSE:
            self.course.count(skipped=True)

    def _extrapolated(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values at the present step, in float32."""
        by = coefficients([entry.at for entry in self._call.entries], self._step)
        made = values[0].float() * by[0]
        for value, factor in zip(values[1:], by[1:], strict=True):
            made.add_(value, alpha=factor)
        return made


class _Comparing(Course):
    """That of a run which compares each step that it could cache."""

    def __init__(self) -> None:
        super().__init__(CachePolicy(), FIRST + LAST + 1)
        self.ledger = replace(self.ledger, at=FIRST)

    def choose(self) -> Choice:
        return Choice.COMPUTE


def compared(run: Any, parts: Sequence[Part], calls: int) -> Callable[..., Any]:
    """Return what makes a call of a denoiser on "meta" as a step cache has it made when it takes most memory: with all
    that the cache ever keeps, it is extrapolated, computed, and compared.

    run, parts: as a StepCache has them.
    calls: of a step, of which each has its own values.
    """
    cache = StepCache(parts, _Comparing())
    call = cache.attempt(run, lambda made: made)

    def filled(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        cache.fill(calls)
        before = copies(args, kwargs)  # as a Snapshot, which finds nothing on "meta"
        made = call(*args, **kwargs)
        del before
        return made

    return filled


def _hidden(made: Any) -> torch.Tensor:
    return made if isinstance(made, torch.Tensor) else made[0]


def _with_hidden(made: Any, hidden: torch.Tensor) -> Any:
    return hidden if isinstance(made, torch.Tensor) else (hidden, *made[1:])


def _sampled(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1)[::_SAMPLED].float()
