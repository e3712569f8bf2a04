"""Runs on the second device that something breaks off, or that go on beside each other: what is left, and what comes
next."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import second_device
import torch
from at_once import at_once
from comfyui_onediff_guard.pipelines.compile import backends
from comfyui_onediff_guard.pipelines.insight.probe import probe
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import NoRoom
from small_runs import CPU, CUDA, frames, opened, prompts
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import compile_fx

FAILING = 5  # places, spread over a run, at which an allocation fails


def is_right(made: torch.Tensor, expected: torch.Tensor, offload: str) -> bool:
    """Offload 'auto' goes on with guidance's halves apart, of which a CPU's products differ in the last bits."""
    return torch.equal(made, expected) or (offload == "auto" and torch.allclose(made, expected, atol=1e-5))


@pytest.fixture
def nothing_is_wrong(card: Any) -> Callable[..., None]:
    """The next run is right, nothing was unordered, and what is on the device is the weights that stay there."""

    def look(handle: Any, expected: torch.Tensor) -> None:
        assert is_right(frames(handle), expected, handle.offload.value), "the next run"
        assert not second_device.hazards()
        gc.collect()
        assert card.used() <= handle.store.bytes_on_device() + 512 * 1024

    return look


@pytest.mark.long
@pytest.mark.parametrize("offload", ["auto", "group"])
def test_an_allocation_that_fails_anywhere(card: Any, nothing_is_wrong: Callable[..., None], offload: str) -> None:
    """It costs the run nothing but time, before the first call of a model, too; the run after it is right."""
    handle = opened("2b", offload)
    expected = frames(handle)
    card.reset()
    frames(handle)
    launched = card.counts()["kernels"]
    for number in range(FAILING):
        card.fail_in(1 + number * launched // FAILING)
        try:
            assert is_right(frames(handle), expected, offload), number
        finally:
            card.fail_in(0)
        nothing_is_wrong(handle, expected)


@pytest.mark.long
@pytest.mark.parametrize("offload", ["model", "group"])
def test_an_interrupt_at_a_step(nothing_is_wrong: Callable[..., None], offload: str) -> None:
    def stop(done: int, *_: Any, **__: Any) -> None:
        if done >= 1:
            raise KeyboardInterrupt

    handle = opened("2b", offload)
    expected = frames(handle)
    with pytest.raises(KeyboardInterrupt):
        frames(handle, step_done=stop)
    nothing_is_wrong(handle, expected)


def test_three_threads_with_two_pipelines() -> None:
    handles = [opened("2b", "group"), opened("cogview4", "auto")]
    handles += handles[:1]
    expected = [frames(handle) for handle in handles]
    made = at_once(*(lambda handle=handle: [frames(handle) for _ in range(2)] for handle in handles))
    for handle, runs, right in zip(handles, made, expected, strict=True):
        assert all(torch.equal(each, right) for each in (*runs, frames(handle)))


def test_the_probe_measures_the_same() -> None:
    probed = []
    for device in (CUDA, CPU):
        handle = opened("2b", "group", overflow="stream", device=device)
        positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
        settings = SampleSettings(64, 48, steps=2, seed=3, frames=5, guidance_scale=5.0)
        probed.append(probe(handle, positive, negative, settings).probed)
    assert probed[0] == probed[1]


def test_memory_of_many_sizes(card: Any) -> None:
    """With offload 'auto' the frames are the same with less and less memory, until a run is refused."""
    handle, total = opened("2b", "none"), card.total()
    card.reset()
    expected, most = frames(handle), card.most_used()
    handle.store.empty()
    came = []
    for share in (2.0, 1.02, 0.6, 0.05):
        card.set_total(int(share * most))
        handle = opened("2b", "auto")
        try:
            came.append("right" if is_right(frames(handle), expected, "auto") else "wrong")
        except NoRoom:
            came.append("refused")
        finally:
            card.set_total(total)
        assert card.most_used() <= share * most
        handle.store.empty()
        assert not second_device.hazards(), share
        gc.collect()
        assert card.used() <= 512 * 1024, share
        card.reset()
    assert came[0] == "right" and came[-1] == "refused" and {*came} == {"right", "refused"}, (most, came)


@pytest.mark.long
def test_compiled_blocks(nothing_is_wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By `aot_eager` in inductor's place, which makes no kernels that the device could not run."""
    monkeypatch.setitem(backends._PROBES, "inductor", lambda _device: "")  # it asks for Triton
    monkeypatch.setattr(compile_fx, "compile_fx", lambda model, inputs, **_: aot_eager(model, inputs))
    made = {}
    for device in (CUDA, CPU):
        for offload in ("none", "group"):
            handle = opened("2b", offload, "fp16", "stream", device=device, backend="inductor")
            positive, negative = prompts(handle)
            _, report = sample(handle, positive, negative, SampleSettings(64, 48, 2, 0, 5, 2.0))
            assert report.backend == "inductor"
            assert report.graphs or offload == "group", "both share one"
            made[device.type, offload] = frames(handle)
            if device == CUDA:
                nothing_is_wrong(handle, made[device.type, offload])
            handle.store.empty()
    assert all(torch.equal(each, made["cpu", "none"]) for each in made.values())
