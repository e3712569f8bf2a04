"""The step cache on toy denoisers: the history of each call, and how a cached step is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from comfyui_onediff_guard.precision.error_estimate import FIRST, ORDER, CacheDecision, CachePolicy, ErrorEstimate
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.step_cache import DenoiserHistory, StepCacheController
from guards import error


class Block(torch.nn.Module):
    """Adds to a stream and counts its calls. Like CogVideoX's blocks it takes and returns a second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.calls = 0

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return hidden_states + self.layer(hidden_states).sin() * 0.1, text + 1


class Toy(torch.nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.head = torch.nn.Linear(8, 8)
        self.eval().requires_grad_(False)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        text = torch.zeros(1)
        for block in self.blocks:
            hidden_states, text = block(hidden_states=hidden_states, text=text)
        return (self.head(hidden_states),)

    @property
    def calls(self) -> list[int]:
        return [block.calls for block in self.blocks]  # pyright: ignore[reportReturnType]


def latents(step: int) -> torch.Tensor:
    """Latents that change smoothly over a run; a batch with both halves of guidance."""
    start = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
    return start * (1 + 0.02 * step + 0.001 * step**2)


class Run:
    """A run of a toy denoiser: steps in order, as the guard makes them."""

    def __init__(self, module: torch.nn.Module, error: float = 0.05):
        self.controller = StepCacheController(CachePolicy(error), 30)
        self.cache = DenoiserHistory(block_names(module, ["blocks"]), self.controller, (-1.0, 2.0))
        self.attempt = self.cache.guarded(self.cache.attempt(module))
        self.rerun = self.cache.guarded(self.cache.rerun(module), rerun=True)
        self.cached: list[int] = []

    def step(self, given: torch.Tensor) -> torch.Tensor:
        out = self.attempt(hidden_states=given)[0]
        read(self.controller)
        if self.cache.keep():
            self.cached.append(self.controller.estimate.at)
        self.controller.end_step(given)
        return out


def read(controller: StepCacheController) -> None:
    """Read the requested values, as the guard does after each call."""
    controller.pending.receive([float(value) for value in controller.pending.requested()])


class Writes(Toy):
    """Overwrites its input."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor]:
        return super().forward(hidden_states.mul_(1.5))


@pytest.mark.parametrize("target", [0.0, 0.05])
@pytest.mark.parametrize("kind", [Toy, Writes])
def test_cached_steps_run_only_the_first_block_and_stay_close(kind: type[Toy], target: float) -> None:
    """Other steps are unchanged; a compared step is computed from its own input."""
    toy, plain = kind(), kind()
    parts = [(name, id(part)) for name, part in toy.named_modules()]
    run = Run(toy, target)
    for step in range(30):
        before, given = toy.calls, latents(step)
        out, wanted = run.step(given), plain(latents(step))[0]
        assert torch.equal(given, latents(step) * (1.5 if kind is Writes else 1))
        calls = [now - then for now, then in zip(toy.calls, before, strict=True)]
        assert calls == ([1, 0, 0, 0] if step in run.cached else [1, 1, 1, 1])
        assert 0 < error(out, wanted) < 0.01 if step in run.cached else torch.equal(out, wanted)
    assert (len(run.cached) > 15) == (target > 0) and run.cached == list(run.controller.estimate.cached)
    use = run.controller.use
    assert use.cached == len(run.cached) and not use.over_target
    assert use.skipped == pytest.approx(3 * len(run.cached) / (4 * 30))
    assert {len(left) for left in run.cache.history.values()} == {ORDER + 1}, "memory is bounded"
    run.cache.forget()
    assert not run.cache.history
    assert [(name, id(part)) for name, part in toy.named_modules()] == parts and "forward" not in vars(toy.blocks[0])


def test_polynomial_stream_is_extrapolated() -> None:
    """The later blocks add a polynomial of the step, of the extrapolated order."""
    toy, step_now = Toy(2), [0]
    first, second = toy.blocks
    first.load_state_dict({name: torch.zeros_like(value) for name, value in first.state_dict().items()})
    second.forward = lambda hidden_states, text: (hidden_states + 0.5 + step_now[0] ** ORDER, text)
    run = Run(toy, 0.5)
    for step in range(20):
        step_now[0] = step
        given = torch.ones(2, 3, 8) + step
        wanted = toy.head(given + 0.5 + step**ORDER)
        assert torch.allclose(run.step(given), wanted, rtol=1e-4)


@pytest.mark.parametrize("failing", range(30))
def test_failed_attempt_does_not_affect_later_steps(failing: int) -> None:
    """One attempt returns NaN; its rerun and the other steps are as without it."""
    toy, plain = Toy(), Toy()
    run, whole = Run(toy), copy.deepcopy(toy.state_dict())
    for step in range(30):
        wanted = plain(latents(step))[0]
        if step == failing:
            toy.load_state_dict({name: torch.full_like(value, torch.nan) for name, value in whole.items()})
            run.attempt(hidden_states=latents(step))
            read(run.controller)
            toy.load_state_dict(whole)
            out = run.rerun(hidden_states=latents(step))[0]
            read(run.controller)
            assert not run.cache.keep()
            run.controller.end_step(latents(step))
            assert torch.equal(out, wanted)
        else:
            assert error(run.step(latents(step)), wanted) < 0.01
    assert len(run.cached) > 10 and failing not in run.cached


def test_each_call_of_a_step_has_its_own_history() -> None:
    """Guidance in two calls: the second follows the first's decision and is extrapolated from its own history."""
    toy, plain = Toy(), Toy()
    run = Run(toy)
    for step in range(30):
        kinds = []
        for half in latents(step).split(1):
            out = run.attempt(hidden_states=half)[0]
            read(run.controller)
            kinds.append(run.cache.keep())
            assert error(out, plain(half)[0]) < 0.01
        assert kinds[0] == kinds[1]
        run.controller.end_step(latents(step))
    assert len(run.controller.estimate.cached) > 15


def test_failed_second_call_keeps_the_first_one_counted() -> None:
    toy = Toy()
    run = Run(toy)
    first, second = latents(0).split(1)
    while run.controller.choice is not CacheDecision.REUSE:
        for half in (first, second):
            run.attempt(hidden_states=half * (1 + 0.01 * run.controller.estimate.at))
            read(run.controller)
            run.cache.keep()
            if run.controller.choice is CacheDecision.REUSE:
                break
        else:
            run.controller.end_step(latents(0))
    at = run.controller.estimate.at
    run.attempt(hidden_states=second)
    run.rerun(hidden_states=second)
    read(run.controller)
    assert not run.cache.keep()
    run.controller.end_step(latents(0))
    assert at in run.controller.estimate.cached


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ([[torch.tensor([[1.0], [1.0]])]], 1.0),  # one batch, same in both halves
        ([[torch.tensor([[1.0], [-1.0]])]], 11.0),
        ([[torch.ones(1, 1), -torch.ones(1, 1)]], 11.0),  # halves one after the other
        ([[torch.ones(1, 1)], [-torch.ones(1, 1)]], 11.0),  # two calls
        ([[torch.ones(1, 1)]], None),  # one of the calls failed
    ],
)
def test_error_is_measured_after_guidance(calls: list[list[torch.Tensor]], wanted: float | None) -> None:
    """Relative to the output after guidance, which is 1 here."""
    controller = controller_before_comparison()
    for differences in calls:
        comparisons = [torch.stack([each, torch.ones_like(each)], dim=-1) for each in differences]
        controller.compare(comparisons, (-5.0, 6.0))
        read(controller)
        controller.keep(comparisons)
    controller.end_step(torch.ones(2))
    assert controller.estimate.ratio == (None if wanted is None else pytest.approx(wanted / 0.1))


