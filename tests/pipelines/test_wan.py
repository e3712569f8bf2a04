"""Wan 2.1 and 2.2 end to end on small folders: what is particular to them. What all families share is tested with the
others."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder, BadLora, BadSize
from comfyui_onediff_guard.pipelines.families.wan import WAN
from comfyui_onediff_guard.pipelines.insight.probe import probe, usual_size
from comfyui_onediff_guard.pipelines.models.folder import inspect
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import add_lora, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.trust.message import BadInput
from diffusers import WanPipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from overflows import fails_unscaled
from safetensors.torch import load_file, save_file
from test_families import PROMPT, by_hand, largest_difference, make, opened, prompts
from tiers import drawn

SMALL = SampleSettings(96, 64, steps=2, seed=1, frames=9, guidance_scale=5.0)
VARIANTS = {"wan": "Wan2.1-T2V-1.3B", "wan-ti2v": "Wan2.2-TI2V-5B", "wan-two": "Wan2.2-T2V-A14B"}


def error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("variant", VARIANTS)
@settings(suppress_health_check=list(HealthCheck), max_examples=drawn(3, 1))
@given(
    size=st.sampled_from([(64, 32, 5), (96, 64, 9), (32, 64, 1)]),
    steps=st.integers(1, 3),
    guidance_scale=st.sampled_from([1.0, 5.0]),
    seed=st.integers(0, 2**32),
)
def test_it_is_bit_equal_to_diffusers(model_folder, variant, size, **drawn):
    width, height, frames = size
    sampling = SampleSettings(width, height, frames=frames, **drawn)
    handle = opened(model_folder(variant))
    assert handle.store.model.variant.name == VARIANTS[variant]
    found, report = make(handle, sampling)
    assert largest_difference(found, by_hand(handle, sampling, num_frames=frames)) == 0
    assert f"{sampling.steps} step" in report.summary() and report.reruns == 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_stream_beyond_fp16_is_black_in_plain_fp16_and_nearer_than_bf16_when_protected(model_folder, variant):
    made, reports = {}, {}
    for precision in ("fp32", "fp16 (plain)", "fp16", "bf16"):
        handle = opened(model_folder(variant, "stream"), precision)
        made[precision], reports[precision] = sample(handle, *prompts(handle), SMALL)
    assert not torch.isfinite(made["fp16 (plain)"]).all()
    assert reports["fp16"].reruns == 0 and "overflow protection" in reports["fp16"].summary()
    assert error(made["fp16"], made["fp32"]) < error(made["bf16"], made["fp32"]) / 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_healthy_model_is_nearer_to_fp32_than_in_plain_fp16(model_folder, variant):
    made = {}
    for precision in ("fp32", "fp16 (plain)", "fp16"):
        handle = opened(model_folder(variant), precision)
        made[precision], _ = sample(handle, *prompts(handle), SMALL)
    assert error(made["fp16"], made["fp32"]) < error(made["fp16 (plain)"], made["fp32"])


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chunk_of_the_decoder_that_fails_is_computed_again_from_the_cache_before_it(model_folder, variant, tiling):
    """Its network writes to the lists of its cache: the rerun must find what the failing call found."""
    exact = opened(model_folder(variant))
    latents, _ = sample(exact, *prompts(exact), SMALL)
    handle = opened(model_folder(variant), "fp16")
    broken = _third_call_fails(handle)
    try:
        found, report = decode(handle, latents, tiling=tiling)
    finally:
        broken.remove()
    assert [step.outcome for step in report.steps] == ["finite", "finite", "rerun"]
    assert (found - decode(exact, latents, tiling=tiling)[0]).abs().max() < 1e-2


def _third_call_fails(handle):
    calls = []

    def breaking(_layer, _given, made):
        calls.append(made)
        return made * torch.inf if len(calls) == 3 else None

    return handle.store.module("vae", "fp16").decoder.conv_in.register_forward_hook(breaking)


def test_what_its_decoder_divides_by_a_norm_beyond_fp16_comes_out_right(model_folder, tmp_path):
    """In fp16 the quotient would be zeros, and so finite: diffusers computes it in float32."""
    folder = shared_models.copied(model_folder("wan"), tmp_path / "loud")
    (file,) = (folder / "vae").glob("*.safetensors")
    weights = load_file(file)
    bias = weights["decoder.conv_in.bias"]  # of 16 channels: a norm of 8e4
    weights["decoder.conv_in.bias"] = torch.where(bias > 0, 2e4, -2e4)
    save_file(weights, file, metadata={"format": "pt"})
    exact = opened(folder)
    latents, _ = sample(exact, *prompts(exact), SMALL)
    frames, _ = decode(exact, latents)
    found, _ = decode(opened(folder, "fp16"), latents)
    assert (found - frames).abs().max() < 2e-2


@pytest.mark.parametrize(
    ("variant", "size", "message"),
    [
        ("wan", (90, 64, 9), "width is 90, but must be a multiple of 16"),
        ("wan", (96, 64, 8), r"frames is 8, but must be 4·k \+ 1"),
        ("wan-ti2v", (96, 80, 9), "Wan2.2-TI2V-5B makes widths that are multiples of 32 and heights of 32, not 96×80"),
    ],
)
def test_a_size_that_it_cannot_make(model_folder, variant, size, message):
    handle = opened(model_folder(variant))
    width, height, frames = size
    with pytest.raises(BadSize, match=message):
        sample(handle, *prompts(handle), SampleSettings(width, height, 2, 1, frames, 5.0))


def test_a_size_is_advised_where_the_config_says_none(model_folder):
    assert usual_size(opened(model_folder("wan")), 0, 0, 0) == (832, 480, 81)
    assert usual_size(opened(model_folder("wan-ti2v")), 0, 0, 0) == (1280, 704, 121)


def test_prompts_are_padded_to_512_tokens_with_zeros(model_folder):
    handle = opened(model_folder("wan"))
    (embeddings,), report = encode_prompts(handle, ["a lighthouse"])
    assert embeddings.shape == (1, 512, 32)
    assert embeddings[0, 0].abs().max() > 0 and embeddings[0, 100:].abs().max() == 0
    assert report.notes == handle.report(report.plan).notes
    with pytest.raises(BadInput, match=r"takes \[batch, 512, 32\]"):
        sample(handle, embeddings[:, :226], embeddings, SMALL)


LAYERS = {"attn1.to_q": (48, 48), "attn2.to_out.0": (48, 48), "ffn.net.2": (48, 96)}
THEIRS = {"attn1.to_q": "self_attn.q", "attn2.to_out.0": "cross_attn.o", "ffn.net.2": "ffn.2"}


def lora(file, name):
    """A LoRA of every block. name: of the tensors, with {block} and {layer}."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for block, (layer, (outputs, inputs)) in product(range(2), LAYERS.items()):
        stem = name.format(block=block, layer=layer, theirs=THEIRS[layer])
        tensors[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(4, inputs, generator=generator)
        tensors[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(outputs, 4, generator=generator)
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("name", ["transformer.blocks.{block}.{layer}", "diffusion_model.blocks.{block}.{theirs}"])
def test_a_lora_in_diffusers_names_or_its_authors_is_bit_equal_to_diffusers(model_folder, tmp_path, name):
    file = lora(tmp_path / "lora.safetensors", name)
    handle = add_lora(opened(model_folder("wan", "stream")), Lora(file, 0.8))
    found, _ = sample(handle, *prompts(handle), SMALL)
    pipe = WanPipeline.from_pretrained(model_folder("wan", "stream"))
    pipe.set_progress_bar_config(disable=True)
    pipe.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="one")
    pipe.set_adapters(["one"], [0.8])
    given = {"width": SMALL.width, "height": SMALL.height, "num_frames": SMALL.frames, "guidance_scale": 5.0}
    expected = pipe(
        prompt=PROMPT, negative_prompt="grey", num_inference_steps=SMALL.steps, output_type="latent",
        generator=torch.Generator().manual_seed(SMALL.seed), **given,
    ).frames  # fmt: skip
    expected = WAN.layout.unscaled(expected, SMALL.frames, handle.store.model.vae_config)
    assert torch.equal(found, expected)
    half = add_lora(opened(model_folder("wan", "stream"), "fp16"), Lora(file, 0.8))
    made, report = sample(half, *prompts(half), SMALL)
    assert report.reruns == 0 and error(made, found) < 3e-3


def test_a_lora_of_another_format_or_of_blocks_without_end_is_refused(model_folder, tmp_path):
    handle = opened(model_folder("wan"))
    musubi = lora(tmp_path / "musubi.safetensors", "lora_unet_blocks_{block}_self_attn_q_{theirs}")
    with pytest.raises(BadLora, match="this Wan has no place for"):
        add_lora(handle, Lora(musubi))
    endless = lora(tmp_path / "endless.safetensors", "diffusion_model.blocks.99999999{block}.{theirs}")
    with pytest.raises(BadLora, match="has no place for"):
        add_lora(handle, Lora(endless))


def test_what_a_lora_for_image_to_video_lacks_a_place_for_is_in_the_report(model_folder, tmp_path):
    file = lora(tmp_path / "lora.safetensors", "diffusion_model.blocks.{block}.{theirs}")
    image = {f"diffusion_model.blocks.0.cross_attn.k_img.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    save_file(load_file(file) | image, file)
    handle = add_lora(opened(model_folder("wan")), Lora(file, 0.8))
    notes = handle.report(handle.plan(Component.DENOISER)).notes
    assert [note for note in notes if "2 tensors: diffusion_model.blocks.*.cross_attn.k_img" in note]


def edited(folder, to, **index):
    shutil.copytree(folder, to)
    file = to / "model_index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | index))
    return to


def test_a_boundary_and_a_second_transformer_come_together(model_folder, tmp_path):
    with pytest.raises(BadFolder, match="boundary_ratio"):
        inspect(edited(model_folder("wan"), tmp_path / "one", boundary_ratio=0.875), WAN)
    with pytest.raises(BadFolder, match="boundary_ratio"):
        inspect(edited(model_folder("wan-two"), tmp_path / "two", boundary_ratio=None), WAN)
    second = ["diffusers", "WanTransformer3DModel"]
    half = edited(model_folder("wan"), tmp_path / "half", boundary_ratio=0.9, transformer_2=second)
    with pytest.raises(BadFolder, match=r"has no transformer_2/config.json"):
        inspect(half, WAN)


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("offload", ["none", "model"])
def test_the_second_transformer_has_a_guidance_scale_of_its_own(model_folder, offload, scale):
    sampling = replace(SMALL, steps=4, guidance_scale_2=scale)
    handle = replace(opened(model_folder("wan-two")), offload=Offload(offload))
    found, report = make(handle, sampling)
    by_diffusers = by_hand(handle, sampling, num_frames=sampling.frames, guidance_scale_2=scale)
    assert largest_difference(found, by_diffusers) == 0
    assert "4 steps" in report.summary()


class Moves(PlainPlacement):
    """Says what would be on the card."""

    def __init__(self):
        super().__init__()
        self.here = set()

    def to_device(self, name, module, beside=0):
        super().to_device(name, module, beside)
        self.here.add(name)

    def to_host(self, name, module):
        super().to_host(name, module)
        self.here.discard(name)

    def forget(self, name):
        self.here.discard(name)


@pytest.mark.parametrize("offload", ["none", "model"])
def test_with_offload_only_the_transformer_that_computes_is_on_the_card(model_folder, offload):
    placement, seen = Moves(), []
    options = {"backend": "eager", "offload": offload, "placement": placement}
    handle = load(model_folder("wan-two"), WAN, precision=Precision("bf16"), **options)
    for name in handle.family.denoisers:
        handle.store.module(name, "bf16").register_forward_pre_hook(
            lambda *_, name=name: seen.append((name, placement.here & {*handle.family.denoisers}))
        )
    sample(handle, *prompts(handle), SMALL)
    sample(handle, *prompts(handle), SMALL)
    both, each = {"transformer", "transformer_2"}, ("transformer", "transformer_2") * 2
    calls = [(name, both if offload == "none" else {name}) for name in each for _ in range(2)]
    assert seen == calls


def test_what_one_transformer_teaches_is_of_that_one_alone(model_folder, tmp_path):
    learning = GuardPolicy(scope=Scope.LEARNED)
    handle = replace(opened(model_folder("wan-two"), "bf16"), profiles=tmp_path, policy=learning)
    exact, usual = (
        sample(opened(model_folder("wan-two"), each), *prompts(handle), replace(SMALL, steps=4))[0]
        for each in ("fp32", "bf16")
    )
    hook = handle.store.module("transformer_2", "bf16").blocks[1].ffn.net[0].register_forward_hook(fails_unscaled)
    try:
        made, report = sample(handle, *prompts(handle), replace(SMALL, steps=4))
        _, again = sample(handle, *prompts(handle), replace(SMALL, steps=4))
    finally:
        hook.remove()
    assert error(made, exact) < error(usual, exact), "a step is in fp32, and all of one transformer but its products"
    assert [step.outcome for step in report.steps].count("rerun") == 1 and again.reruns == 0
    assert "overflow protection" in report.summary()
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert handle.store.learned[handle.memory_key("transformer", "bf16")] == NOTHING


def test_latents_that_the_scheduler_broke_in_its_last_step_are_no_fine_result(model_folder, tmp_path):
    """No call of the model is given them."""
    folder = shared_models.copied(model_folder("wan"), tmp_path / "model")
    config = folder / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"solver_type": "bh1"}))
    handle = opened(folder)
    latents, report = sample(handle, *prompts(handle), SMALL)
    assert latents.isnan().all()
    (warning,) = report.warnings
    assert warning.startswith(f"{latents.numel()} of the latents' {latents.numel()} values are NaN or infinite")
    assert "UniPCMultistepScheduler" in warning


