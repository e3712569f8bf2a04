"""What a comparison finds is taken back: steps that a scheduler takes again, with the outputs that it should have had,
for every scheduler of a family, and every family's guidance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.reuse import replay
from comfyui_onediff_guard.pipelines.reuse.replay import follow
from comfyui_onediff_guard.precision.course import Course
from comfyui_onediff_guard.precision.drift import FIRST, CachePolicy, Choice, Ledger
from test_step_cache_runs import MODELS, WIDE, opened
from test_step_cache_runs import run as whole_run

STEPS, CACHED, COMPARED = 12, (4, 5, 6), 7
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "DDIM": lambda: diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
    "DPM, which draws noise": lambda: diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction"),
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0),
    "UniPC, of second order": lambda: diffusers.UniPCMultistepScheduler(solver_order=2, **FLOW),
    "Euler": lambda: diffusers.EulerDiscreteScheduler(use_karras_sigmas=True, prediction_type="v_prediction"),
}


SHARES = 0.05, 0.2, 0.5  # 6, 24 and 60 of 120: the products of the distances to the steps 1, 2 and 3


def decide(course: Course, step: int, off: torch.Tensor | None) -> None:
    """What a denoiser's cache does in a step. off: what it is off by at the compared one; None: its attempt failed."""
    if not FIRST <= step <= COMPARED:
        return
    course.choose(lambda: 0.001)
    assert course.reuses == (step in CACHED)
    if step == FIRST:
        course.compare([torch.full((1, 3, 4, 8, 8), 1e-6)], (1.0,))
    elif step == COMPARED and off is not None:
        course.compare([off], (1.0,))


def outputs() -> list[torch.Tensor]:
    """Of a denoiser, whatever it is given."""
    return [*torch.randn(STEPS, 1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))]


def run(
    name: str, given: list[torch.Tensor], off: torch.Tensor | None = None, *, cached: bool = True
) -> tuple[list[torch.Tensor], Course]:
    """Latents after each step. cached: a step cache follows the scheduler. off: see `decide`."""
    scheduler = SCHEDULERS[name]()
    scheduler.set_timesteps(STEPS)
    course = Course(CachePolicy(1.0, check_every=len(CACHED) + 1), STEPS)
    if cached:
        follow(scheduler, course)
    latents = torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    latents *= getattr(scheduler, "init_noise_sigma", 1.0)
    noise, old, made = torch.Generator().manual_seed(2), None, []
    times = scheduler.timesteps
    for step, (time, output) in enumerate(zip(times, given, strict=True)):
        if cached:
            decide(course, step, off)
        if name == "Euler":
            scheduler.scale_model_input(latents, time)
        if "DPM" in name:
            before = times[step - 1] if step else None
            latents, old = scheduler.step(output, old, time, before, latents, generator=noise, return_dict=False)
        elif name == "Euler":
            latents = scheduler.step(output, time, latents).prev_sample
        else:
            latents = scheduler.step(output, time, latents, return_dict=False)[0]
        made.append(latents)
    return made, course


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", SCHEDULERS)
def test_after_a_comparison_a_run_is_as_with_the_right_outputs(name: str) -> None:
    """Also what a scheduler remembers of steps, and noise, which is drawn once."""
    given = outputs()
    wanted, _ = run(name, given, cached=False)
    off = 0.3 * torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    broken = [*given]
    for step, share in zip(CACHED, SHARES, strict=True):
        broken[step] = given[step] + share * off
    found, course = run(name, broken, off)
    for step in range(STEPS):
        if step in CACHED:
            assert apart(found[step], wanted[step]) > 1e-4
        else:
            assert apart(found[step], wanted[step]) < 1e-5, step
    left, failed = run(name, broken)
    assert apart(left[-1], wanted[-1]) > 1e-3, "the latents do not forget"
    assert course.ledger.cached == failed.ledger.cached == CACHED


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_followed_run_that_takes_nothing_back_has_the_same_bits(name: str) -> None:
    wanted, _ = run(name, outputs(), cached=False)
    found, course = run(name, outputs())
    assert all(map(torch.equal, found, wanted))
    assert course.ledger.at == STEPS and 0 < course.ledger.weight < 10 and not course.ledger.stopped


@pytest.mark.parametrize("name", SCHEDULERS)
def test_taking_nothing_away_changes_no_bit(name: str) -> None:
    """The steps are taken again in the same way, from the same latents, with the same noise."""
    wanted, _ = run(name, outputs(), cached=False)
    found, _ = run(name, outputs(), torch.zeros(1, 3, 4, 8, 8))
    assert all(map(torch.equal, found, wanted))


STEPS_OF_TWO = 12
SECOND = {"wan-two": 9}  # a step of its second denoiser that can be compared


@pytest.mark.parametrize(("model", "at"), [*((model, FIRST) for model in MODELS), *SECOND.items()])
def test_what_a_comparison_finds_is_what_the_sampler_would_be_given_too_much(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model: str, at: int
) -> None:
    """With each family's guidance: of both halves, of two calls, of a second denoiser."""
    handle = opened(model_folder(model))
    given: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    slope_of, compare = replay.slope_of, Course.compare

    def noted(scheduler: Any, arguments: dict[str, Any]) -> torch.Tensor:
        given.append(arguments["model_output"])
        return slope_of(scheduler, arguments)

    def compared(course: Course, *off_by: Any) -> None:
        compare(course, *off_by)
        if course.ledger.at == at and course._off:
            found.append(course._off[0])

    monkeypatch.setattr(replay, "slope_of", noted)
    monkeypatch.setattr(Course, "compare", compared)
    two = model == "wan-two"
    steps = STEPS_OF_TWO if two else at + 3
    scales: dict[str, Any] = {"guidance_scale_2": 5.0} if two else {}
    for caches in (False, True):
        choice = Choice.REUSE if caches else Choice.COMPUTE
        monkeypatch.setattr(Ledger, "choice", lambda ledger, _signal: choice if ledger.at == at else Choice.COMPUTE)  # noqa: B023
        whole_run(handle, model, WIDE, steps=steps, **scales)
    computed, cached = given[at].float(), given[steps + at].float()
    (off,) = found
    assert float(off.norm()) > 0
    assert torch.allclose(off, cached - computed, rtol=1e-3, atol=1e-5 * float(computed.abs().max()))


@pytest.mark.parametrize("model", ["2b", "cogview4", "wan"])
def test_a_run_takes_back_what_its_comparisons_find(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    handle = opened(model_folder(model))
    taken: list[int] = []
    again = replay._Steps.again
    monkeypatch.setattr(
        replay._Steps, "again", lambda steps, *more: taken.append(len(steps._given)) or again(steps, *more)
    )
    found, report = whole_run(handle, model, WIDE)
    rows = "".join("x" if cell == "cached" else " " for cell in report.cells()[:-1]).rstrip("x").split()
    assert taken == [len(row) for row in rows] and taken, "all but those at the end, which no comparison follows"
    monkeypatch.setattr(Course, "take_back", lambda _course: [])
    left, as_it_was = whole_run(handle, model, WIDE)
    assert as_it_was.cache.drift > report.cache.drift and not torch.equal(found, left)
