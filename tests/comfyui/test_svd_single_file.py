"""The same small single file in ComfyUI's own SVD and in ours: UNet, VAE and image embeddings agree in fp32."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import legs
import pytest
import svd_layout
import torch
from comfyui_onediff_guard.pipelines.models.single_file import read_svd
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
KEYS = HERE.parent / "pipelines" / "svd_xt_keys.json"
BATCH, FRAMES = 2, 3  # two videos, as guidance makes them: one's context must not reach the other
TOLERANCE = 1e-5  # of the largest value
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def inputs(checkpoint: Path) -> Tensors:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    scheduler = read_svd(checkpoint).unweighted("scheduler")
    scheduler.set_timesteps(4)
    layout = svd_layout.TINY
    return {
        "noise": random(BATCH * FRAMES, 4, 8, 16) * scheduler.sigmas[2],
        "image_latents": random(BATCH * FRAMES, 4, 8, 16),
        "context": random(BATCH, 1, layout.projected).repeat_interleave(FRAMES, dim=0),
        "time_ids": torch.tensor([5.0, 127.0, 0.02]),  # frames per second less 1, motion bucket, noise augmentation
        "sigma": scheduler.sigmas[2].float(),
        "timestep": scheduler.timesteps[2].float(),
        "frames": torch.tensor(FRAMES),
        "pixels": random(1, 3, 32, 48).clamp(-1, 1),
        "latents": random(FRAMES, 4, 8, 12),
        "clip_pixels": random(2, 3, layout.image, layout.image),
    }


@pytest.fixture(scope="module", params=["published", "saved by ComfyUI"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In the layout of the published file, and in that of ComfyUI's ImageOnlyCheckpointSave."""
    file = tmp_path_factory.mktemp("svd") / "svd.safetensors"
    svd_layout.write(file)
    if request.param == "saved by ComfyUI":
        save_file(svd_layout.as_comfyui_saves(load_file(file)), file)
    return file


@pytest.fixture(scope="module")
def theirs(leg: legs.Leg, checkpoint: Path, inputs: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    folder = tmp_path_factory.mktemp("comfyui")
    layout = svd_layout.TINY
    sizes = {
        "hidden_size": layout.width,
        "intermediate_size": 4 * layout.width,
        "num_hidden_layers": layout.layers,
        "num_attention_heads": layout.width // 80,
        "image_size": layout.image,
        "projection_dim": layout.projected,
    }
    real = json.loads(KEYS.read_text(encoding="utf-8"))["shapes"]
    (folder / "keys.json").write_text(json.dumps({"shapes": real, "clip": sizes}), encoding="utf-8")
    save_file(inputs, folder / "inputs.safetensors")
    command = [leg.python, HERE / "svd_in_comfyui.py", leg.checkout, checkpoint]
    command += [folder / "inputs.safetensors", folder / "outputs.safetensors", folder / "keys.json"]
    done = subprocess.run(
        list(map(str, command)), cwd=folder, capture_output=True, text=True, encoding="utf-8", check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return load_file(folder / "outputs.safetensors")


def test_unet_agrees(theirs: Tensors, checkpoint: Path, inputs: Tensors):
    model_input = torch.cat([inputs["noise"], inputs["image_latents"]], dim=1)
    assert_close(_unet(checkpoint, inputs, model_input), theirs["unet"])


def test_a_denoising_step_agrees(theirs: Tensors, checkpoint: Path, inputs: Tensors):
    """The scheduler that we give it says the same of the UNet's output as ComfyUI's sampling settings do."""
    scheduler = read_svd(checkpoint).unweighted("scheduler")
    scheduler.set_timesteps(4)
    timestep = scheduler.timesteps[2]
    model_input = torch.cat([scheduler.scale_model_input(inputs["noise"], timestep), inputs["image_latents"]], dim=1)
    step = scheduler.step(_unet(checkpoint, inputs, model_input), timestep, inputs["noise"])
    assert_close(step.pred_original_sample, theirs["denoised"])


def test_vae_agrees(theirs: Tensors, checkpoint: Path, inputs: Tensors):
    vae: Any = read_svd(checkpoint).component("vae", torch.float32)
    with torch.no_grad():
        assert_close(vae.encode(inputs["pixels"]).latent_dist.mode(), theirs["encoded"])
        assert_close(vae.decode(inputs["latents"], num_frames=FRAMES).sample, theirs["decoded"])


def test_image_embeddings_agree(theirs: Tensors, checkpoint: Path, inputs: Tensors):
    encoder = read_svd(checkpoint).component("image_encoder", torch.float32)
    with torch.no_grad():
        assert_close(encoder(inputs["clip_pixels"]).image_embeds, theirs["image_embeds"])


def _unet(checkpoint: Path, inputs: Tensors, model_input: torch.Tensor) -> torch.Tensor:
    unet = read_svd(checkpoint).component("unet", torch.float32)
    with torch.no_grad():
        return unet(
            model_input.unflatten(0, (BATCH, FRAMES)),
            inputs["timestep"],
            encoder_hidden_states=inputs["context"][::FRAMES],
            added_time_ids=inputs["time_ids"].repeat(BATCH, 1),
        ).sample.flatten(0, 1)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape
    scale = theirs.abs().max()
    assert scale > 0.1  # something came out
    difference = ((ours - theirs).abs().max() / scale).item()
    print(f"largest difference {difference:.2g} of {scale:.2g}")
    assert difference <= TOLERANCE
