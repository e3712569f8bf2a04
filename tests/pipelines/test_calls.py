"""What a stage tells of its calls: how many there will be, before the first one, and which one runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.on_disk import listening, tell_reading
from comfyui_onediff_guard.pipelines.run import vae
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.precision.policy import Component
from small_runs import opened

Told = list[tuple[int, int, str]]


def each_of(total: int, what: str) -> Told:
    """What is told of so many calls."""
    begun = [(done, total, f"{what} {done + 1} of {total}") for done in range(total)]
    return [*begun, (total, total, f"{what} {total} of {total}")]


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
def test_decoding_tells_each_guarded_call(
    variant: str, shape: tuple[int, ...], options: Mapping[str, Any], calls: int
) -> None:
    told: Told = []
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    _, report = decode(opened(variant), latents, **options, progress=lambda *call: told.append(call))
    assert len(report.steps) == calls
    assert told == each_of(calls, "decoding part")


@pytest.mark.parametrize(("frames", "calls"), [(1, 1), (9, 1), (17, 2)])
def test_encoding_a_video_tells_each_guarded_call(frames: int, calls: int) -> None:
    told: Told = []
    counting = vae.Calls("encoding video, part {} of {}", lambda *call: told.append(call))
    stage = opened("2b").stage(Component.VAE_ENCODE)
    shell, report = vae.guarded_encoder(stage, counting), stage.report
    with torch.no_grad():
        shell.encode(torch.zeros(1, 3, frames, 32, 32))
    assert len(report.steps) == calls
    assert told == each_of(calls, "encoding video, part")


def test_encoding_tells_each_prompt_that_is_new() -> None:
    handle = opened("2b")
    told: Told = []

    def encode(*prompts: str) -> torch.Tensor:
        told.clear()
        return encode_prompts(handle, list(prompts), progress=lambda *call: told.append(call))[0][0]

    first = encode("a boat", "a kite")
    assert told == each_of(2, "encoding prompt")
    assert torch.equal(encode("a boat", "a kite"), first) and told == []
    encode("a boat", "grey")
    assert told == each_of(1, "encoding prompt")


def test_what_is_read_is_told_to_who_listens_and_to_nobody_after_an_interrupt() -> None:
    lines: list[str] = []
    with listening(lines.append):
        tell_reading("text_encoder", 4 * 10**9)
    tell_reading("vae", 1000)
    assert lines == ["loading the weights of text_encoder, 4.0 GB"]

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        tell_reading("vae", 10**9)
    tell_reading("vae", 10**9)
