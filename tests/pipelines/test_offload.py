"""Weights that come to the device in parts: with every mechanism the result is the same to the bit, and all are back.

There is no second device here. A stand-in for diffusers' ModuleGroup keeps the weights that are not brought, and leaves
NaN in their place: whoever computes with one of them makes NaN.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from comfyui_onediff_guard.pipelines.insight.probe import probe
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run import encode
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import add_lora, load
from comfyui_onediff_guard.pipelines.run.pictures import fitted
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights import placement
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.parts import tensors_of
from comfyui_onediff_guard.pipelines.weights.placement import DeviceMemory, PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.peaks import Peak
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.precision.shells import reporting
from diffusers import CogVideoXPipeline
from safetensors.torch import save_file
from torch._dynamo.utils import counters
from weights_apart import Apart, weights_apart

SIZES = {
    "5b-i2v": (96, 64, 9),
    "cogview3": (64, 64, 1),
    "cogview4": (64, 64, 1),
    "svd": (64, 64, 2),
    "wan-ti2v": (64, 64, 9),
}
LEARNED = GuardPolicy(scope=Scope.LEARNED)
IN_PARTS = ["group", "sequential"]


class Placement(PlainPlacement):
    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.asked: list[int] = []
        self.moved: list[str] = []

    def make_room(self, n_bytes):
        self.asked.append(n_bytes)

    def to_device(self, name, module, beside=0):
        self.moved.append(name)


@pytest.fixture
def apart():
    with weights_apart() as places:
        yield places


def opened(folder, offload, precision="bf16", backend="eager"):
    """Each with weights of its own: those of a store are shared, and here they are NaN at rest."""
    stores._STORES.clear()
    options: dict[str, Any] = {"backend": backend, "offload": offload, "placement": Placement()}
    return load(folder, family_of(folder), precision=Precision(precision), **options)


def run(handle, model="2b", seed=3, steps=2, **more):
    """(latents, frames, the sampling's report)"""
    report: Any
    width, height, frames = SIZES.get(model, (64, 48, 9))
    positive = negative = None
    if handle.family.prompt:
        (positive, negative), _ = encode_prompts(handle, ["a red kite", "grey"])
    image = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(2))
    start = {"image": fitted(image, width, height, "crop")[0]} if handle.family.takes_image else {}
    guidance = 5.0 if handle.family.prompt else None
    settings = SampleSettings(width, height, steps=steps, seed=seed, frames=frames, guidance_scale=guidance)
    latents, report = sample(handle, positive, negative, settings, **start, **more)
    return latents, decode(handle, latents)[0], report


def assert_same(found, expected):
    (latents, frames, report), (expected_latents, expected_frames, expected_report) = found, expected
    assert torch.isfinite(expected_latents).all()
    assert torch.equal(latents, expected_latents)
    assert torch.equal(frames, expected_frames)
    assert [(step.dtype, step.outcome) for step in report.steps] == [
        (step.dtype, step.outcome) for step in expected_report.steps
    ]


def all_away(handle):
    """Whether every weight of the denoiser, with its LoRAs, is in main memory."""
    store, name = handle.store, handle.family.denoiser
    denoiser = store._with_loras.get(name, store._modules[name])[1]
    return not Apart.here and all(tensor in Apart.at_rest for tensor in tensors_of(denoiser))


