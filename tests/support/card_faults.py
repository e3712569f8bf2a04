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
    model: str,
    offload: str,
    precision: str = "fp32",
    overflow: str = "none",
    device: torch.device = CUDA,
    backend: str = "eager",
) -> Any:
    import shared_models
    from comfyui_onediff_guard.pipelines.models.recognised import family_of
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.policy import Precision

    folder = shared_models.model_folder(model, overflow)
    options: dict[str, Any] = {"backend": backend, "offload": offload, "placement": PlainPlacement(device)}
    return load(folder, family_of(folder), precision=Precision(precision), **options)


def frames(handle: Any, size: tuple[int, int, int] | None = None, **more: Any) -> torch.Tensor:
    """A whole run: encode, sample, decode. size: width, height and frames; a small one by default."""
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample

    handle.store.prompts.clear()
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    width, height, count = size or ((64, 48, 5) if "CogVideoX" in handle.family.name else (64, 64, 1))
    settings = SampleSettings(width, height, steps=2, seed=3, frames=count, guidance_scale=5.0)
    latents, _ = sample(handle, positive, negative, settings, **more)
    return decode(handle, latents)[0].cpu()


def is_right(made: torch.Tensor, expected: torch.Tensor, offload: str) -> bool:
    """Offload 'auto' goes on with guidance's halves apart, of which a CPU's products differ in the last bits."""
    return torch.equal(made, expected) or (offload == "auto" and torch.allclose(made, expected, atol=1e-5))


def nothing_is_wrong(handle: Any, expected: torch.Tensor, size: tuple[int, int, int] | None = None) -> None:
    """The next run is right, nothing was unordered, and what is on the device is the weights that stay there."""
    assert is_right(frames(handle, size), expected, handle.offload.value), "the next run"
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
    from comfyui_onediff_guard.pipelines.weights.oom_fallback import NoRoom

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


def case_a_device_like_apples() -> None:
    """No stage asks for float64, streams or page-locked memory, nor do previews; what a model has in float64 comes in
    float32."""
    from comfyui_onediff_guard.pipelines.insight.probe import usual_size
    from comfyui_onediff_guard.pipelines.preview.frames import Previews

    for model in ("2b", "cogview4"):
        on_cpu = opened(model, "none", "fp32", "stream", torch.device("cpu"))
        size = usual_size(on_cpu, 0, 0, 0)  # for others diffusers makes a table anew, by the kind of device
        exact = frames(on_cpu, size)
        for offload in ("none", "model"):
            handle, pictures = opened(model, offload, "fp16", "stream"), []
            made = frames(handle, size, previews=Previews(pictures.append))
            error = float((made - exact).norm() / exact.norm())
            assert error < 0.01 and len(pictures) == (2 if model == "2b" else 0), (model, offload, error, pictures)
            nothing_is_wrong(handle, made, size)
            handle.store.empty()


def case_compiled_blocks() -> None:
    """By `aot_eager` in inductor's place, which makes no kernels that the device could not run."""
    from comfyui_onediff_guard.pipelines.compile import backends
    from comfyui_onediff_guard.pipelines.compile.warm_up import sizes_of, warm_up
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    backends._PROBES["inductor"] = lambda _device: ""  # it asks for Triton
    compile_fx.compile_fx = lambda model, inputs, **_: aot_eager(model, inputs)
    made = {}
    for device in (CUDA, torch.device("cpu")):
        for offload in ("none", "group"):
            handle = opened("2b", offload, "fp16", "stream", device, "inductor")
            (warmed,) = warm_up(handle, sizes_of(handle, "64x48x5"))
            assert warmed.report.backend == "inductor"
            assert warmed.report.graphs or offload == "group", "both share one"
            made[device.type, offload] = frames(handle)
            if device == CUDA:
                nothing_is_wrong(handle, made[device.type, offload])
            handle.store.empty()
    assert all(torch.equal(each, made["cpu", "none"]) for each in made.values())


CASES = {name.removeprefix("case_"): each for name, each in [*globals().items()] if name.startswith("case_")}


OTHER_CARDS: dict[str, dict[str, Any]] = {
    "a_card_without_bf16": {"capability": (7, 5)},
    "a_device_like_apples": {"like_apples": True},
}


if __name__ == "__main__":
    second_device.install(**OTHER_CARDS.get(sys.argv[1], {}))
    with tempfile.TemporaryDirectory() as shared:
        os.environ.setdefault("ONEDIFF_GUARD_SHARED_MODELS", shared)
        CASES[sys.argv[1]]()
