"""Offload `auto` on cards of several sizes: a stage fits without running out of memory, or is refused in advance."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from card_room import Room, auto_modes, fallbacks, offload_all, result_and_peak
from comfyui_onediff_guard.pipelines.run import denoiser
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.activation_memory import estimate_activation_bytes
from comfyui_onediff_guard.pipelines.weights.placement import NoRoom
from small_runs import SIZES, sampled

MODELS = [pytest.param(name, marks=[pytest.mark.long] if name == "svd" else []) for name in SIZES]
PARTS = (1.3, 0.985, 0.9, 0.6, 0.4, 0.2, 0.1, 0.05)  # share of the memory that an unlimited run needs
Run = Callable[[], tuple[Any, Any]]


def cases(handle: PipelineHandle, model: str) -> dict[str, tuple[Run, set[str], float]]:
    """{stage: (run, modes expected on some card size, allowed relative error)}"""
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


def mark_of(model: str, stage: str) -> list[Any]:
    return [pytest.mark.long] if model == "svd" else [pytest.mark.quick] if (model, stage) == ("2b", "sampling") else []


@pytest.mark.parametrize(
    ("model", "stage"),
    [
        pytest.param(model, stage, marks=mark_of(model, stage))
        for model in SIZES
        for stage in ("encoding", "sampling", "decoding")
        if (model, stage) != ("svd", "encoding")  # SVD has no prompt
    ],
)
def test_stage_fits_or_is_refused_before_it_computes(room: Room, model: str, stage: str) -> None:
    handle = room.opened(model, "auto")
    run, expected, error = cases(handle, model)[stage]
    (right, report), most = result_and_peak(room, handle, run)
    assert auto_modes(report)[0] in ("none", "whole")
    found, refused = set(), []
    spare = 2 * max((room.bytes_beside_weights - room.call_bytes).values())
    for part in PARTS:
        offload_all(handle)
        with room.limited(part * most, spare=spare):
            try:
                made, report = run()
            except NoRoom as failed:
                refused.append(str(failed) if part * most > spare else "")
                continue
        assert not fallbacks(report), "estimated in advance"
        assert not refused, "a smaller card was enough"
        found |= {*auto_modes(report)}
        if "tiling" not in [way for each in report.before for way in auto_modes(each)]:
            assert (made - right).norm() <= error * right.norm(), part
    print(f"{model} {stage} {found} {expected - found}")
    assert refused and found >= expected
    for text in refused:
        # less memory than latents and prompts need; or a small stage without an estimate
        if not text or text.startswith("image encoder: out of memory"):
            continue
        assert "not enough memory" in text
        assert re.search(r"needs [\d.]+ [MG]B of weights and [\d.]+ [MG]B of activations, of [\d.]+ [MG]B av", text)


@pytest.mark.parametrize("model", MODELS)
def test_auto_copies_as_much_as_offload_none_with_enough_memory(card: Any, room: Room, model: str) -> None:
    def copied(offload: str) -> list[int]:
        handle, counted = room.opened(model, offload), []
        for _ in range(2):
            card.reset()
            decode(handle, sampled(handle, model)[0])
            counted.append(card.counts()["bytes to the device"])
        offload_all(handle)
        return counted

    first, again = copied("auto")
    assert [first, again] == copied("none") and again < first


@pytest.mark.quick
@pytest.mark.parametrize("wish", ["group", "sequential"])
def test_low_memory_flag_selects_the_offload_mode(room: Room, wish: str) -> None:
    """As with ComfyUI's --lowvram and --novram. A VAE has no such mode and runs as usual."""
    handle = room.opened("2b", "auto")
    handle.store.placement.wish = wish
    latents, sampling = sampled(handle, "2b")
    assert [*map(auto_modes, (sampling, decode(handle, latents)[1]))] == [[wish], ["whole"]]
    handle.store.prompts.clear()
    assert auto_modes(encode_prompts(handle, ["a red kite"])[1]) == [wish]


def test_mode_that_ran_out_of_memory_is_not_retried_with_as_little(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = room.opened("2b", "auto")
    sampled(handle, "2b")
    right, most = result_and_peak(room, handle, lambda: sampled(handle, "2b")[0])
    monkeypatch.setattr(denoiser, "estimate_activation_bytes", lambda *given: estimate_activation_bytes(*given) // 3)
    offload_all(handle)
    with room.limited(0.9 * most):
        first, report = sampled(handle, "2b")
        assert auto_modes(report) == ["none"] and fallbacks(report)
        offload_all(handle)
        second, report = sampled(handle, "2b")
        assert auto_modes(report) == ["none, CFG halves in turn"] and not fallbacks(report)
    offload_all(handle)
    with room.limited(2 * most):
        third, report = sampled(handle, "2b")
        assert auto_modes(report) == ["none"] and not fallbacks(report)
    for latents in (first, second, third):
        assert (latents - right).norm() <= 1e-4 * right.norm()
