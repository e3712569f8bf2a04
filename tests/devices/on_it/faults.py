"""Interrupted, failing and concurrent runs on the second device: the state they leave, and the next run."""

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

FAILING = 5  # allocations to fail, spread over a run


def is_right(made: torch.Tensor, expected: torch.Tensor, offload: str) -> bool:
    """Offload 'auto' may run CFG halves sequentially, where the CPU's products differ in the last bits."""
    return torch.equal(made, expected) or (offload == "auto" and torch.allclose(made, expected, atol=1e-5))


@pytest.fixture
def check_state(card: Any) -> Callable[..., None]:
    """Check that the next run is right, no access was unordered, and only weights that stay are on the device."""

    def check(handle: Any, expected: torch.Tensor) -> None:
        assert is_right(frames(handle), expected, handle.offload.value), "the next run"
        assert not second_device.hazards()
        gc.collect()
        assert card.used() <= handle.store.bytes_on_device() + 512 * 1024

    return check


@pytest.mark.long
@pytest.mark.parametrize("offload", ["auto", "group"])
def test_failed_allocation_keeps_the_result(card: Any, check_state: Callable[..., None], offload: str) -> None:
    """The run only takes longer, also before a model's first call; the next run is right."""
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
        check_state(handle, expected)


@pytest.mark.long
@pytest.mark.parametrize("offload", ["model", "group"])
def test_interrupt_at_a_step_leaves_the_next_run_right(check_state: Callable[..., None], offload: str) -> None:
    def stop(done: int, *_: Any, **__: Any) -> None:
        if done >= 1:
            raise KeyboardInterrupt

    handle = opened("2b", offload)
    expected = frames(handle)
    with pytest.raises(KeyboardInterrupt):
        frames(handle, step_done=stop)
    check_state(handle, expected)


def test_three_threads_with_two_pipelines_are_bit_equal() -> None:
    handles = [opened("2b", "group"), opened("cogview4", "auto")]
    handles += handles[:1]
    expected = [frames(handle) for handle in handles]
    made = at_once(*(lambda handle=handle: [frames(handle) for _ in range(2)] for handle in handles))
    for handle, runs, right in zip(handles, made, expected, strict=True):
        assert all(torch.equal(each, right) for each in (*runs, frames(handle)))


def test_probe_measures_the_same_as_on_cpu() -> None:
    probed = []
    for device in (CUDA, CPU):
        handle = opened("2b", "group", overflow="stream", device=device)
        positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
        settings = SampleSettings(64, 48, steps=2, seed=3, frames=5, guidance_scale=5.0)
        probed.append(probe(handle, positive, negative, settings).probed)
    assert probed[0] == probed[1]


def test_smaller_cards_give_the_same_frames_or_refuse(card: Any) -> None:
    """With offload 'auto' the frames stay the same with less memory, until a run is refused."""
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
def test_compiled_blocks_equal_cpu(check_state: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """With `aot_eager` instead of inductor, whose kernels the device cannot run."""
    monkeypatch.setitem(backends._PROBES, "inductor", lambda _device: "")  # the probe requires Triton
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
                check_state(handle, made[device.type, offload])
            handle.store.empty()
    assert all(torch.equal(each, made["cpu", "none"]) for each in made.values())
