"""A small picture after each step: of what the scheduler predicts, in the colours of the model's own VAE."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.preview import predicted, to_rgb
from comfyui_onediff_guard.pipelines.preview.frames import Previews
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from PIL import Image
from small_runs import SIZES, sampled

STEPS = 2


def opened(folder: Path) -> PipelineHandle:
    stores._STORES.clear()
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=Precision.FP32, **options)


@pytest.mark.parametrize("model", SIZES)
def test_each_step_is_shown_and_the_last_is_what_the_run_returns(
    model: str, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = opened(model_folder(model))
    expected, _ = sampled(handle, model)
    shown: list[Image.Image] = []
    watched: list[torch.Tensor] = []
    watch = predicted.watch

    def listening(scheduler: Any, seen: Callable[[torch.Tensor], None]) -> None:
        watch(scheduler, lambda latents: (watched.append(latents), seen(latents)))

    monkeypatch.setattr(predicted, "watch", listening)
    latents, _ = sampled(handle, model, previews=Previews(shown.append))
    assert torch.equal(latents, expected)
    assert [picture.size for picture in shown] == [(latents.shape[-1], latents.shape[-2])] * STEPS
    layout, config = handle.family.layout, handle.store.model.vae_config
    finished = layout.unscaled(watched[-1], SIZES[model][2], config)
    assert torch.allclose(finished, latents, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", SIZES)
def test_the_colours_of_a_vae_are_learned_once_and_kept(
    model: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    shown: list[Image.Image] = []
    previews = Previews(shown.append, folder=tmp_path / "previews")
    first = opened(model_folder(model))
    latents, _ = sampled(first, model, previews=previews)
    (file,) = (tmp_path / "previews").iterdir()
    assert len(json.loads(file.read_text())["matrix"]) == first.family.layout.channels(first.store.model.vae_config) + 1
    written = file.stat().st_mtime_ns
    again = opened(model_folder(model))
    assert torch.equal(sampled(again, model, previews=previews)[0], latents)
    assert again.family.takes_image or "vae" not in again.store.loaded(), "it is needed for decoding alone"
    assert [each.tobytes() for each in shown[STEPS:]] == [each.tobytes() for each in shown[:STEPS]]
    assert file.stat().st_mtime_ns == written
    file.write_text("{}")
    assert torch.equal(sampled(opened(model_folder(model)), model, previews=previews)[0], latents)
    assert shown[-1].tobytes() == shown[0 + STEPS - 1].tobytes() and "matrix" in file.read_text()


def test_a_small_decoder_of_the_hosts_takes_the_place_of_the_colours(model_folder: Callable[..., Path]) -> None:
    asked: list[str] = []
    shown: list[Any] = []

    def decoder(kind: str) -> Callable[[torch.Tensor], Any]:
        asked.append(kind)
        return lambda latents: tuple(latents.shape)

    handle = opened(model_folder("svd"))
    latents, _ = sampled(handle, "svd", previews=Previews(shown.append, decoder))
    assert asked == ["SD15"] and shown == [tuple(latents.shape[1:])] * STEPS


class InterruptProcessingException(Exception):
    """As ComfyUI's, by its name."""


BROKEN = (
    torch.OutOfMemoryError("no room"),
    TypeError("Cannot convert a MPS Tensor to float64 dtype"),  # Apple's GPUs have none
    AssertionError("no room"),
    KeyError("decoder"),
    OSError("cannot write mode F as JPEG"),
)


@pytest.mark.parametrize(
    ("when", "error"),
    [*(("fitted", error) for error in BROKEN), *((when, BROKEN[1]) for when in ("decoder", "colours_of", "show"))],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_run_goes_on_where_previews_do_not_work(
    when: str,
    error: Exception,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    handle = opened(model_folder("2b"))
    expected, _ = sampled(handle, "2b")
    shown: list[Any] = []

    def fails(*_: Any) -> Any:
        raise error

    previews = Previews(shown.append)
    if when in ("decoder", "show"):
        previews = replace(previews, **{when: fails})
    else:
        monkeypatch.setattr(to_rgb, when, fails)
    made, _ = sampled(handle, "2b", previews=previews)
    assert torch.equal(made, expected)
    assert not shown and [r.message for r in caplog.records if "no previews of" in r.message] == [
        f"no previews of {handle.store.model.name}: {error}"
    ], "said once"


def test_an_interrupt_that_a_preview_raises_ends_the_run(model_folder: Callable[..., Path]) -> None:
    """ComfyUI raises it where it is shown a picture."""

    def interrupted(_: Any) -> None:
        raise InterruptProcessingException

    with pytest.raises(InterruptProcessingException):
        sampled(opened(model_folder("2b")), "2b", previews=Previews(interrupted))


def test_a_matrix_gives_back_the_colours_that_latents_were_made_of() -> None:
    draw = torch.Generator().manual_seed(1)
    mixing, shift = torch.randn(16, 3, generator=draw), torch.randn(16, 1, 1, generator=draw)
    picture = to_rgb.picture_to_encode(8)
    small = torch.nn.functional.adaptive_avg_pool2d(picture, (32, 32))[0]
    latents = torch.einsum("cr,rhw->chw", mixing, small) + shift
    noise = 0.05 * torch.randn(latents.shape, generator=draw)
    made = to_rgb.colours_of(latents, to_rgb.fitted(picture, latents + noise))
    wanted = to_rgb.colours_of(small, torch.cat([torch.eye(3), torch.zeros(1, 3)]))
    levels = [torch.frombuffer(bytearray(each.tobytes()), dtype=torch.uint8).float() for each in (made, wanted)]
    assert (levels[0] - levels[1]).abs().mean() < 3, "of 255"
    with pytest.raises(ValueError, match="not finite"):
        to_rgb.fitted(picture, latents * float("nan"))


@pytest.mark.parametrize(
    "name",
    [
        "CogVideoXDDIMScheduler",
        "CogVideoXDPMScheduler",
        "EulerDiscreteScheduler",
        "FlowMatchEulerDiscreteScheduler",
        "UniPCMultistepScheduler",
    ],
)
def test_every_scheduler_ends_at_what_it_predicts_last(name: str) -> None:
    import diffusers

    draw, seen = torch.Generator().manual_seed(0), []
    scheduler = getattr(diffusers, name)()
    scheduler.set_timesteps(4)
    predicted.watch(scheduler, seen.append)
    latents, before, earlier = torch.randn(1, 4, 8, 8, generator=draw), None, None
    for timestep in scheduler.timesteps:
        output = torch.randn(latents.shape, generator=draw)
        given = (output, before, timestep, earlier, latents) if "DPM" in name else (output, timestep, latents)
        latents, *more = scheduler.step(*given, return_dict=False)
        before, earlier = (more or [None])[0], timestep
    assert len(seen) == 4 and not torch.allclose(seen[0], latents, atol=0.1)
    assert torch.allclose(seen[-1], latents, atol=1e-4)