@pytest.mark.parametrize("whole", [True, False])
def test_comparison_of_a_failed_step_is_ignored(whole: bool) -> None:
    controller = controller_before_comparison()
    controller.compare([torch.full((2, 3, 2), torch.nan)], (-1.0, 2.0))
    read(controller)
    controller.recompute(whole=whole)
    controller.end_step(torch.ones(2))
    assert controller.estimate.ratio is None and not controller.estimate.compared and not controller.estimate.stopped


def controller_before_comparison() -> StepCacheController:
    """A controller in the first cacheable step, which will be compared."""
    controller = StepCacheController(CachePolicy(1.0), 40)
    controller.estimate = ErrorEstimate(controller.estimate.policy, 40, at=FIRST)
    assert controller.choose() is CacheDecision.COMPUTE
    controller.pending.request("signal", torch.tensor(0.1))
    return controller


@pytest.mark.parametrize("first", [0.0, torch.nan, torch.inf])
def test_change_of_latents_is_measured(first: float) -> None:
    controller, good = StepCacheController(CachePolicy(1.0), 40), torch.tensor([3.0, 4.0])
    for latents in (good, good * 1.5, good * 1.5):
        controller.end_step(latents)
        read(controller)
    assert controller.estimate.changes == (0.0, pytest.approx(0.5)) and not controller.estimate.stopped
    for latents in (good * first, good, good):
        controller.end_step(latents)
        read(controller)
    assert "the latents" in controller.estimate.stopped
