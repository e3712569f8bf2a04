"""What the compile benchmarks time: the published denoisers, called as diffusers' pipelines call them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.policy import Precision
from contestants import Subject, eager, ours
from denoisers import MODELS, Size, build, step
from floor import tflop
from PIL import Image

SMALL = {"cogvideox-2b": "2b", "cogvideox-5b": "5b", "cogview3-plus": "cogview3", "svd-xt": "svd-xt"}
CPU = torch.device("cpu")
FACTS = {"cogvideox-2b": (1.69, 240), "cogvideox-5b": (5.57, 664), "cogview3-plus": (2.85, 52)}  # 10⁹ weights, TFLOP


def subject(name: str, dtype: str = "bf16") -> Subject:
    return Subject(name, MODELS[name], MODELS[name].sizes["tiny"], CPU, dtype)


@pytest.mark.parametrize("name", FACTS)
def test_a_full_step_has_the_operations_known_for_it(name: str) -> None:
    model = MODELS[name]
    module = build(model, model.sizes["full"], torch.device("meta"), torch.bfloat16)
    parameters, expected = FACTS[name]
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(parameters, abs=0.01)
    assert tflop(model, model.sizes["full"]) == pytest.approx(expected, rel=0.01)


def test_operations_of_svd_hold_its_attention_over_pixels() -> None:
    """Reckoned by hand: attention over a frame's pixels, at each resolution, is what the rest does not explain."""
    model = MODELS["svd-xt"]
    levels = {(72 * 128, 320): 5, (36 * 64, 640): 5, (18 * 32, 1280): 5, (9 * 16, 1280): 1}  # tokens, channels: layers
    spatial = sum(layers * 4 * 50 * tokens**2 * width for (tokens, width), layers in levels.items()) / 1e12
    assert spatial == pytest.approx(31.0, abs=0.1)
    assert tflop(model, model.sizes["full"]) - spatial == pytest.approx(129, rel=0.01)


@pytest.mark.parametrize(("name", "variant"), SMALL.items())
def test_a_step_has_the_arguments_that_the_pipeline_passes(
    model_folder: Callable[..., Path], name: str, variant: str
) -> None:
    passed: dict[str, Any] = {}

    class Seen(Exception):
        pass

    def recording(stage: Any) -> torch.nn.Module:
        original = stage.module

        def forward(*args: Any, **kwargs: Any) -> None:
            passed.update(zip(("sample", "timestep"), args, strict=False), **kwargs)
            raise Seen

        original.forward = forward
        return original

    folder = model_folder(variant)
    handle = load(
        folder,
        family_of(folder),
        precision=Precision.FP32,
        backend="eager",
        offload="none",
        placement=PlainPlacement(CPU),
    )
    frames = handle.family.layout.counts_frames
    size = Size(64, 64, 9 if frames else 1)
    given = {"image": Image.new("RGB", (64, 64))} if name == "svd-xt" else {}
    positive, negative = (None, None) if given else encode_prompts(handle, ["a red kite", ""])[0]
    guidance = None if given else 3.0  # Stable Video Diffusion's own is in two numbers
    settings = SampleSettings(size.width, size.height, steps=1, seed=0, frames=size.frames, guidance_scale=guidance)
    with pytest.raises(Seen):
        sample(handle, positive, negative, settings, denoiser=recording, **given)
    config = handle.store.module(handle.family.denoiser, "fp32").config
    made = step(MODELS[name], config, size, CPU, torch.float32)
    assert described(made) == described(passed)


def described(call: dict[str, Any]) -> dict[str, Any]:
    """Shapes and dtypes by name, of what is not None; how long the prompt is, each model folder says for itself."""

    def of(value: Any) -> Any:
        return tuple(map(of, value)) if isinstance(value, tuple) else (tuple(value.shape), value.dtype)

    tensors = {name: of(value) for name, value in call.items() if isinstance(value, torch.Tensor | tuple)}
    return tensors | {"return_dict": call.get("return_dict")}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_random_weights_stay_finite(name: str, dtype: str) -> None:
    with torch.inference_mode():
        assert eager(subject(name, dtype))()[0].isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_ours_is_diffusers_module_to_the_bit_in_fp32(name: str) -> None:
    both = subject(name, "fp32")
    with torch.inference_mode():
        assert torch.equal(ours("eager")(both)()[0], eager(both)()[0])


def test_the_weights_are_made_once_and_in_the_dtype_that_is_asked_for() -> None:
    one = subject("cogvideox-2b")
    assert {p.dtype for p in one.module.parameters()} == {DTYPES["bf16"]}
    ours_module, failing = one.components.module("transformer", "bf16"), one.failing.module("transformer", "bf16")
    assert ours_module is one.module and failing is not one.module
    assert {id(p) for p in failing.parameters()} == {id(p) for p in one.module.parameters()}
