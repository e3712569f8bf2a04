"""Previews after each step: of the scheduler's prediction, with published colour factors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import torch
from comfyui_onediff_guard.pipelines.run import previews
from comfyui_onediff_guard.pipelines.run.previews import Previews
from comfyui_onediff_guard.pipelines.weights import components as stores
from fake_comfy import InterruptProcessingException
from hostile import say
from PIL import Image
from small_runs import SIZES, opened, sampled

STEPS = 2
CHANNELS = {"SD15": 4, "Wan21": 16, "Wan22": 48}  # of latents for which a ComfyUI has factors


def host_preview(kind: str) -> Callable[[torch.Tensor], Any] | None:
    factors = torch.eye(CHANNELS.get(kind, 0))[:, :3].tolist()
    return partial(previews.picture, factors=factors) if kind in CHANNELS else None


@pytest.mark.parametrize("model", SIZES)
def test_each_step_is_previewed_and_last_prediction_is_result_of_run(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores._STORES.clear()
    handle = opened(model)
    expected, _ = sampled(handle, model)
    loaded = handle.store.loaded()
    shown: list[Image.Image] = []
    watched: list[torch.Tensor] = []
    watch = previews.watch_predictions

    def listening(scheduler: Any, seen: Callable[[Callable[[], torch.Tensor]], None]) -> None:
        watch(scheduler, lambda finished: (watched.append(finished()), seen(finished)))

    monkeypatch.setattr(previews, "watch_predictions", listening)
    latents, _ = sampled(handle, model, previews=Previews(shown.append, host_preview))
    assert torch.equal(latents, expected) and handle.store.loaded() == loaded
    if model == "cogview3":
        assert not shown, "no factors are published"
        return
    assert [picture.size for picture in shown] == [(latents.shape[-1], latents.shape[-2])] * STEPS
    layout, config = handle.family.layout, handle.store.model.vae_config
    finished = layout.unscaled(watched[-1], SIZES[model][2], config)
    assert torch.allclose(finished, latents, rtol=1e-4, atol=1e-4)


def test_small_decoder_of_host_replaces_colour_factors() -> None:
    requested: list[str] = []
    shown: list[Any] = []

    def decoder(kind: str) -> Callable[[torch.Tensor], Any]:
        requested.append(kind)
        return lambda latents: tuple(latents.shape)

    handle = opened("svd")
    latents, _ = sampled(handle, "svd", previews=Previews(shown.append, decoder))
    assert requested == ["SD15"] and shown == [tuple(latents.shape[1:])] * STEPS


BROKEN = (
    torch.OutOfMemoryError("no room"),
    TypeError("Cannot convert a MPS Tensor to float64 dtype"),  # Apple's GPUs have none
    AssertionError("no room"),
    KeyError("decoder"),
    OSError("cannot write mode F as JPEG"),
)


@pytest.mark.parametrize(
    ("part", "error"),
    [*(("to_picture", error) for error in BROKEN), *((part, BROKEN[1]) for part in ("of_cogvideox", "show"))],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_run_continues_when_previews_fail(
    part: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    handle = opened("2b")
    expected, _ = sampled(handle, "2b")
    shown, fails = [], Mock(side_effect=error)
    settings = Previews(shown.append)
    if part in ("to_picture", "show"):
        settings = replace(settings, **{part: fails})
    else:
        monkeypatch.setattr(previews, part, fails)
    made, _ = sampled(handle, "2b", previews=settings)
    assert torch.equal(made, expected)
    assert not shown and [r.message for r in caplog.records if "no previews of" in r.message] == [
        f"no previews of {handle.store.model.name}: {error}"
    ], "logged once"


def test_interrupt_raised_by_preview_ends_run() -> None:
    """ComfyUI raises it when it is sent a picture."""
    with pytest.raises(InterruptProcessingException):
        sampled(opened("2b"), "2b", previews=Previews(Mock(side_effect=InterruptProcessingException)))


@pytest.mark.parametrize("level", [-1.0, 0.0, 1.0], ids=["black", "grey", "white"])
def test_colours_of_preview_are_mixed_by_factors(level: float) -> None:
    draw = torch.Generator().manual_seed(1)
    factors, bias = torch.randn(16, 3, generator=draw), torch.tensor([0.1, -0.1, 0.2])
    wanted = torch.full((2, 3, 3), level)
    latents = torch.linalg.pinv(factors.T.double()) @ (wanted - bias).double().flatten(0, 1).T
    made = previews.picture(latents.view(16, 2, 3), factors.tolist(), bias.tolist())
    assert made.size == (3, 2) and made.getcolors() == [(6, (round((level + 1) * 127.5),) * 3)]
    with pytest.raises(ValueError, match="4 channels, but preview colours are known for 16"):
        previews.picture(latents.view(16, 2, 3)[:4], factors.tolist())
    assert previews.picture(latents.view(16, 2, 3) * float("nan"), factors.tolist()).getcolors() == [(6, (0, 0, 0))]


@pytest.mark.parametrize(
    "name", ["CogVideoXDDIM", "CogVideoXDPM", "EulerDiscrete", "FlowMatchEulerDiscrete", "UniPCMultistep"]
)
def test_last_prediction_of_every_scheduler_is_its_result(name: str) -> None:
    draw, seen = torch.Generator().manual_seed(0), []
    scheduler = getattr(diffusers, f"{name}Scheduler")()
    scheduler.set_timesteps(4)
    previews.watch_predictions(scheduler, lambda finished: seen.append(finished()))
    latents, before, earlier = torch.randn(1, 4, 8, 8, generator=draw), None, None
    for timestep in scheduler.timesteps:
        output = torch.randn(latents.shape, generator=draw)
        given = (output, before, timestep, earlier, latents) if "DPM" in name else (output, timestep, latents)
        latents, *more = scheduler.step(*given, return_dict=False)
        before, earlier = (more or [None])[0], timestep
    assert len(seen) == 4 and not torch.allclose(seen[0], latents, atol=0.1)
    assert torch.allclose(seen[-1], latents, atol=1e-4)


def with_flow_scheduler(folder: Path, **settings: Any) -> Path:
    """A folder with diffusers' FlowMatchEulerDiscreteScheduler, made from its old scheduler, whose settings stay."""
    config = folder / "scheduler" / "scheduler_config.json"
    kept = json.loads(config.read_text(encoding="utf-8")) | settings
    diffusers.FlowMatchEulerDiscreteScheduler.from_config(kept).save_pretrained(config.parent)
    say(folder / "model_index.json", scheduler=["diffusers", "FlowMatchEulerDiscreteScheduler"])
    return folder


def test_scheduler_with_settings_of_other_scheduler_is_previewed(copy: Callable[[str], Path]) -> None:
    shown: list[Any] = []
    handle = opened(with_flow_scheduler(copy("wan")))
    expected, _ = sampled(handle, "wan")
    latents, _ = sampled(handle, "wan", previews=Previews(shown.append, host_preview))
    assert torch.equal(latents, expected) and len(shown) == STEPS


def test_stochastic_scheduler_draws_noise_by_seed(copy: Callable[[str], Path]) -> None:
    handle = opened(with_flow_scheduler(copy("wan"), stochastic_sampling=True))
    found = [sampled(handle, "wan", steps=3, seed=seed)[0] for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])
