"""What a step cache asks of the real schedulers of each family, beside them: the slope of each step is that of the
scheduler's own step, and nothing of the run is read for it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.reuse.course import Beside, follow
from comfyui_onediff_guard.precision.course import Course
from comfyui_onediff_guard.precision.drift import CachePolicy

STEPS, SHAPE = 12, (1, 3, 4, 8, 8)
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "DDIM": lambda: diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True),
    "DPM, which draws noise": lambda: diffusers.CogVideoXDPMScheduler(prediction_type="v_prediction"),
    "flow": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0),
    "UniPC, of second order": lambda: diffusers.UniPCMultistepScheduler(solver_order=2, **FLOW),
    "Euler": lambda: diffusers.EulerDiscreteScheduler(use_karras_sigmas=True, prediction_type="v_prediction"),
}


def started(name: str) -> Any:
    scheduler = SCHEDULERS[name]()
    scheduler.set_timesteps(STEPS)
    return scheduler


def run(name: str, scheduler: Any, before: Callable[..., None] = lambda *_: None, since: int = 0) -> list[torch.Tensor]:
    """Latents after each step, from a step on. before: is given the arguments of each step."""
    random = torch.Generator().manual_seed(1)
    latents = torch.randn(SHAPE, generator=random) * getattr(scheduler, "init_noise_sigma", 1.0)
    noise, old, made = torch.Generator().manual_seed(2), None, []
    times = scheduler.timesteps[since:]
    if since and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(since)
    for step, time in enumerate(times):
        given: dict[str, Any] = {"model_output": torch.randn(SHAPE, generator=random), "timestep": time}
        if name == "Euler":
            scheduler.scale_model_input(latents, time)
        if "DPM" in name:
            back = times[step - 1] if step else None
            given |= {"old_pred_original_sample": old, "timestep_back": back, "generator": noise}
        given["sample"] = latents
        before(given)
        latents, *more = scheduler.step(**given, return_dict=False)
        old = more[-1] if more else None
        made.append(latents)
    return made


def own_slope(scheduler: Any, given: dict[str, Any]) -> float:
    """By two tries of the scheduler itself, in float64, with all that is given."""
    tries = []
    for change in (0.0, 1.0):
        tried = copy.deepcopy(scheduler)
        more = {"generator": torch.Generator().manual_seed(0)} if "generator" in given else {}
        output = given["model_output"].double() + change
        tries.append(type(scheduler).step(tried, **{**given, **more, "model_output": output}, return_dict=False)[0])
    return float((tries[1] - tries[0]).double().abs().mean())


SINCE = [*((name, 0) for name in SCHEDULERS), ("DDIM", 5), ("DPM, which draws noise", 5), ("flow", 5)]


@pytest.mark.parametrize(("name", "since"), SINCE)
def test_the_slope_is_that_of_the_schedulers_own_step(name: str, since: int) -> None:
    """At each step, also of a run that starts from a video, in the middle. The latents are given without values, so
    that reading any of them raises."""
    scheduler, found, wanted = started(name), [], []
    beside: list[Beside] = []

    def before(given: dict[str, Any]) -> None:
        wanted.append(own_slope(scheduler, given))
        if not beside:
            beside.append(Beside(scheduler))
        valueless = {
            key: each.to("meta") if isinstance(each, torch.Tensor) and each.shape == SHAPE else each
            for key, each in given.items()
        }
        found.append(beside[0].slope(valueless | {"return_dict": False}))

    run(name, scheduler, before, since)
    assert len(found) == STEPS - since and max(found) > 0.01
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_followed_run_has_the_same_bits(name: str) -> None:
    wanted = run(name, started(name))
    scheduler, course = started(name), Course(CachePolicy(1.0), STEPS)
    weights: list[float] = []

    def before(_given: dict[str, Any]) -> None:
        course.pending.known([float(each) for each in course.pending.asked()])  # as the guard does
        weights.append(course.ledger.weight)

    follow(scheduler, course)
    found = run(name, scheduler, before)
    assert all(map(torch.equal, found, wanted))
    assert course.ledger.at == STEPS and not course.ledger.stopped
    assert all(0 < weight < 10 for weight in weights[2:]), "of each step but the first one"


def test_a_timestep_that_is_none_of_the_schedulers_own_is_read() -> None:
    scheduler = started("DDIM")
    given = {"model_output": torch.zeros(SHAPE), "sample": torch.zeros(SHAPE)}
    times = scheduler.timesteps
    found = [Beside(scheduler).slope(given | {"timestep": time}) for time in (times[4], times[4].clone())]
    assert found[0] == found[1] > 0
