"""Memory of the step cache: estimated before a run, and used by offload `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from card_room import Room, offload_all
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.run.step_cache import _FullCache
from comfyui_onediff_guard.pipelines.weights.placement import _MARGIN, bytes_of
from comfyui_onediff_guard.precision.error_estimate import CachePolicy
from comfyui_onediff_guard.precision.step_cache import DenoiserHistory
from small_runs import CPU, opened, sampled

WIDE = CachePolicy(error=0.5, check_every=3)  # random weights change more between steps than trained ones
STEPS = 5  # the fourth is compared, which needs most memory


def cached(handle: PipelineHandle, model: str) -> tuple[torch.Tensor, Any]:
    return sampled(replace(handle, step_cache=WIDE), model, steps=STEPS)


def estimated_memory(handle: PipelineHandle) -> dict[int, int]:
    """{cached calls of a step: estimated bytes without the denoiser's weights}"""
    found = [
        (key[2][2], n_bytes) for key, (n_bytes, _) in handle.store.room.items() if key[0] == handle.family.denoiser
    ]
    return {calls * per_step * (_FullCache in made): n_bytes for (calls, per_step, *made), n_bytes in found}


@pytest.mark.parametrize(("model", "precision"), [("2b", "fp32"), ("2b", "fp16"), ("wan", "bf16")])
def test_estimated_cache_memory_covers_a_cached_run(
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
        run()  # loads the weights
    _, least = room.measure(whole)
    report, most = room.measure(with_cache)
    assert report.cache.compared
    rooms = estimated_memory(handle)
    assert set(rooms) == {0, handle.family.guidance.calls if handle.family.prompt else 1}
    more = max(rooms.values()) - rooms[0]
    assert max(kept) <= more
    if precision == "fp16":  # the first step needs most, since it scales each row; the cache fills later
        assert most - least <= more
    else:
        assert more == pytest.approx(most - least, rel=0.25)


def test_auto_disables_the_step_cache_without_memory_for_it(room: Room) -> None:
    handle = room.opened("2b", "auto")
    for run in (cached, sampled):
        run(handle, "2b")
    rooms, weights = estimated_memory(handle), bytes_of(handle.store.module("transformer", "fp32", place=False))
    for calls, said in ((0, "none, no step cache"), (1, "none")):
        offload_all(handle)
        with room.limited(weights + int(rooms[calls] * _MARGIN) + (rooms[1] - rooms[0]) // 2):  # for latents
            _, report = cached(handle, "2b")
        assert any(f"offload auto chose {said}: " in note for note in report.notes), report.notes
        assert bool(report.cache.compared) == bool(calls)
        assert not any("out of memory" in note for note in report.notes), "estimated in advance"


def test_only_one_of_two_denoisers_holds_a_cache_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan 2.2's two transformers: the first is finished when the second is called."""
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
