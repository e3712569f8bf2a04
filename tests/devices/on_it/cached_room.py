"""What a step cache keeps on the device is counted before a run, and decides how offload `auto` runs it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from card_room import Room, everything_away
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.run.step_cache import _FullCache
from comfyui_onediff_guard.pipelines.weights.placement import _MARGIN, bytes_of
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.step_cache import DenoiserHistory
from small_runs import CPU, opened, sampled

WIDE = CachePolicy(error=0.5, check_every=3)  # random weights change from step to step more than trained ones
STEPS = 5  # of which the fourth one is compared, which takes most


def cached(handle: PipelineHandle, model: str) -> tuple[torch.Tensor, Any]:
    return sampled(replace(handle, step_cache=WIDE), model, steps=STEPS)


def asked_for(handle: PipelineHandle) -> dict[int, int]:
    """{calls of a step that are cached: bytes beside the denoiser's weights}"""
    found = [
        (key[2][2], n_bytes) for key, (n_bytes, _) in handle.store.room.items() if key[0] == handle.family.denoiser
    ]
    return {calls * per_step * (_FullCache in made): n_bytes for (calls, per_step, *made), n_bytes in found}


@pytest.mark.parametrize(("model", "precision"), [("2b", "fp32"), ("2b", "fp16"), ("wan", "bf16")])
def test_what_is_asked_for_is_what_a_cached_run_takes(
    room: Room, monkeypatch: pytest.MonkeyPatch, model: str, precision: str
) -> None:
    handle = room.opened(model, precision=precision)
    kept: list[int] = []
    keep = DenoiserHistory.keep

    def counted(cache: DenoiserHistory, **how: Any) -> bool:
        made = keep(cache, **how)
        entries = [entry for left in cache.history.values() for entry in left]
        kept.append(sum(entry.signal.nbytes + entry.added.nbytes for entry in entries))
        return made

    monkeypatch.setattr(DenoiserHistory, "keep", counted)

    def whole() -> Any:
        return sampled(handle, model, steps=STEPS)[1]

    def with_cache() -> Any:
        return cached(handle, model)[1]

    for run in (whole, with_cache):
        run()  # which loads
    _, least = room.taken_by(whole)
    report, most = room.taken_by(with_cache)
    assert report.cache.compared
    rooms = asked_for(handle)
    assert set(rooms) == {0, handle.family.guidance.calls if handle.family.prompt else 1}
    more = max(rooms.values()) - rooms[0]
    assert max(kept) <= more
    if precision == "fp16":  # the first step is the largest one, in which each row is scaled; the cache fills later
        assert most - least <= more
    else:
        assert more == pytest.approx(most - least, rel=0.25)


def test_auto_gives_up_the_cache_where_it_has_no_room_for_it(room: Room) -> None:
    handle = room.opened("2b", "auto")
    for run in (cached, sampled):
        run(handle, "2b")
    rooms, weights = asked_for(handle), bytes_of(handle.store.module("transformer", "fp32", place=False))
    for calls, said in ((0, "none, no step cache"), (1, "none")):
        everything_away(handle)
        with room.limited(weights + int(rooms[calls] * _MARGIN) + (rooms[1] - rooms[0]) // 2):  # for latents
            _, report = cached(handle, "2b")
        assert any(f"offload auto chose {said}: " in note for note in report.notes), report.notes
        assert bool(report.cache.compared) == bool(calls)
        assert not any("memory ran out" in note for note in report.notes), "it was foreseen"


def test_a_second_denoiser_finds_nothing_that_the_first_one_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan 2.2's two transformers, of which the first is done when the second one is called."""
    caches: list[DenoiserHistory] = []
    full: list[int] = []
    keep = DenoiserHistory.keep

    def noted(cache: DenoiserHistory, **how: Any) -> bool:
        made = keep(cache, **how)
        caches.extend([] if cache in caches else [cache])
        full.append(sum(bool(each.history) for each in caches))
        return made

    monkeypatch.setattr(DenoiserHistory, "keep", noted)
    handle = opened("wan-two", device=CPU)
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    settings = SampleSettings(64, 48, steps=STEPS, seed=3, frames=5, guidance_scale=5.0)
    sample(replace(handle, step_cache=WIDE), positive, negative, settings)
    assert len(caches) == 2 and set(full) == {1}
