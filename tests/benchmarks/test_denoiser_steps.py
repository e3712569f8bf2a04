"""What the compile benchmarks time: the published denoisers, called as diffusers' pipelines call them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.layout import of_layout
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.policy import Precision
from contestants import channels_last, eager, fp16_sums, ours, summing_in_fp16
from denoisers import MODELS, Size, build, step
from floor import tflop
from PIL import Image
from stages import off_by
from subject import Subject

SMALL = {
    "cogvideox-2b": "2b",
    "cogvideox-5b": "5b",
    "cogvideox-1.5-5b": "1.5",
    "cogview3-plus": "cogview3",
    "svd-xt": "svd-xt",
}
CPU = torch.device("cpu")
FACTS = {  # 10⁹ weights, TFLOP
    "cogvideox-2b": (1.69, 240),
    "cogvideox-5b": (5.57, 664),
    "cogvideox-1.5-5b": (5.57, 2958),
    "cogview3-plus": (2.85, 52),
    "svd-xt": (1.52, 160),
}


def subject(name: str, dtype: str = "bf16") -> Subject:
    return Subject(name, MODELS[name], MODELS[name].sizes["tiny"], CPU, dtype)


@pytest.mark.parametrize("name", FACTS)
def test_a_full_step_has_the_operations_known_for_it(name: str) -> None:
    model = MODELS[name]
    module = build(model, model.sizes["full"], torch.device("meta"), torch.bfloat16)
    parameters, expected = FACTS[name]
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(parameters, abs=0.01)
    assert sum(tflop(model, model.sizes["full"]).values()) == pytest.approx(expected, rel=0.01)


def test_operations_of_svd_are_of_three_kinds() -> None:
    found = tflop(MODELS["svd-xt"], MODELS["svd-xt"].sizes["full"])
    shares = {kind: part / sum(found.values()) for kind, part in found.items()}
    assert shares == pytest.approx({"linear": 0.45, "convolution": 0.35, "attention": 0.20}, abs=0.01)


def test_operations_of_svd_hold_its_attention_over_pixels() -> None:
    """Reckoned by hand: over a frame's pixels, at each resolution. The rest of attention is over frames."""
    model = MODELS["svd-xt"]
    levels = {(72 * 128, 320): 5, (36 * 64, 640): 5, (18 * 32, 1280): 5, (9 * 16, 1280): 1}  # tokens, channels: layers
    spatial = sum(layers * 4 * 50 * tokens**2 * width for (tokens, width), layers in levels.items()) / 1e12
    assert spatial == pytest.approx(31.0, abs=0.1)
    assert 0 < tflop(model, model.sizes["full"])["attention"] - spatial < 2


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


@pytest.mark.parametrize("name", ["cogvideox-2b", "svd-xt"])
def test_errors_are_against_a_copy_in_strict_fp32_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, allowed = subject(name, "fp16"), list[bool]()
    one.module.register_forward_pre_hook(lambda *_: allowed.append(torch.backends.cudnn.allow_tf32))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with torch.inference_mode():
        found = one.exact.output
        copied = copy.deepcopy(one.module).float()(**in_fp32(one.call))[0]
    assert torch.equal(found, copied) and off_by(found, copied) == 0
    assert allowed == [False, True] and torch.backends.cudnn.allow_tf32
    assert one.module.dtype == torch.float16


def in_fp32(call: dict[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}
    return call | {name: value.float() for name, value in given.items() if value.is_floating_point()}


def test_a_copy_in_main_memory_is_the_same_and_shares_nothing() -> None:
    one = subject("cogvideox-2b")
    there = one.in_main_memory()
    with torch.inference_mode():
        assert torch.equal(eager(one)()[0], eager(there)()[0])
    assert not {p.data_ptr() for p in one.module.parameters()} & {p.data_ptr() for p in there.module.parameters()}


def test_a_copy_needs_room_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subject.main_memory", lambda: DeviceMemory(total=2**30, free=1000))
    with pytest.raises(MemoryError, match=r"0\.0 are free"):
        subject("cogvideox-2b").in_main_memory()


def test_convolutions_of_a_copy_are_channels_last() -> None:
    one = subject("svd-xt")
    last = [part.weight for part in of_layout(one.channels_last.module)]
    assert last and all(weight.is_contiguous(memory_format=torch.channels_last) for weight in last)
    assert all(p.is_contiguous() for p in one.module.parameters())
    with torch.inference_mode():
        assert off_by(channels_last(eager)(one)()[0].float(), one.exact.output) < 0.02


@pytest.mark.parametrize("make", [summing_in_fp16(eager), ours("eager", sums=fp16_sums)])
def test_products_are_summed_in_fp16_during_a_step_alone(make: Any) -> None:
    one, found = subject("cogvideox-2b", "fp16"), list[bool]()
    matmul: Any = torch.backends.cuda.matmul
    one.module.transformer_blocks[0].ff.register_forward_pre_hook(
        lambda *_: found.append(matmul.allow_fp16_accumulation)
    )
    with torch.inference_mode():
        make(one)()
    assert found == [True] and not matmul.allow_fp16_accumulation


def test_the_weights_are_made_once_and_in_the_dtype_that_is_asked_for() -> None:
    one = subject("cogvideox-2b")
    assert {p.dtype for p in one.module.parameters()} == {DTYPES["bf16"]}
    ours_module, failing = one.components.module("transformer", "bf16"), one.failing.module
    assert ours_module is one.module and failing is not one.module
    assert {id(p) for p in failing.parameters()} == {id(p) for p in one.module.parameters()}
