"""ComfyUI's own Stable Video Diffusion on a single file. Run by ComfyUI's interpreter, away from the pack.

    python svd_in_comfyui.py CHECKOUT CHECKPOINT INPUTS OUTPUTS KEYS

CHECKPOINT is loaded by ComfyUI's own code and classes as its "Image Only Checkpoint Loader" does, but for two things
that it has fixed at the published sizes: which sizes of the UNet are SVD's, and the sizes of VAE and CLIP. KEYS lists
the real file's; ComfyUI has to recognise them, and to find a place for each. INPUTS and OUTPUTS are safetensors.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

UNET, VAE = "model.diffusion_model.", "first_stage_model."
CLIP = "conditioner.embedders.0.open_clip.model.visual."
VAE_SETTINGS = {
    "double_z": True,
    "z_channels": 4,
    "resolution": 256,
    "in_channels": 3,
    "out_ch": 3,
    "num_res_blocks": 2,
}
VAE_SETTINGS |= {"attn_resolutions": [], "dropout": 0.0}  # with ch and ch_mult, those in comfy/sd.py


def part(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}


def make_svd(state: dict[str, torch.Tensor], device: str = "cpu") -> Any:
    """As comfy.sd.load_state_dict_guess_config does once it knows the model: ComfyUI reads the sizes from the file."""
    sizes = import_module("comfy.model_detection").detect_unet_config(state, UNET)
    return import_module("comfy.supported_models").SVD_img2vid(sizes).get_model(state, UNET, device=device).eval()


def make_vae(ch: int, ch_mult: list[int]) -> Any:
    """As comfy.sd.VAE does where it sees decoder.mid.block_1.mix_factor."""
    settings = {**VAE_SETTINGS, "ch": ch, "ch_mult": ch_mult}
    video = {**settings, "video_kernel_size": [3, 1, 1], "alpha": 0.0}
    vae = import_module("comfy.ldm.models.autoencoder").AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": settings},
        decoder_config={"target": "comfy.ldm.modules.temporal_ae.VideoDecoder", "params": video},
    )
    return vae.eval()


def load_clip(state: dict[str, torch.Tensor], **sizes: int) -> torch.nn.Module:
    """As comfy.clip_vision.load_clipvision_from_sd does with its clip_vision_config_h.json, in these sizes."""
    clip_vision = import_module("comfy.clip_vision")
    config = json.loads((Path(clip_vision.__file__).parent / "clip_vision_config_h.json").read_text(encoding="utf-8"))
    model = import_module("comfy.clip_model").CLIPVisionModelProjection(
        {**config, **sizes}, torch.float32, "cpu", import_module("comfy.ops").manual_cast
    )
    model.load_state_dict(
        clip_vision.convert_to_transformers({CLIP + key: tensor for key, tensor in part(state, CLIP).items()}, CLIP)
    )
    return model.eval()


def recognise(shapes: dict[str, list[int]]) -> None:
    """ComfyUI knows the published file as SVD, and its UNet and VAE have a place for each key, and none to spare."""
    state = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    found = import_module("comfy.model_detection").model_config_from_unet(dict(state), UNET)
    assert type(found).__name__ == "SVD_img2vid", found
    with torch.device("meta"):
        models = {UNET: make_svd(state, "meta").diffusion_model, VAE: make_vae(128, [1, 2, 4, 4])}
    for prefix, model in models.items():
        theirs = {key: tensor.shape for key, tensor in model.state_dict().items()}
        assert theirs == {key: tensor.shape for key, tensor in part(state, prefix).items()}, prefix


def main(checkpoint: Path, inputs: Path, outputs: Path, keys: Path) -> None:
    files = import_module("safetensors.torch")
    given: dict[str, torch.Tensor] = files.load_file(inputs)
    sizes: dict[str, Any] = json.loads(keys.read_text(encoding="utf-8"))
    recognise(sizes["shapes"])
    state = import_module("comfy.utils").load_torch_file(str(checkpoint))
    svd, vae, clip = make_svd(state), make_vae(32, [1, 2]), load_clip(state, **sizes["clip"])
    svd.diffusion_model.load_state_dict(part(state, UNET))
    vae.load_state_dict(part(state, VAE))
    fps, bucket, augmentation = given["time_ids"].tolist()
    adm = svd.encode_adm(fps=fps + 1, motion_bucket_id=bucket, augmentation_level=augmentation)
    conditions = {"y": adm.repeat(len(given["noise"]), 1), "num_video_frames": int(given["frames"])}
    step = {"c_concat": given["image_latents"], "c_crossattn": given["context"], **conditions}
    unet_input = torch.cat([given["noise"], given["image_latents"]], dim=1)
    timesteps = given["timestep"].repeat(len(unet_input))
    found = {
        "unet": svd.diffusion_model(unet_input, timesteps, context=given["context"], **conditions),
        "denoised": svd.apply_model(given["noise"], given["sigma"].repeat(len(unet_input)), **step),
        "encoded": vae.encode(given["pixels"]),
        "decoded": vae.decode(given["latents"]),
        "image_embeds": clip(pixel_values=given["clip_pixels"], intermediate_output=-2)[2],
    }
    files.save_file({name: tensor.float().contiguous() for name, tensor in found.items()}, outputs)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    arguments = [Path(name) for name in sys.argv[2:]]
    sys.argv[1:] = ["--cpu"]
    import_module("comfy.options").enable_args_parsing()
    with torch.no_grad():
        main(*arguments)
