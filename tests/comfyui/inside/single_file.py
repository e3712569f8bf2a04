"""One small single file, loaded by ComfyUI's own Stable Video Diffusion and by ours: results agree in fp32.

ComfyUI's code loads it as its "Image Only Checkpoint Loader" does, except for two things that ComfyUI fixes at the
published sizes: the UNet sizes that count as SVD, and the sizes of VAE and CLIP.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from in_comfyui import OURS, SUPPORT, difference, import_ours
from native_models import VAE_SETTINGS, temporal_autoencoder
from safetensors.torch import load_file, save_file

import_ours()
svd_layout = import_module("svd_layout")
read_svd = import_module(f"{OURS}.pipelines.models.single_file").read_svd
UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP = "conditioner.embedders.0.open_clip.model.visual."
PUBLISHED = SUPPORT.parent / "pipelines" / "svd_xt_keys.json"
LAYOUT = svd_layout.TINY
BATCH, FRAMES = 2, 3  # two videos, as with guidance: the context of one must not affect the other
State = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=["published", "saved by ComfyUI"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file in the published layout, or in the layout of ComfyUI's ImageOnlyCheckpointSave."""
    file = tmp_path / "svd.safetensors"
    svd_layout.write(file)
    if request.param == "saved by ComfyUI":
        save_file(svd_layout.as_comfyui_saves(load_file(file)), file)
    return file


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def read(checkpoint: Path) -> State:
    return import_module("comfy.utils").load_torch_file(str(checkpoint))


def part(state: State, prefix: str) -> State:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def make_svd(state: State, device: str = "cpu") -> Any:
    """Make SVD as comfy.sd.load_state_dict_guess_config does for a known model, with the file's sizes."""
    sizes = import_module("comfy.model_detection").detect_unet_config(state, UNET)
    return import_module("comfy.supported_models").SVD_img2vid(sizes).get_model(state, UNET, device=device).eval()


def make_vae(ch: int, ch_mult: list[int]) -> Any:
    """Make the VAE as comfy.sd.VAE does for a file with decoder.mid.block_1.mix_factor."""
    return temporal_autoencoder(VAE_SETTINGS | {"ch": ch, "ch_mult": ch_mult, "num_res_blocks": 2})


def load_clip(state: State) -> torch.nn.Module:
    """Load CLIP as comfy.clip_vision.load_clipvision_from_sd does with clip_vision_config_h.json, at small sizes."""
    clip_vision = import_module("comfy.clip_vision")
    config = json.loads((Path(clip_vision.__file__).parent / "clip_vision_config_h.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": LAYOUT.width, "intermediate_size": 4 * LAYOUT.width, "num_hidden_layers": LAYOUT.layers}
    config |= {"num_attention_heads": LAYOUT.width // 80, "image_size": LAYOUT.image}
    model = import_module("comfy.clip_model").CLIPVisionModelProjection(
        config | {"projection_dim": LAYOUT.projected}, torch.float32, "cpu", import_module("comfy.ops").manual_cast
    )
    prefixed = {CLIP + key: tensor for key, tensor in part(state, CLIP).items()}
    model.load_state_dict(clip_vision.convert_to_transformers(prefixed, CLIP))
    return model.eval()


def assert_close(made: torch.Tensor, theirs: torch.Tensor) -> None:
    assert made.shape == theirs.shape
    assert theirs.abs().max() > 0.1  # the result is not zero
    assert difference(made, theirs.float()) <= 1e-5


def test_comfyui_detects_published_file_and_has_every_key() -> None:
    shapes = json.loads(PUBLISHED.read_text(encoding="utf-8"))["shapes"]
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    found = import_module("comfy.model_detection").model_config_from_unet(dict(state), UNET)
    assert type(found).__name__ == "SVD_img2vid"
    with torch.device("meta"):
        models = {UNET: make_svd(state, "meta").diffusion_model, VAE: make_vae(128, [1, 2, 4, 4])}
    for prefix, model in models.items():
        theirs = {key: tensor.shape for key, tensor in model.state_dict().items()}
        assert theirs == {key: tensor.shape for key, tensor in part(state, prefix).items()}, prefix


def test_unet_and_denoising_step_match_comfyui(checkpoint: Path) -> None:
    """Our scheduler interprets the UNet's output as ComfyUI's sampling settings do."""
    scheduler = read_svd(checkpoint).unweighted("scheduler")
    scheduler.set_timesteps(4)
    sigma, timestep = scheduler.sigmas[2].float(), scheduler.timesteps[2].float()
    noise, image = random(1, BATCH * FRAMES, 4, 8, 16) * sigma, random(2, BATCH * FRAMES, 4, 8, 16)
    context = random(3, BATCH, 1, LAYOUT.projected)
    fps, bucket, augmentation = times = (5.0, 127.0, 0.02)  # frames per second minus 1
    state = read(checkpoint)
    svd = make_svd(state)
    svd.diffusion_model.load_state_dict(part(state, UNET))
    adm = svd.encode_adm(fps=fps + 1, motion_bucket_id=bucket, augmentation_level=augmentation)
    conditions = {"y": adm.repeat(len(noise), 1), "num_video_frames": FRAMES}
    each = context.repeat_interleave(FRAMES, dim=0)
    unet: Any = read_svd(checkpoint).component("unet", torch.float32)

    def made(latents: torch.Tensor) -> torch.Tensor:
        return unet(
            torch.cat([latents, image], dim=1).unflatten(0, (BATCH, FRAMES)),
            timestep,
            encoder_hidden_states=context,
            added_time_ids=torch.tensor(times).repeat(BATCH, 1),
        ).sample.flatten(0, 1)

    given = torch.cat([noise, image], dim=1)
    theirs = svd.diffusion_model(given, timestep.repeat(len(given)), context=each, **conditions)
    assert_close(made(noise), theirs)
    step = scheduler.step(
        made(scheduler.scale_model_input(noise, scheduler.timesteps[2])), scheduler.timesteps[2], noise
    )
    theirs = svd.apply_model(noise, sigma.repeat(len(noise)), c_concat=image, c_crossattn=each, **conditions)
    assert_close(step.pred_original_sample, theirs)


def test_vae_matches_comfyui(checkpoint: Path) -> None:
    vae: Any = read_svd(checkpoint).component("vae", torch.float32)
    theirs = make_vae(32, [1, 2])
    theirs.load_state_dict(part(read(checkpoint), VAE))
    pixels, latents = random(4, 1, 3, 32, 48).clamp(-1, 1), random(5, FRAMES, 4, 8, 12)
    assert_close(vae.encode(pixels).latent_dist.mode(), theirs.encode(pixels))
    assert_close(vae.decode(latents, num_frames=FRAMES).sample, theirs.decode(latents))


def test_image_embeddings_match_comfyui(checkpoint: Path) -> None:
    encoder: Any = read_svd(checkpoint).component("image_encoder", torch.float32)
    pixels = random(6, 2, 3, LAYOUT.image, LAYOUT.image)
    theirs = load_clip(read(checkpoint))(pixel_values=pixels, intermediate_output=-2)[2]
    assert_close(encoder(pixels).image_embeds, theirs)
