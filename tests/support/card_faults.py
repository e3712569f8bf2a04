"""Runs on the second device that something breaks off, or that go on beside each other: what is left, and what comes
next. Each case raises where it is not as it should be; test_card_faults.py judges.

    python tests/support/card_faults.py CASE
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from typing import Any

import second_device
import torch

CUDA = torch.device("cuda:0")
FAILING = 5  # places, spread over a run, at which an allocation fails


def opened(
    model: str, offload: str, precision: str = "fp32", overflow: str = "none", device: torch.device = CUDA
) -> Any:
    import shared_models
    from comfyui_onediff_guard.pipelines.models.recognised import family_of
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.policy import Precision

    folder = shared_models.model_folder(model, overflow)
    options: dict[str, Any] = {"backend": "eager", "offload": offload, "placement": PlainPlacement(device)}
    return load(folder, family_of(folder), precision=Precision(precision), **options)


def frames(handle: Any, **more: Any) -> torch.Tensor:
    """A whole run: encode, sample, decode."""
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample

    handle.store.prompts.clear()
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    height, count = (48, 5) if "CogVideoX" in handle.family.name else (64, 1)
    settings = SampleSettings(64, height, steps=2, seed=3, frames=count, guidance_scale=5.0)
    latents, _ = sample(handle, positive, negative, settings, **more)
    return decode(handle, latents)[0].cpu()


def is_right(made: torch.Tensor, expected: torch.Tensor, offload: str) -> bool:
    """Offload 'auto' goes on with guidance's halves apart, of which a CPU's products differ in the last bits."""
    return torch.equal(made, expected) or (offload == "auto" and torch.allclose(made, expected, atol=1e-5))


def nothing_is_wrong(handle: Any, expected: torch.Tensor) -> None:
    """The next run is right, nothing was unordered, and what is on the device is the weights that stay there."""
    assert is_right(frames(handle), expected, handle.offload.value), "the next run"
    hazards = second_device.hazards()
    assert not hazards, hazards
    gc.collect()
    stays = handle.store.bytes_on_device()
    used = second_device.card.used()
    assert used <= stays + 512 * 1024, f"{used} bytes are there, of which {stays} are weights"


def case_an_allocation_that_fails_anywhere() -> None:
    """It costs the run nothing but time, before the first call of a model, too; the run after it is right."""
    card = second_device.card
    for offload in ("auto", "group"):
        handle = opened("2b", offload)
        expected = frames(handle)
        card.reset()
        frames(handle)
        launched = card.counts()["kernels"]
        for number in range(FAILING):
            card.fail_in(1 + number * launched // FAILING)
            try:
                assert is_right(frames(handle), expected, offload), (offload, number)
            finally:
                card.fail_in(0)
            nothing_is_wrong(handle, expected)
        handle.store.empty()


def case_an_interrupt_at_a_step() -> None:
    class Interrupted(Exception):
        pass

    def stop(done: int, *_: Any, **__: Any) -> None:
        if done >= 1:
            raise Interrupted

    for offload in ("model", "group"):
        handle = opened("2b", offload)
        expected = frames(handle)
        try:
            frames(handle, step_done=stop)
        except Interrupted:
            nothing_is_wrong(handle, expected)
        else:
            raise AssertionError("it was not interrupted")
        handle.store.empty()


def case_three_threads_with_two_pipelines() -> None:
    from at_once import at_once

    handles = [opened("2b", "group"), opened("cogview4", "auto")]
    handles += handles[:1]
    expected = [frames(handle) for handle in handles]
    made = at_once(*(lambda handle=handle: [frames(handle) for _ in range(2)] for handle in handles))
    for handle, runs, right in zip(handles, made, expected, strict=True):
        assert all(torch.equal(each, right) for each in runs)
        assert torch.equal(frames(handle), right)
    hazards = second_device.hazards()
    assert not hazards, hazards
    for handle in handles:
        handle.store.empty()


def case_the_probe_measures_the_same() -> None:
    from comfyui_onediff_guard.pipelines.insight.probe import probe
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings

    probed = {}
    for device in (CUDA, torch.device("cpu")):
        handle = opened("2b", "group", device=device, overflow="stream")
        positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
        settings = SampleSettings(64, 48, steps=2, seed=3, frames=5, guidance_scale=5.0)
        probed[device.type] = probe(handle, positive, negative, settings).probed
    assert probed["cuda"] == probed["cpu"]


def case_memory_of_many_sizes() -> None:
    """With offload 'auto' the frames are the same with less and less memory, until a run is refused."""
    from comfyui_onediff_guard.pipelines.weights.ladder import NoRoom

    card = second_device.card
    handle = opened("2b", "none")
    card.reset()
    expected, most = frames(handle), card.most_used()
    handle.store.empty()
    came = []
    for share in (2.0, 1.02, 0.6, 0.05):
        card.set_total(int(share * most))
        handle = opened("2b", "auto")
        try:
            came.append("right" if is_right(frames(handle), expected, "auto") else "wrong")
        except NoRoom as error:
            came.append("refused" if "take a card with more memory" in str(error) else str(error))
        assert card.most_used() <= card.total()
        handle.store.empty()
        hazards = second_device.hazards()
        assert not hazards, (share, hazards)
        gc.collect()
        assert card.used() <= 512 * 1024, (share, card.used())
        card.reset()
    assert came[0] == "right" and came[-1] == "refused" and {*came} == {"right", "refused"}, (most, came)


def case_a_card_without_bf16() -> None:
    """`auto` takes fp16 there, and a stream that plain fp16 cannot hold comes out right."""
    from comfyui_onediff_guard.precision.policy import Component

    for model in ("2b", "cogview4"):
        handle = opened(model, "auto", "auto", "stream")
        made = frames(handle)
        exact = frames(opened(model, "none", "fp32", "stream", torch.device("cpu")))
        assert handle.architecture.name == "sm75" and handle.plan(Component.DENOISER).dtype == "fp16"
        error = float((made - exact).norm() / exact.norm())
        assert error < 0.01, (model, error)
        nothing_is_wrong(handle, made)
        handle.store.empty()


CASES = {name.removeprefix("case_"): each for name, each in [*globals().items()] if name.startswith("case_")}


CAPABILITIES = {"a_card_without_bf16": (7, 5)}


if __name__ == "__main__":
    second_device.install(capability=CAPABILITIES.get(sys.argv[1], (8, 6)))
    with tempfile.TemporaryDirectory() as shared:
        os.environ.setdefault("ONEDIFF_GUARD_SHARED_MODELS", shared)
        CASES[sys.argv[1]]()