@pytest.mark.parametrize("offload", IN_PARTS)
@pytest.mark.parametrize("model", ["2b", "1.5", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-ti2v", "wan-two"])
def test_every_family_is_bit_equal_and_all_weights_are_back(model_folder, apart, model, offload):
    precision = "fp32" if model in ("5b-i2v", "svd") else "bf16"  # the largest two: a CPU without bf16 takes long
    expected = run(opened(model_folder(model), "none", precision), model)
    handle = opened(model_folder(model), offload, precision)
    for _ in range(2):
        assert_same(run(handle, model), expected)
        assert all_away(handle)
    assert handle.family.denoiser not in handle.store.placement.moved, "never moved whole"
    assert "text_encoder" not in handle.store.placement.moved


@pytest.mark.parametrize("offload", IN_PARTS)
def test_only_what_computes_is_there(model_folder, apart, monkeypatch, offload):
    monkeypatch.setattr(handles, "peak_memory", lambda _device: nullcontext(lambda: Peak(1)))  # not measured everywhere
    monkeypatch.setattr(placement, "main_memory", lambda: DeviceMemory(1, 0))  # the device, here: nothing rests in it
    handle = opened(model_folder("2b"), offload)
    _, _, report = run(handle)
    weights = handle.store._onloading["transformer"][1]
    total = sum(t.nbytes for t in tensors_of(weights.component))
    assert Apart.most_bytes == weights.most_bytes < total
    assert handle.store.placement.asked.count(weights.most_bytes) == 1, (
        "room is asked for what comes, not for the whole"
    )
    assert handle.store.model.weights["transformer"].bytes_in("bf16") not in handle.store.placement.asked
    assert report.memory.weights == weights.most_bytes
    one = [place for what, place in apart.log if what == "onload"]
    assert len(set(one)) > 3, "block by block"


@pytest.mark.parametrize("offload", IN_PARTS)
@pytest.mark.parametrize("model", ["2b", "5b", "1.5", "cogview3", "cogview4", "wan", "wan-two"])
def test_a_wide_stream_is_the_same(model_folder, apart, model, offload):
    folder = model_folder(model, "stream")
    expected = run(opened(folder, "none", "fp16"), model)
    assert expected[2].wide and not expected[2].reruns, "the case is one"
    handle = opened(folder, offload, "fp16")
    assert_same(run(handle, model), expected)
    assert all_away(handle)


@pytest.mark.parametrize("offload", IN_PARTS)
def test_a_rerun_computes_with_the_same_weights(model_folder, apart, offload):
    def made(offload):
        handle = opened(model_folder("5b"), offload, "fp16")
        overflow_inside(handle)
        return handle, run(handle)

    _, expected = made("none")
    assert expected[2].reruns, "the case is one"
    handle, found = made(offload)
    assert_same(found, expected)
    assert all_away(handle)


@pytest.mark.parametrize("offload", IN_PARTS)
def test_an_attention_kernel_is_chosen_alike(model_folder, apart, offload):
    how = CompileOptions(attention="math")
    expected = run(replace(opened(model_folder("2b"), "none"), compile_options=how))
    handle = replace(opened(model_folder("2b"), offload), compile_options=how)
    assert_same(run(handle), expected)
    assert "attention: math" in expected[2].backend_reason and all_away(handle)


def overflow_inside(handle):
    """Hidden activations of one feed-forward reach 1e5 and more; what it writes to the stream stays as it was."""
    denoiser = handle.store.module("transformer", "fp16", offload=handle.offload)
    with torch.no_grad():
        feed_forward = denoiser.transformer_blocks[1].ff
        feed_forward.net[0].proj.weight.mul_(2.0**17)
        feed_forward.net[2].weight.mul_(2.0**-17)


@pytest.mark.parametrize(("offload", "backend"), [("group", "eager"), ("group", "inductor"), ("sequential", "eager")])
def test_what_is_learned_makes_parts_wide(model_folder, apart, offload, backend):
    def made(offload):
        handle = replace(opened(model_folder("2b"), offload, "fp16", backend), policy=LEARNED)
        overflow_inside(handle)
        before = counters["stats"]["unique_graphs"]
        result = run(handle, steps=3)
        return handle, result, counters["stats"]["unique_graphs"] - before

    torch._dynamo.reset()
    _, expected, _ = made("none")
    torch._dynamo.reset()
    handle, found, graphs = made(offload)
    assert expected[2].learned.wide_parts == found[2].learned.wide_parts == ("transformer_blocks.1",)
    assert found[2].steps[0].rerun.module == expected[2].steps[0].rerun.module
    assert_same(found, expected)
    assert graphs == (backend == "inductor"), "all blocks share one graph, although their weights come and go"
    assert all_away(handle)


def test_group_with_inductor_is_bit_equal_to_inductor(model_folder, apart):
    torch._dynamo.reset()
    expected = run(opened(model_folder("2b"), "none", backend="inductor"))
    torch._dynamo.reset()
    handle = opened(model_folder("2b"), "group", backend="inductor")
    found = run(handle)
    assert_same(found, expected)
    assert found[2].graphs == expected[2].graphs
    assert run(handle, seed=4)[2].graphs == 0
    assert all_away(handle)


@pytest.fixture
def lora(model_folder, tmp_path):
    torch.manual_seed(0)
    denoiser: Any = opened(model_folder("2b"), "none").store.module("transformer", "fp32")
    tensors = {}
    for block in range(len(denoiser.transformer_blocks)):
        for name in ("attn1.to_q", "attn1.to_out.0", "ff.net.2"):
            outputs, inputs = denoiser.get_submodule(f"transformer_blocks.{block}.{name}").weight.shape
            tensors[f"transformer.transformer_blocks.{block}.{name}.lora_A.weight"] = torch.randn(2, inputs)
            tensors[f"transformer.transformer_blocks.{block}.{name}.lora_B.weight"] = torch.randn(outputs, 2) / 8
            tensors[f"transformer.transformer_blocks.{block}.{name}.diff_b"] = torch.randn(outputs) / 8
    for name in ("transformer_blocks.0.norm1.norm", "norm_final", "patch_embed.proj"):
        tensors[f"transformer.{name}.diff"] = torch.randn_like(denoiser.get_parameter(f"{name}.weight")) / 8
    save_file(tensors, tmp_path / "kite.safetensors")
    return Lora(tmp_path / "kite.safetensors")


@pytest.mark.parametrize("offload", IN_PARTS)
@pytest.mark.parametrize("overflow", ["none", "stream"])
def test_loras_come_with_their_layers(model_folder, lora, apart, offload, overflow):
    folder, precision = model_folder("2b", overflow), "bf16" if overflow == "none" else "fp16"

    def made(offload):
        handle = replace(opened(folder, offload, precision), policy=LEARNED)
        return handle, run(add_lora(handle, lora), steps=3)

    _, expected = made("none")
    handle, found = made(offload)
    assert_same(found, expected)
    assert bool(found[2].wide) == (overflow == "stream")
    assert all_away(handle)
    assert not torch.equal(run(opened(folder, "none", precision), steps=3)[0], expected[0]), "the LoRA acts"


@pytest.mark.parametrize("offload", IN_PARTS)
def test_the_probe_measures_the_same(model_folder, apart, offload):
    def probed(offload):
        handle = opened(model_folder("2b"), offload)
        (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
        settings = SampleSettings(64, 48, steps=2, seed=3, frames=9, guidance_scale=5.0)
        return handle, probe(handle, positive, negative, settings)

    _, expected = probed("none")
    handle, found = probed(offload)
    assert found.probed == expected.probed
    assert all_away(handle)


@pytest.mark.parametrize("offload", IN_PARTS)
def test_an_interrupt_and_an_error_leave_nothing_on_the_device(model_folder, apart, offload):
    handle = opened(model_folder("2b"), offload)

    def interrupt(done, _total, _report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(handle, step_done=interrupt)
    assert all_away(handle)
    layer = handle.store._modules["transformer"][1].transformer_blocks[0].ff.net[2]

    def fail(*_):
        assert Apart.here
        raise KeyError("as out of memory")

    failing = layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="as out of memory"):
        run(handle)
    assert all_away(handle)
    failing.remove()
    expected = run(opened(model_folder("2b"), "none"))
    assert_same(run(handle), expected)


def test_two_runs_at_once_do_not_take_each_others_weights(model_folder, apart):
    import threading

    handle = opened(model_folder("2b"), "group")
    expected = run(handle)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(run(handle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        assert_same(each, expected)
    assert len(found) == 2 and all_away(handle)


def test_one_model_open_with_several_kinds(model_folder, monkeypatch):
    """Of one store, whose weights every kind finds where the other left them."""
    gc.collect()
    for module in (handles, offloading, stores):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    first = opened(model_folder("2b"), "none")
    made = {kind: replace(first, offload=Offload(kind)) for kind in ("group", "none", "sequential", "model", "group")}
    expected = run(first)
    for kind, handle in [*made.items(), *made.items()]:
        assert_same(run(handle), expected)
        assert ("transformer" in handle.store._onloading) == handle.offload.in_parts, kind


def test_without_an_accelerator_it_is_as_model_and_says_so(model_folder):
    handle = opened(model_folder("2b"), "group")
    expected = run(opened(model_folder("2b"), "none"))
    rested = []
    handle.store.placement.to_host = lambda name, _module: rested.append(name)
    found = run(handle)
    assert_same(found, expected)
    assert rested == ["text_encoder", "transformer", "vae"]
    assert "note: offload 'group' is as 'model' here: a CPU computes in main memory" in found[2].text()


@pytest.mark.parametrize("offload", ["model", *IN_PARTS])
def test_a_text_encoder_with_every_layer_wide(clamping_text_encoder, apart, offload):
    expected, _ = encode_prompts(opened(clamping_text_encoder, "none", "fp16"), ["a red kite"])
    found, report = encode_prompts(opened(clamping_text_encoder, offload, "fp16"), ["a red kite"])
    assert report.wide == "every layer wide" and report.reruns == 0
    assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("offload", IN_PARTS)
def test_the_text_encoder_is_what_is_let_go(model_folder, apart, offload):
    handle = opened(model_folder("2b"), offload)
    asked = []
    handle.store.placement.make_room = lambda _n: asked.append(dict(handle.store._onloading))
    run(handle)
    assert [*asked[0]] == ["text_encoder"]
    assert [*handle.store._onloading] == ["transformer"]


def test_page_locked_memory_goes_back_to_the_system_with_its_component(model_folder, apart, monkeypatch):
    released = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: released.append(True), raising=False)
    for offload, times in (("none", 0), ("group", 1)):
        encode_prompts(opened(model_folder("2b"), offload), ["a red kite"])
        assert len(released) == times


def test_diffusers_is_told_the_device_that_computes(model_folder):
    pipe: Any = CogVideoXPipeline.from_pretrained(model_folder("2b"))
    pipe.transformer = reporting(pipe.transformer, device=torch.device("cuda", 1))
    pipe.text_encoder = pipe.vae = None
    assert pipe._execution_device == torch.device("cuda", 1)
    assert reporting(pipe.transformer, dtype=torch.float32).device == torch.device("cuda", 1), "and by a shell of it"


@pytest.mark.parametrize("model", ["2b", "cogview3", "cogview4", "wan"])
def test_a_prompt_goes_to_the_device_that_computes(model_folder, monkeypatch, model):
    """diffusers asks the text encoder of Wan, since 0.41: its weights are elsewhere until it is called."""
    handle = opened(model_folder(model), "none")
    monkeypatch.setattr(handle.store.placement, "device", torch.device("meta"))
    pipe = encode._pipeline(handle.stage(Component.TEXT_ENCODER))
    assert pipe.text_encoder.device == torch.device("meta")
    assert pipe.text_encoder.dtype == handle.stage(Component.TEXT_ENCODER).module.dtype, "that stays as it is"


@pytest.mark.parametrize("model", ["5b-i2v", "svd"])
def test_what_encoded_the_image_rests_while_the_denoiser_runs(model_folder, apart, model):
    handle = opened(model_folder(model), "group")
    rested: list[str] = []
    first: list[list[str]] = []
    handle.store.placement.to_host = lambda name, _module: rested.append(name)
    run(handle, model, step_done=lambda *_: first.append(rested[:]))
    encoders = ["image_encoder", "vae"] if model == "svd" else ["vae"]
    assert [name for name in first[0] if name in encoders][-len(encoders) :] == encoders
