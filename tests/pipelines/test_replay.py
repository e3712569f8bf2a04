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
from comfyui_onediff_guard.precision.drift import FIRST, Choice, Ledger
from test_step_cache_runs import SIZES, WIDE, opened
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


class Told:
    """What is asked of a course, by a run whose cached outputs are off by what is known."""

    def __init__(self, off: list[torch.Tensor]):
        self.at, self.off, self.weights = 0, off, []

    @property
    def reuses(self) -> bool:
        return self.at in CACHED

    def take_back(self) -> list[torch.Tensor]:
        return self.off if self.at == COMPARED else []

    def stepped(self, weight: float) -> None:
        self.at += 1
        self.weights.append(weight)


def outputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of a denoiser, whatever it is given."""
    drawn = torch.randn(STEPS, 1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    return [*drawn.to(dtype)]


def run(name: str, given: list[torch.Tensor], off: list[torch.Tensor] | None) -> tuple[list[torch.Tensor], Any]:
    """Latents after each step, by a scheduler that is followed, where off is not None."""
    scheduler = SCHEDULERS[name]()
    scheduler.set_timesteps(STEPS)
    told = Told(off or [])
    if off is not None:
        follow(scheduler, told)  # pyright: ignore[reportArgumentType]
    latents = torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    latents *= getattr(scheduler, "init_noise_sigma", 1.0)
    noise, old, made = torch.Generator().manual_seed(2), None, []
    times = scheduler.timesteps
    for step, (time, output) in enumerate(zip(times, given, strict=True)):
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
    return made, told


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def with_errors(given: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of which the cached ones are off, and by what."""
    off = [0.1 * torch.randn(1, 3, 4, 8, 8, generator=torch.Generator().manual_seed(step)) for step in CACHED]
    broken = [*given]
    for step, each in zip(CACHED, off, strict=True):
        broken[step] = given[step] + each
    return broken, off


@pytest.mark.parametrize("name", SCHEDULERS)
def test_after_a_comparison_a_run_is_as_with_the_right_outputs(name: str) -> None:
    """Also what a scheduler remembers of steps, and noise, which is drawn once."""
    given = outputs()
    wanted, _ = run(name, given, None)
    broken, off = with_errors(given)
    found, _ = run(name, broken, off)
    for step in range(STEPS):
        if step in CACHED:
            assert apart(found[step], wanted[step]) > 1e-3
        else:
            assert apart(found[step], wanted[step]) < 1e-5, step
    left, _ = run(name, broken, [])
    assert apart(left[-1], wanted[-1]) > 1e-3, "the latents do not forget"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_followed_run_that_takes_nothing_back_has_the_same_bits(name: str) -> None:
    wanted, _ = run(name, outputs(), None)
    found, told = run(name, outputs(), [])
    assert all(map(torch.equal, found, wanted))
    assert len(told.weights) == STEPS and all(0 < weight < 10 for weight in told.weights)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_taking_nothing_away_changes_no_bit(name: str) -> None:
    """The steps are taken again in the same way, from the same latents, with the same noise."""
    wanted, _ = run(name, outputs(), None)
    found, _ = run(name, outputs(), [torch.zeros(1)] * len(CACHED))
    assert all(map(torch.equal, found, wanted))


STEPS_OF_TWO = 12
SECOND = {"wan-two": 9}  # a step of its second denoiser that can be compared


@pytest.mark.parametrize(("model", "at"), [*((model, FIRST) for model in SIZES), *SECOND.items()])
def test_what_a_comparison_finds_is_what_the_sampler_would_be_given_too_much(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, model: str, at: int
) -> None:
    """With each family's guidance: of both halves, of two calls, of each frame, of a second denoiser."""
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