def test_a_lora_is_added_to_one_transformer_or_to_both(model_folder, tmp_path):
    file = lora(tmp_path / "lora.safetensors", "transformer.blocks.{block}.{layer}")
    sampling, found = replace(SMALL, steps=4), {}
    for where in ("", "transformer", "transformer_2"):
        handle = add_lora(opened(model_folder("wan-two")), Lora(file, 0.8, where))
        found[where], report = sample(handle, *prompts(handle), sampling)
        assert any("lora.safetensors at 0.8" in note for note in report.notes)
        pipe = WanPipeline.from_pretrained(model_folder("wan-two"))
        pipe.set_progress_bar_config(disable=True)
        for component in [where] if where else handle.family.denoisers:
            pipe.load_lora_weights(
                str(tmp_path), weight_name=file.name, adapter_name=component,
                load_into_transformer_2=component == "transformer_2",
            )  # fmt: skip
            getattr(pipe, component).set_adapters([component], [0.8])
        expected = pipe(
            prompt=PROMPT, negative_prompt="grey", num_inference_steps=4, output_type="latent",
            generator=torch.Generator().manual_seed(SMALL.seed), width=SMALL.width, height=SMALL.height,
            num_frames=SMALL.frames, guidance_scale=5.0,
        ).frames  # fmt: skip
        assert torch.equal(found[where], WAN.layout.unscaled(expected, SMALL.frames, handle.store.model.vae_config))
    assert not torch.equal(found["transformer"], found["transformer_2"])
    with pytest.raises(BadLora, match="has no second transformer"):
        add_lora(opened(model_folder("wan")), Lora(file, 0.8, "transformer_2"))


def test_the_probe_says_that_it_measures_one_transformer(model_folder):
    handle = opened(model_folder("wan-two"))
    with pytest.raises(BadInput, match="two transformers"):
        probe(handle, *prompts(handle), SMALL)


def test_the_pipeline_gets_what_model_index_says_and_nothing_of_no_sense(model_folder, tmp_path):
    folder = shared_models.copied(model_folder("wan-ti2v"), tmp_path / "ti2v")
    assert inspect(folder, WAN).options == {"expand_timesteps": True, "boundary_ratio": None}
    index = json.loads((folder / "model_index.json").read_text()) | {"expand_timesteps": "os.system"}
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(BadFolder, match=r"model_index\.json' cannot be used: .*expand_timesteps"):
        inspect(folder, WAN)
