"""A step cache: on predictable steps most of a denoiser is skipped, and extrapolated from its outputs of earlier steps.

The first block is computed in every step. In a cached step, the sum that all other blocks add to its output is
extrapolated by the polynomial through the last computed steps. The guard's attempt and its fp32 rerun are shallow
copies with other blocks; the denoiser that both share stays as it is. A call's values are kept once the guard has
accepted its output: a failed attempt leaves nothing, and the rerun computes every block and records the outputs.

error_estimate.py decides which steps are cached. The host never waits for its numbers: the guard reads them together
with the range of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .error_estimate import (
    FIRST,
    LAST,
    ORDER,
    CacheDecision,
    CachePolicy,
    CacheUse,
    ErrorEstimate,
    extrapolation_weights,
)
from .layer_peaks import floating
from .overflow_detection import PendingReads
from .planned_products import active_mode
from .shallow_copy import Make, replace_submodules, with_forward
from .snapshot import Snapshot, copies

_SAMPLED = 7  # a signal uses every _SAMPLED-th value of the first block's output

# what the sampler multiplies each of a step's outputs by, in their order: of both halves of a batch, or of two calls
GuidanceWeights = Sequence[float]
_Change = Callable[[torch.Tensor], torch.Tensor]


class StepCacheController:
    """Decides which steps of a run are cached, and counts. The run's denoisers share it.

    pending: numbers that the guard reads together with a call's ranges, and all-reduces over the processes that compute
        the run together, so that all decide alike.
    """

    def __init__(self, policy: CachePolicy, steps: int):
        self.estimate = ErrorEstimate(policy, steps)
        self.pending = PendingReads()
        self.choice: CacheDecision | None = None  # for the current step; None before its first call
        self._computed = self._skipped = 0  # calls of blocks
        self._comparisons: list[torch.Tensor] = []  # of the current step's earlier calls, see `compare`
        self._latents: torch.Tensor | None = None  # at the start of the current step
        self._cache: DenoiserHistory | None = None  # of the denoiser called last

    @property
    def use(self) -> CacheUse:
        estimate, calls = self.estimate, self._computed + self._skipped
        return CacheUse(
            target=estimate.policy.error,
            steps=estimate.at,
            cached=len(estimate.cached),
            skipped=self._skipped / calls if calls else 0.0,
            compared=len(estimate.compared),
            drift=estimate.drift,
            largest=max(estimate.compared, default=0.0),
            stopped=estimate.stopped,
        )

    def stop(self, why: str) -> None:
        """Stop caching in this run."""
        self.estimate = self.estimate.stop(why)

    def begin_call(self, cache: DenoiserHistory) -> None:
        """Note which denoiser is called. If another one was before it, drop that one's history and ratio."""
        if self._cache is not None and self._cache is not cache:
            self._cache.history.clear()
            self.estimate = self.estimate.with_another_denoiser()
        self._cache = cache

    def count(self, *, skipped: bool) -> None:
        self._skipped += skipped
        self._computed += not skipped

    def choose(self) -> CacheDecision:
        """Return what to do with the current step. Its first call decides; the others follow."""
        self.choice = self.choice or self.estimate.choice()
        return self.choice

    def compare(self, comparisons: list[torch.Tensor], weights: GuidanceWeights) -> None:
        """Measure the cache's error after guidance, once all outputs of the current step are known.

        comparisons: of the latest call's outputs, [batch, ..., 2]: the cache's output minus the real one, and the real
            output.
        """
        parts = [*self._comparisons, *comparisons]
        if len(weights) > 1 and len(parts) == 1:
            parts = [*parts[0].chunk(len(weights))]
        if parts and len(parts) == len(weights):
            guided = torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)
            off, output = guided.flatten(0, -2).norm(dim=0)
            self.pending.request("error", off / output)

    def keep(self, comparisons: list[torch.Tensor]) -> None:
        """Keep the numbers of a call whose output the guard has accepted."""
        self._comparisons += comparisons

    def end_step(self, latents: torch.Tensor) -> None:
        """Advance to the next step. latents: the result of this one."""
        if self.estimate.at:
            self.estimate = self.estimate.with_change(self.pending.take("change"))
        if self._latents is not None:
            self.pending.request("change", (latents - self._latents).norm() / self._latents.norm())
        self._latents = latents
        signal, error = self.pending.take("signal"), self.pending.take("error")
        signal = torch.nan if signal is None else signal
        if self.choice is CacheDecision.REUSE:
            self.estimate = self.estimate.after_reuse(signal)
        elif error is not None:
            self.estimate = self.estimate.after_comparison(signal, error)
        else:
            self.estimate = self.estimate.after_compute()
        self.choice, self._comparisons = None, []

    def recompute(self, *, whole: bool) -> None:
        """Compute the current call after all, since its attempt failed. whole: it is the step's first call, so nothing
        of the step is cached."""
        self._comparisons = []
        self.pending.drop("error")
        if whole:
            self.choice = CacheDecision.COMPUTE


