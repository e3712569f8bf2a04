"""Progress of the calls of a stage: their number, before the first one, and which one runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.on_disk import listening, tell_reading
from comfyui_onediff_guard.pipelines.run import vae
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.precision.policy import Component
from small_runs import opened

Progress = list[tuple[int, int, str]]


def progress_of(total: int, label: str) -> Progress:
    """The expected progress of so many calls."""
    begun = [(done, total, f"{label} {done + 1} of {total}") for done in range(total)]
    return [*begun, (total, total, f"{label} {total} of {total}")]


@pytest.mark.parametrize(
    ("variant", "shape", "options", "calls"),
    [
        ("2b", (1, 16, 1, 4, 6), {}, 1),
        ("2b", (1, 16, 7, 4, 6), {}, 3),
        ("2b", (2, 16, 4, 4, 6), {"slicing": True}, 2 * 2),
        ("2b", (1, 16, 5, 4, 6), {"tiling": True}, 2),  # within one tile
        ("2b", (1, 16, 5, 8, 12), {"tiling": True}, 2 * 2 * 2),
        ("5b", (2, 16, 4, 4, 12), {"tiling": True, "slicing": True}, 2 * 2 * 2),
        ("1.5", (1, 16, 7, 4, 6), {}, 3),
        ("cogview3", (3, 16, 8, 8), {}, 1),
        ("cogview3", (3, 16, 8, 8), {"slicing": True}, 3),
        ("cogview4", (3, 16, 8, 8), {"chunk": 2}, 2),
        ("cogview4", (1, 16, 4, 12), {"tiling": True}, 2),
        ("wan", (1, 16, 3, 4, 6), {}, 3),  # one for each latent frame
        ("wan", (2, 16, 3, 4, 6), {"slicing": True}, 2 * 3),
        ("wan-ti2v", (1, 48, 2, 4, 4), {}, 2),
        ("svd", (5, 4, 8, 8), {}, 1),
        ("svd", (5, 4, 8, 8), {"chunk": 2}, 3),
    ],
)
def test_decoding_reports_progress_of_each_guarded_call(
    variant: str, shape: tuple[int, ...], options: Mapping[str, Any], calls: int
) -> None:
    reported: Progress = []
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    _, report = decode(opened(variant), latents, **options, progress=lambda *call: reported.append(call))
    assert len(report.steps) == calls
    assert reported == progress_of(calls, "decoding part")


@pytest.mark.parametrize(("frames", "calls"), [(1, 1), (9, 1), (17, 2)])
def test_encoding_video_reports_progress_of_each_guarded_call(frames: int, calls: int) -> None:
    reported: Progress = []
    counting = vae.Calls("encoding video, part {} of {}", lambda *call: reported.append(call))
    stage = opened("2b").stage(Component.VAE_ENCODE)
    guarded, report = vae.guarded_encoder(stage, counting), stage.report
    with torch.no_grad():
        guarded.encode(torch.zeros(1, 3, frames, 32, 32))
    assert len(report.steps) == calls
    assert reported == progress_of(calls, "encoding video, part")


def test_encoding_reports_progress_of_new_prompts() -> None:
    handle = opened("2b")
    reported: Progress = []

    def encode(*prompts: str) -> torch.Tensor:
        reported.clear()
        return encode_prompts(handle, list(prompts), progress=lambda *call: reported.append(call))[0][0]

    first = encode("a boat", "a kite")
    assert reported == progress_of(2, "encoding prompt")
    assert torch.equal(encode("a boat", "a kite"), first) and reported == []
    encode("a boat", "grey")
    assert reported == progress_of(1, "encoding prompt")


def test_reading_of_weights_is_reported_only_to_active_listener() -> None:
    lines: list[str] = []
    with listening(lines.append):
        tell_reading("text_encoder", 4 * 10**9)
    tell_reading("vae", 1000)
    assert lines == ["loading the weights of text_encoder, 4.0 GB"]
    with pytest.raises(KeyboardInterrupt), listening(Mock(side_effect=KeyboardInterrupt)):
        tell_reading("vae", 10**9)
    tell_reading("vae", 10**9)
