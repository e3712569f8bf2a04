"""Wan 2.1 and 2.2 end to end on small folders: what is specific to them. Other tests cover all families."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from comfyui_onediff_guard.pipelines.errors import BadFolder, BadLora
from comfyui_onediff_guard.pipelines.families.wan import WAN
from comfyui_onediff_guard.pipelines.insight.probe import probe, usual_size
from comfyui_onediff_guard.pipelines.models.folder import inspect
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import add_lora, profile_of
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.trust.message import BadInput
from diffusers import WanPipeline
from hostile import put, rewrite
from overflows import fails_unscaled
from safetensors.torch import load_file, save_file
from small_runs import error, opened
from test_families import PROMPT, by_hand, largest_difference, make, prompts
from trained_lora import train_lora

SMALL = SampleSettings(96, 64, steps=2, seed=1, frames=9, guidance_scale=5.0)
VARIANTS = ("wan", "wan-ti2v", "wan-two")


def made_in(*precisions, variant, overflow="none"):
    """Latents and reports."""
    handles = [opened(variant, precision=precision, overflow=overflow) for precision in precisions]
    return zip(*(sample(handle, *prompts(handle), SMALL) for handle in handles), strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_protected_fp16_with_overflow_is_nearer_to_fp32_than_bf16(variant):
    precisions = ("fp32", "fp16 (plain)", "fp16", "bf16")
    (right, plain, protected, bf16), (_, _, report, _) = made_in(*precisions, variant=variant, overflow="stream")
    assert not torch.isfinite(plain).all()
    assert report.reruns == 0 and "overflow protection" in report.summary()
    assert error(protected, right) < error(bf16, right) / 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_protected_fp16_is_nearer_to_fp32_than_plain_fp16(variant):
    (right, plain, protected), _ = made_in("fp32", "fp16 (plain)", "fp16", variant=variant)
    assert error(protected, right) < error(plain, right)


@pytest.mark.parametrize("tiling", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_failing_decoder_chunk_is_recomputed_from_cache_before_it(variant, tiling):
    """The decoder writes to the lists of its cache: the rerun must start from the state before the failing call."""
    exact, calls = opened(variant), itertools.count(1)
    latents, _ = sample(exact, *prompts(exact), SMALL)
    handle = opened(variant, precision="fp16")
    hook = handle.store.module("vae", "fp16").decoder.conv_in.register_forward_hook(
        lambda _layer, _given, made: made * torch.inf if next(calls) == 3 else None
    )
    found, report = decode(handle, latents, tiling=tiling)
    hook.remove()
    assert [step.outcome for step in report.steps] == ["finite", "finite", "rerun"]
    assert (found - decode(exact, latents, tiling=tiling)[0]).abs().max() < 1e-2


def test_decoder_norm_beyond_fp16_gives_frames_near_fp32(copy):
    """In fp16 the quotient would be 0, which is finite. diffusers computes it in float32."""
    folder, bias = copy("wan"), "decoder.conv_in.bias"  # of 16 channels: a norm of 8e4
    rewrite(folder, "vae", lambda tensors: tensors.update({bias: torch.where(tensors[bias] > 0, 2e4, -2e4)}))
    exact = opened(folder)
    latents, _ = sample(exact, *prompts(exact), SMALL)
    frames, _ = decode(exact, latents)
    found, _ = decode(opened(folder, precision="fp16"), latents)
    assert (found - frames).abs().max() < 2e-2


def test_usual_size_is_known_although_config_has_none():
    assert usual_size(opened("wan"), 0, 0, 0) == (832, 480, 81)
    assert usual_size(opened("wan-ti2v"), 0, 0, 0) == (1280, 704, 121)


def test_prompts_are_padded_to_512_tokens_with_zeros():
    handle = opened("wan")
    (embeddings,), report = encode_prompts(handle, ["a lighthouse"])
    assert embeddings.shape == (1, 512, 32)
    assert embeddings[0, 0].abs().max() > 0 and embeddings[0, 100:].abs().max() == 0
    assert report.notes == handle.report(report.plan).notes
    with pytest.raises(BadInput, match=r"takes \[batch, 512, 32\]"):
        sample(handle, embeddings[:, :226], embeddings, SMALL)


@pytest.mark.parametrize(
    ("variant", "index", "message"),
    [
        ("wan", {"boundary_ratio": 0.875}, "boundary_ratio"),
        ("wan-two", {"boundary_ratio": None}, "boundary_ratio"),
        (
            "wan",
            {"boundary_ratio": 0.9, "transformer_2": ["diffusers", "WanTransformer3DModel"]},
            r"has no transformer_2/config.json",
        ),
        ("wan-ti2v", {"expand_timesteps": "os.system"}, r"model_index\.json' cannot be used: .*expand_timesteps"),
    ],
)
def test_inconsistent_or_invalid_options_of_pipeline_are_refused(copy, variant, index, message):
    folder = copy(variant)
    put(folder / "model_index.json", index)
    with pytest.raises(BadFolder, match=message):
        inspect(folder, WAN)


def test_options_of_pipeline_are_read_from_model_index(model_folder):
    assert inspect(model_folder("wan-ti2v"), WAN).options == {"expand_timesteps": True, "boundary_ratio": None}


@pytest.mark.parametrize("scale", [None, 3.0])
@pytest.mark.parametrize("offload", ["none", "model"])
def test_second_transformer_has_its_own_guidance_scale(offload, scale):
    sampling = replace(SMALL, steps=4, guidance_scale_2=scale)
    handle = opened("wan-two", offload)
    found, report = make(handle, sampling)
    by_diffusers = by_hand(handle, sampling, num_frames=sampling.frames, guidance_scale_2=scale)
    assert largest_difference(found, by_diffusers) == 0
    assert "4 steps" in report.summary()


class Moves(PlainPlacement):
    """Records which components would be on the GPU."""

    def __init__(self):
        super().__init__()
        self.on_gpu = set()

    def to_device(self, name, module, beside=0):
        super().to_device(name, module, beside)
        self.on_gpu.add(name)

    def to_host(self, name, module):
        super().to_host(name, module)
        self.on_gpu.discard(name)

    def forget(self, name):
        self.on_gpu.discard(name)


@pytest.mark.parametrize("offload", ["none", "model"])
def test_offload_model_keeps_only_computing_transformer_on_gpu(offload):
    placement, seen = Moves(), []
    handle = opened("wan-two", offload, "bf16", placement=placement)
    for name in handle.family.denoisers:
        handle.store.module(name, "bf16").register_forward_pre_hook(
            lambda *_, name=name: seen.append((name, placement.on_gpu & {*handle.family.denoisers}))
        )
    sample(handle, *prompts(handle), SMALL)
    sample(handle, *prompts(handle), SMALL)
    both, each = {"transformer", "transformer_2"}, ("transformer", "transformer_2") * 2
    calls = [(name, both if offload == "none" else {name}) for name in each for _ in range(2)]
    assert seen == calls


def test_overrides_of_one_transformer_do_not_apply_to_other(tmp_path):
    handle = opened("wan-two", precision="bf16", profiles=tmp_path)
    handle = replace(handle, policy=GuardPolicy(scope=Scope.LEARNED))

    def run(handle):
        return sample(handle, *prompts(handle), replace(SMALL, steps=4))

    exact, usual = (run(opened("wan-two", precision=precision))[0] for precision in ("fp32", "bf16"))
    hook = handle.store.module("transformer_2", "bf16").blocks[1].ffn.net[0].register_forward_hook(fails_unscaled)
    made, report = run(handle)
    _, again = run(handle)
    hook.remove()
    assert error(made, exact) < error(usual, exact), "one step and one transformer, except products, are in fp32"
    assert [step.outcome for step in report.steps].count("rerun") == 1 and again.reruns == 0
    assert "overflow protection" in report.summary()
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert handle.store.learned[handle.memory_key("transformer", "bf16")] == NOTHING


def test_scope_run_continues_in_fp32_in_both_transformers():
    handle = replace(opened("wan-two", precision="bf16"), policy=GuardPolicy(scope=Scope.RUN))
    layer = handle.store.module("transformer", "bf16").blocks[1].ffn.net[0]
    hook = layer.register_forward_hook(fails_unscaled)
    _, report = sample(handle, *prompts(handle), replace(SMALL, steps=4))
    hook.remove()
    assert report.cells() == ["rerun", *["fp32"] * 3] and report.reruns == 1


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        (
            Scope.LEARNED,
            ["transformer: from a profile: ", "transformer_2: the given profile is not used: it belongs to"],
        ),
        (Scope.STEP, ["the given profile is not used: it needs the guard's scope 'learned'"]),
    ],
)
def test_notes_on_given_profile_name_their_transformer(scope, said):
    handle = opened("wan-two", precision="bf16")
    handle = replace(handle, policy=GuardPolicy(scope=scope), profile=profile_of(handle, "transformer", "bf16"))
    _, report = sample(handle, *prompts(handle), SMALL)
    notes = [note for note in report.notes if "profile" in note]
    assert len(notes) == len(said) and all(map(str.startswith, notes, said))


def test_nan_from_last_step_of_scheduler_gives_warning(copy):
    """No call of the model sees these latents."""
    folder = copy("wan")
    put(folder / "scheduler" / "scheduler_config.json", {"solver_type": "bh1"})
    handle = opened(folder)
    latents, report = sample(handle, *prompts(handle), SMALL)
    assert latents.isnan().all()
    (warning,) = report.warnings
    assert warning.startswith(f"{latents.numel()} of the latents' {latents.numel()} values are NaN or infinite")
    assert "UniPCMultistepScheduler" in warning


def test_lora_on_one_or_both_transformers_is_bit_equal_to_diffusers(model_folder, tmp_path):
    file = train_lora(tmp_path, model_folder("wan-two")).path
    sampling, found = replace(SMALL, steps=4), {}
    for where in ("", "transformer", "transformer_2"):
        handle = add_lora(opened("wan-two"), Lora(file, 0.8, where))
        found[where], report = sample(handle, *prompts(handle), sampling)
        assert any("a.safetensors at 0.8" in note for note in report.notes)
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
        add_lora(opened("wan"), Lora(file, 0.8, "transformer_2"))


def test_unused_tensors_of_lora_are_noted_in_report(model_folder, tmp_path):
    lora = train_lora(tmp_path, model_folder("wan"))
    image = {f"transformer.blocks.0.attn2.add_k_proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
    save_file(load_file(lora.path) | image, lora.path)
    handle = add_lora(opened("wan"), lora)
    assert any("2 tensors: " in note for note in handle.report(handle.plan(Component.DENOISER)).notes)


def test_probe_refuses_model_with_two_transformers():
    handle = opened("wan-two")
    with pytest.raises(BadInput, match="two transformers"):
        probe(handle, *prompts(handle), SMALL)
