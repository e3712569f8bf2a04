"""Memory runs out once in a layer of any stage: the run continues with bit-equal frames."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from card_room import fallbacks
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from small_runs import CPU, SIZES, opened, sampled
from tiers import by_tier

FAULTS = by_tier(20, 5)  # per family


class Layers:
    """Counts the calls of all layers of a pipeline, and raises an out-of-memory error in one of them."""

    def __init__(self, handle: PipelineHandle):
        self.calls: list[str] = []  # component of each call
        self.fails_at = -1
        checks = handle.store._checked

        def watched(name: str, module: torch.nn.Module, dtype: str) -> list[str]:
            said = checks(name, module, dtype)
            for layer in module.modules():
                layer.register_forward_pre_hook(lambda *_: self._called(name))
            return said

        handle.store._checked = watched

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) - 1 == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def begin(self, fails_at: int = -1) -> None:
        self.calls, self.fails_at = [], fails_at


def places(calls: list[str]) -> list[int]:
    """The same number of random calls of each component."""
    draw = random.Random(7)
    of = {name: [n for n, each in enumerate(calls) if each == name] for name in dict.fromkeys(calls)}
    found = [draw.choice(numbers) for _ in range(FAULTS) for numbers in of.values()]
    return found[:FAULTS]


@pytest.mark.parametrize("model", SIZES)
def test_one_out_of_memory_error_keeps_frames_bit_equal(figure: Callable[[str, object], None], model: str) -> None:
    handle = opened(model, "auto", device=CPU)
    layers = Layers(handle)

    def run(fails_at: int = -1) -> tuple[torch.Tensor, list[str]]:
        handle.store.prompts.clear()
        layers.begin(fails_at)
        latents, sampling = sampled(handle, model)
        frames, decoding = decode(handle, latents)
        return frames, [way for report in (sampling, *sampling.before, decoding) for way in fallbacks(report)]

    run()  # loads the weights
    right, survived = run()
    assert not survived
    for place in places(layers.calls):
        frames, survived = run(place)
        assert torch.equal(frames, right), place
        assert survived == ["nothing else on the device"] or layers.calls[place] == "text_encoder"  # another report
    figure("out-of-memory error in one layer's call: runs that continued with bit-equal frames", FAULTS)


@pytest.mark.parametrize("times", [1, 2])
def test_run_scope_stays_in_fp32_after_out_of_memory(times: int) -> None:
    """With scope "run", in every fallback, for one and two out-of-memory errors."""
    handle = replace(opened("2b", precision="bf16", device=CPU), policy=GuardPolicy(scope=Scope.RUN))
    block = handle.store.module("transformer", "bf16").transformer_blocks[0]
    left, steps = [torch.OutOfMemoryError("CUDA out of memory.")] * times, []

    def fail(_block: torch.nn.Module, _given: object, made: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        if steps[-1:] == [2] and left:
            raise left.pop()
        return made if made[0].dtype is torch.float32 else (made[0] * torch.inf, *made[1:])

    block.register_forward_hook(fail)
    _, report = sampled(handle, "2b", steps=5, step_done=lambda done, *_: steps.append(done))
    assert not left and len(report.steps) > 2
    assert [step.outcome for step in report.steps] == ["rerun", *["finite"] * (len(report.steps) - 1)]
