"""What a run computes once, and not at every step: what hangs on the prompt alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.shallow_copy import IdentityMemo
from torch import nn

CALLS = {"2b": 1, "1.5": 1, "cogview3": 1, "cogview4": 2, "wan": 2}  # of the denoiser in a step with guidance
STEPS = 3


def opened(folder: Any, precision: Precision) -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=precision, backend="eager", **options)


def sampled(handle: PipelineHandle, *, of_prompt: bool = True) -> tuple[torch.Tensor, RunReport, int]:
    """Latents, report, and how often the family's layers for the prompt computed."""
    family = handle.family
    calls: list[str] = []
    handle.store.model.__dict__["family"] = replace(family, of_prompt=family.of_prompt if of_prompt else ())
    try:
        with torch.inference_mode():
            (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
            denoiser = handle.store.module(family.denoiser, handle.denoising()[0].plan.dtype)
            hooks = [
                denoiser.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
                for name in family.of_prompt
            ]
            settings = SampleSettings(96, 64, frames=9 if family.layout.counts_frames else 1, steps=STEPS, seed=1)
            made, report = sample(handle, positive, negative, replace(settings, guidance_scale=6.0))
    finally:
        handle.store.model.__dict__["family"] = family
    for hook in hooks:
        hook.remove()
    return made, report, len(calls)


@pytest.mark.parametrize("model", CALLS)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP16])
def test_a_prompt_is_projected_once_a_run_to_the_same_bits(model_folder: Any, model: str, precision: Precision) -> None:
    """With every layer scaled, as in fp16, at each step: what is known of a layer may be why a step is made again."""
    handle = opened(model_folder(model), precision)
    (once, _, few), (always, _, many) = sampled(handle), sampled(handle, of_prompt=False)
    assert (few, many) == (CALLS[model] * (STEPS if precision is Precision.FP16 else 1), CALLS[model] * STEPS)
    assert torch.equal(once, always) and torch.isfinite(once).all()


def test_a_step_that_fails_leaves_nothing_behind(model_folder: Any) -> None:
    """What is kept may be why it failed, as where a weight was on its way to the card."""
    handle = opened(model_folder("2b"), Precision.BF16)
    expected, *_ = sampled(handle)
    layer: Any = handle.store.module("transformer", "bf16").get_submodule("patch_embed.text_proj")
    found: list[int] = []

    def broken_once(_layer: nn.Module, _given: Any, made: torch.Tensor) -> torch.Tensor | None:
        found.append(1)
        return made * torch.nan if len(found) == 1 else None

    hook = layer.register_forward_hook(broken_once)
    made, report, _ = sampled(handle)
    hook.remove()
    assert [step.outcome for step in report.steps] == ["rerun", *["finite"] * (STEPS - 1)], report.text()
    assert torch.isfinite(made).all() and (made - expected).norm() < 0.1 * expected.norm()


def test_the_same_tensor_is_known_and_an_equal_one_is_not() -> None:
    once, made = IdentityMemo(kept=2), []

    def make(given: torch.Tensor) -> torch.Tensor:
        made.append(given)
        return given + 1

    first, second, third = (torch.ones(2) for _ in range(3))
    assert once.of(first, make) is once.of(first, make) and len(made) == 1
    once.of(second, make)
    once.of(first, make)
    assert len(made) == 2, "two are kept"
    once.of(third, make)
    once.of(second, make)
    assert len(made) == 3
    once.of(first, make)
    assert len(made) == 4, "the oldest went"
    once.forget()
    once.of(first, make)
    assert len(made) == 5


def test_a_layer_that_is_called_otherwise_computes_each_time() -> None:
    class Layer(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            Layer.calls += 1
            return x * scale

    shell, x = IdentityMemo().in_place_of(Layer()), torch.ones(2)
    assert shell(x) is shell(x) and Layer.calls == 1
    assert torch.equal(shell(x, scale=2.0), x * 2) and torch.equal(shell(x, 3.0), x * 3) and Layer.calls == 3