@dataclass(frozen=True)
class _Values:
    """Values of a computed step, from which later steps are extrapolated."""

    step: int
    signal: torch.Tensor  # [values], float32
    added: torch.Tensor  # last block's output minus the first block's


@dataclass
class _DenoiserCall:
    """One call of the denoiser."""

    history: tuple[_Values, ...] = ()  # to extrapolate from; empty: everything is computed
    choice: CacheDecision | None = None
    leads: bool = False  # the step's first call, whose signal is measured
    skips: bool = False  # whether to skip the blocks after the first one
    first_output: Any = None
    signal: torch.Tensor | None = None
    values: _Values | None = None
    comparison: torch.Tensor | None = None  # of its outputs, for `StepCacheController.compare`


def _comparisons(calls: Sequence[_DenoiserCall]) -> list[torch.Tensor]:
    return [call.comparison for call in calls if call.comparison is not None]


@dataclass(eq=False)
class DenoiserHistory:
    """The history of one denoiser in a run, and the calls that use it."""

    blocks: Sequence[str]  # names of the denoiser's blocks, two or more, in the order in which they are called
    controller: StepCacheController
    weights: GuidanceWeights = (1.0,)  # the sampler's factors of a step's outputs
    own: _Change = lambda tensor: tensor  # returns the share of the first block's input that this process computes with
    whole: _Change = lambda tensor: tensor  # returns a call's whole output, given this process's share

    def __post_init__(self) -> None:
        self.history: dict[int, tuple[_Values, ...]] = {}  # call of a step → values of the latest steps
        self._calls: list[_DenoiserCall] = []  # within one call of the guard: one, or one per half of a batch
        self._step, self._before = 0, 0  # the current step, and the number of its finished calls
        self._after: tuple[int, int] | None = None  # the position of the last block, for planned products

    def attempt(self, run: Any) -> Callable[..., Any]:
        """Wrap a call of the guard's attempt. run: a module, or a partial function of one."""
        return partial(self._attempt, self._with_blocks(run))

    def rerun(self, run: Any) -> Callable[..., Any]:
        """Wrap a call of the fp32 rerun: compute every block and record its outputs."""
        return partial(self._compute, self._with_blocks(run))

    def keep(self, *, accepted: bool = True) -> bool:
        """Keep the values of the latest guarded call. Returns whether it was cached.

        accepted: whether its output was finite. Of others that the guard let through, nothing is kept.
        """
        self._advance()
        calls, self._calls = self._calls, []
        if not accepted:
            self.controller.stop("an output is NaN, infinite or clipped, and the guard did not recompute it")
        elif any(call.values is None and call.choice is not CacheDecision.REUSE for call in calls):
            self.controller.stop("the block outputs to extrapolate are hidden in this mode")
        if accepted:
            self.controller.keep(_comparisons(calls))
            for number, call in enumerate(calls, self._before):
                if call.values:
                    self.history[number] = (*self.history.get(number, ()), call.values)[-ORDER - 1 :]
        self._before += len(calls)
        return any(call.choice is CacheDecision.REUSE for call in calls)

    def forget(self) -> None:
        """Drop the history, since later calls compute differently. The latest call will be repeated, and computed."""
        self._advance()
        self.controller.recompute(whole=not self._before)
        self.history.clear()
        self._calls = []

    def _advance(self) -> None:
        self.controller.begin_call(self)
        if self._step != self.controller.estimate.at:
            self._step, self._before = self.controller.estimate.at, 0

    def guarded(self, call: Callable[..., Any], *, rerun: bool = False) -> Callable[..., Any]:
        """Wrap the guard's call: an attempt or a rerun, or one for each half of a batch."""

        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._calls = []
            self._advance()
            if rerun:
                self.controller.recompute(whole=not self._before)
            output = call(*args, **kwargs)
            self.controller.compare(_comparisons(self._calls), self.weights)
            return output

        return guarded

    def _compute(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._calls.append(_DenoiserCall())
        return run(*args, **kwargs)

    def _attempt(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = self._begin()
        self._calls.append(call)
        compares = call.choice is CacheDecision.COMPUTE
        before = Snapshot(args, kwargs) if compares else None  # the first block is called once
        output = run(*args, **kwargs)
        if before is None:
            return output
        before.restore(waits=False)
        cached, call.skips, call.history = floating(output)[0].float(), False, ()
        output = run(*args, **kwargs)
        computed = floating(output)[0].float()
        call.comparison = self.whole(torch.stack([cached - computed, computed], dim=-1))
        return output

    def _begin(self) -> _DenoiserCall:
        """Return the current call, and what to do with it if it may be cached."""
        number = self._before + len(self._calls)
        history = self.history.get(number, ())
        follows = number == 0 or self.controller.choice is not None
        if not (follows and len(history) > ORDER and self.controller.estimate.may_reuse):
            return _DenoiserCall()
        return _DenoiserCall(history, self.controller.choose(), leads=number == 0, skips=True)

    def _with_blocks(self, run: Any) -> Any:
        first, *middle, last = self.blocks
        forwards = {first: self._run_first_block, last: self._extrapolate_last_block}
        forwards |= dict.fromkeys(middle, self._skip_block)
        makes: dict[str, Make] = {
            name: lambda block, forward=forward: with_forward(block, partial(forward, block))
            for name, forward in forwards.items()
        }
        if isinstance(run, partial):
            module, *rest = run.args
            return partial(run.func, replace_submodules(module, makes), *rest, **run.keywords)
        return replace_submodules(run, makes)

    def _run_first_block(self, block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._calls[-1]
        if call.first_output is not None:  # the same call again, uncached
            return call.first_output
        output = call.first_output = block(*args, **kwargs)
        self.controller.count(skipped=False)
        with torch._C.DisableTorchFunction():
            given = self.own(args[0] if args else kwargs["hidden_states"])
            call.signal = _sampled(_hidden(output)) - _sampled(given)
            if call.leads:
                expected = self._extrapolated([values.signal for values in call.history])
                self.controller.pending.request("signal", (expected - call.signal).norm() / call.signal.norm())
        return output

    def _skip_block(self, block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._calls[-1].skips:
            self._count_skip()
            return self._calls[-1].first_output
        self.controller.count(skipped=False)
        return block(*args, **kwargs)

    def _extrapolate_last_block(self, block: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = self._calls[-1]
        if call.skips:
            self._count_skip()
            if (mode := active_mode()) and self._after:
                mode.position = self._after  # what lies between is left out in this call
            with torch._C.DisableTorchFunction():
                first = _hidden(call.first_output)
                added = self._extrapolated([values.added for values in call.history])
                return _with_hidden(call.first_output, (added + first.float()).to(first.dtype))
        self.controller.count(skipped=False)
        output = block(*args, **kwargs)
        if mode := active_mode():
            self._after = mode.position
        with torch._C.DisableTorchFunction():
            added, signal = _hidden(output) - _hidden(call.first_output), call.signal
            assert signal is not None
            call.values = _Values(self._step, signal, added.detach())
        return output

    def _count_skip(self) -> None:
        """Count skipped blocks, unless the call was repeated uncached."""
        if self._calls[-1].choice is CacheDecision.REUSE:
            self.controller.count(skipped=True)

    def _extrapolated(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the values extrapolated to the current step, in float32."""
        weights = extrapolation_weights([each.step for each in self._calls[-1].history], self._step)
        made = values[0].float() * weights[0]
        for value, weight in zip(values[1:], weights[1:], strict=True):
            made.add_(value, alpha=weight)
        return made

    def fill_history(self, calls: int) -> None:
        """Fill the history, for all steps and calls that a run ever keeps, with the values of the latest call."""
        (call,) = self._calls
        values, self._calls = call.values, []
        assert values is not None
        for number in range(calls):
            copied = [_Values(step, values.signal.clone(), values.added.clone()) for step in range(ORDER + 1)]
            self.history[number] = tuple(copied)


def with_most_memory(run: Any, blocks: Sequence[str], calls: int) -> Callable[..., Any]:
    """Return a call of a denoiser on "meta" with the peak memory of a step cache: with a full history, it is
    extrapolated, computed, and compared.

    run, blocks: as of a StepCache.
    calls: number of calls in a step, each with its own history.
    """
    controller = StepCacheController(CachePolicy(), FIRST + LAST + 1)
    controller.estimate = replace(controller.estimate, at=FIRST)
    cache = DenoiserHistory(blocks, controller)
    call = cache.guarded(cache.attempt(run))

    def filled(*args: Any, **kwargs: Any) -> Any:
        call(*args, **kwargs)
        cache.fill_history(calls)
        before = copies(args, kwargs)  # as a Snapshot, which finds nothing on "meta"
        output = call(*args, **kwargs)
        del before
        return output

    return filled


def _hidden(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def _with_hidden(output: Any, hidden: torch.Tensor) -> Any:
    return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])


def _sampled(values: torch.Tensor) -> torch.Tensor:
    return values.detach().reshape(-1)[::_SAMPLED].float()
