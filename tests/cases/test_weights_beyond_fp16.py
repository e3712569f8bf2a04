"""Checkpoints in fp32 or bf16 with a weight beyond fp16's range, loaded in fp16: the weight does not become inf."""

from __future__ import annotations

import diffusers
import pytest
import svd_layout
import torch
from comfyui_onediff_guard.pipelines.families.svd import SVD
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.policy import Precision
from mechanisms import error
from safetensors.torch import load_file, save_file
from transformers import T5EncoderModel

SMALL = SampleSettings(width=32, height=32, frames=5, steps=3, guidance_scale=6.0, seed=3, scheduler="DPM")
BLOCK = "transformer_blocks.1"
TO_Q = f"{BLOCK}.attn1.to_q.weight"


def run_sampler(handle):
    (positive, negative), _ = encode_prompts(handle, ["a lighthouse above a calm sea", ""], Precision.FP32)
    return sample(handle, positive, negative, SMALL)


def run_text_encoder(handle):
    (embeddings, _), report = encode_prompts(handle, ["a boat", ""])
    return embeddings, report


def run_vae_decoder(handle):
    return decode(handle, torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0)))


COMPONENTS = {  # model, class, and the function that runs the component
    "transformer": ("5b", diffusers.CogVideoXTransformer3DModel, run_sampler),
    "text_encoder": ("2b", T5EncoderModel, run_text_encoder),
    "vae": ("cogview3", diffusers.AutoencoderKL, run_vae_decoder),
}
WEIGHTS = {
    "convolution": ("transformer", "patch_embed.proj.weight"),
    "linear layer": ("transformer", TO_Q),
    "norm": ("transformer", f"{BLOCK}.norm1.norm.weight"),
    "block output": ("transformer", f"{BLOCK}.ff.net.2.weight"),
    "modulation": ("transformer", f"{BLOCK}.norm1.linear.weight"),
    "text encoder embedding": ("text_encoder", "shared.weight"),
    "text encoder linear layer": ("text_encoder", "encoder.block.0.layer.0.SelfAttention.q.weight"),
    "text encoder norm": ("text_encoder", "encoder.block.1.layer.1.layer_norm.weight"),
    "VAE convolution": ("vae", "decoder.conv_in.weight"),
    "VAE norm that sets the decoder's dtype": ("vae", "decoder.up_blocks.0.resnets.0.norm1.weight"),
    "VAE norm of the middle block": ("vae", "decoder.mid_block.resnets.1.norm2.weight"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weight_beyond_fp16_range_is_near_fp32_and_named_in_report(model_folder, changed, on_card, case):
    component, name = WEIGHTS[case]
    model, kind, run = COMPONENTS[component]

    def change(module):  # its input is not reduced: products may leave fp16's range too
        weight = module.get_parameter(name).view(-1)
        weight[min(7, len(weight) - 1)] = 1e5

    folder = changed(model_folder(model), component, kind, change)
    family = family_of(folder)
    expected, _ = run(on_card(folder, "sm75", "fp32", family))
    made, report = run(on_card(folder, "sm75", "auto" if component == "transformer" else "fp16", family))
    assert report.plan.dtype == "fp16" and not report.failed and error(made, expected) < 2e-2
    assert component == "vae" or (report.plan.overflow_protection and not report.reruns)
    (note,) = [note for note in report.notes if "beyond fp16" in note]
    assert f"'{name}'" in note and "up to 1e+05" in note and note in report.text()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weight_beyond_fp16_range_of_single_file_is_kept_in_fp32(tmp_path, on_card, stored):
    """The query projection is the first third of one tensor in the file."""
    path = svd_layout.write(tmp_path / "svd_xt.safetensors")
    weights = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    (name, *_) = [key for key in weights if key.endswith("visual.transformer.resblocks.0.attn.in_proj_weight")]
    weights[name][1, 2] = 1e5
    save_file(weights, path)
    handle = on_card(path, "sm75", "fp16", SVD)
    encoder = handle.store.module("image_encoder", "fp16")
    (note,) = handle.store.notes["image_encoder"]
    assert "layers.0.self_attn.q_proj.weight'" in note
    kept = encoder.get_submodule("vision_model.encoder.layers.0.self_attn.q_proj").weight
    assert torch.equal(kept, weights[name].chunk(3)[0].float().where(kept.abs() > 65504, kept))
    assert kept[1, 2] == weights[name][1, 2].float() and kept.dtype == torch.float32
