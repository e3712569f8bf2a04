"""Offload `auto` on cards of so many bytes: a stage fits, never running out of memory, or refuses before computing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from card_room import Room, chosen, everything_away, most_of, ways
from comfyui_onediff_guard.pipelines.run import denoiser
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.activation_memory import estimate_activation_bytes
from comfyui_onediff_guard.pipelines.weights.placement import NoRoom
from small_runs import SIZES, sampled

MODELS = [pytest.param(name, marks=[pytest.mark.long] if name == "svd" else []) for name in SIZES]
PARTS = (1.3, 0.985, 0.9, 0.6, 0.4, 0.2, 0.1, 0.05)  # of what the run takes where there is room for all
Run = Callable[[], tuple[Any, Any]]


def cases(handle: PipelineHandle, model: str) -> dict[str, tuple[Run, set[str], float]]:
    """{what: (run, ways that are seen on cards of one size or another, how far from the right result)}"""
    latents, _ = sampled(handle, model)
    apart = {"none, CFG halves in turn"} if handle.family.guidance.calls == 1 else set()
    smaller = {"svd": {"2 at once", "1 at once"}, "wan": set()}.get(model, {"tiling"})

    def encoding() -> tuple[torch.Tensor, Any]:
        handle.store.prompts.clear()
        (made,), report = encode_prompts(handle, ["a red kite"])
        return made, report

    return {
        "encoding": (encoding, {"none"} if model == "wan" else {"none", "sequential"}, 1e-5),
        "sampling": (lambda: sampled(handle, model), {"none", *apart}, 1e-4),
        "decoding": (lambda: decode(handle, latents), {"whole", *smaller}, 2),
    }


def mark_of(model: str, what: str) -> list[Any]:
    return [pytest.mark.long] if model == "svd" else [pytest.mark.quick] if (model, what) == ("2b", "sampling") else []


@pytest.mark.parametrize(
    ("model", "what"),
    [
        pytest.param(model, what, marks=mark_of(model, what))
        for model in SIZES
        for what in ("encoding", "sampling", "decoding")
        if (model, what) != ("svd", "encoding")  # it takes no prompt
    ],
)
def test_a_stage_fits_or_refuses_before_it_computes(room: Room, model: str, what: str) -> None:
    handle = room.opened(model, "auto")
    run, expected, error = cases(handle, model)[what]
    (right, report), most = most_of(room, handle, run)
    assert chosen(report)[0] in ("none", "whole")
    found, refused = set(), []
    spare = 2 * max((room.beside - room.made).values())
    for part in PARTS:
        everything_away(handle)
        with room.limited(part * most, spare=spare):
            try:
                made, report = run()
            except NoRoom as failed:
                refused.append(str(failed) if part * most > spare else "")
                continue
        assert not ways(report), "it was foreseen"
        assert not refused, "a smaller card was enough"
        found |= {*chosen(report)}
        if "tiling" not in [way for each in report.before for way in chosen(each)]:
            assert (made - right).norm() <= error * right.norm(), part
    print(f"{model} {what} {found} {expected - found}")
    assert refused and found >= expected
    for text in refused:
        # less than latents and prompts take; or of which nothing is foreseen, since it takes little
        if not text or text.startswith("image encoder: memory ran out"):
            continue
        assert "there is not enough memory" in text
        assert re.search(r"takes [\d.]+ [MG]B of weights and [\d.]+ [MG]B beside them, of [\d.]+ [MG]B that", text)


@pytest.mark.parametrize("model", MODELS)
def test_where_there_is_room_nothing_is_moved_but_what_was_without(card: Any, room: Room, model: str) -> None:
    def copied(offload: str) -> list[int]:
        handle, counted = room.opened(model, offload), []
        for _ in range(2):
            card.reset()
            decode(handle, sampled(handle, model)[0])
            counted.append(card.counts()["bytes to the device"])
        everything_away(handle)
        return counted

    first, again = copied("auto")
    assert [first, again] == copied("none") and again < first


@pytest.mark.quick
@pytest.mark.parametrize("wish", ["group", "sequential"])
def test_a_process_started_for_little_memory_begins_with_that(room: Room, wish: str) -> None:
    """As ComfyUI's --lowvram and --novram ask for. A VAE has no such way, and runs as ever."""
    handle = room.opened("2b", "auto")
    handle.store.placement.wish = wish
    latents, sampling = sampled(handle, "2b")
    assert [*map(chosen, (sampling, decode(handle, latents)[1]))] == [[wish], ["whole"]]
    handle.store.prompts.clear()
    assert chosen(encode_prompts(handle, ["a red kite"])[1]) == [wish]


def test_what_ran_out_in_spite_of_the_count_is_not_tried_again_with_as_little(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = room.opened("2b", "auto")
    sampled(handle, "2b")
    right, most = most_of(room, handle, lambda: sampled(handle, "2b")[0])
    monkeypatch.setattr(denoiser, "estimate_activation_bytes", lambda *given: estimate_activation_bytes(*given) // 3)
    everything_away(handle)
    with room.limited(0.9 * most):
        first, report = sampled(handle, "2b")
        assert chosen(report) == ["none"] and ways(report)
        everything_away(handle)
        second, report = sampled(handle, "2b")
        assert chosen(report) == ["none, CFG halves in turn"] and not ways(report)
    everything_away(handle)
    with room.limited(2 * most):
        third, report = sampled(handle, "2b")
        assert chosen(report) == ["none"] and not ways(report)
    for latents in (first, second, third):
        assert (latents - right).norm() <= 1e-4 * right.norm()
