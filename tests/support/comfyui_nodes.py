"""ComfyUI's own nodes in the shipped workflows, as 0.3.64 and newer declare them: those that no run without one has.

Each is a class with inputs and outputs alone; tests/comfyui/test_native_workflows.py holds them to a real ComfyUI.
"""

# ruff: noqa: N802 - INPUT_TYPES is ComfyUI's

from __future__ import annotations

from typing import Any

MAX_SIZE = 16384  # ComfyUI's MAX_RESOLUTION
SD15_FILE, SVD_FILE = "v1-5-pruned-emaonly-fp16.safetensors", "svd_xt.safetensors"
FILES = {  # that the workflows with a loader for each part name, by the folder in ComfyUI's models
    "diffusion_models": [
        "cogvideox1.5_5b.safetensors",
        "qwen_image_fp8_e4m3fn.safetensors",
        "z_image_turbo_bf16.safetensors",
    ],
    "text_encoders": ["t5xxl_fp16.safetensors", "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_3_4b.safetensors"],
    "vae": ["cogvideox_vae.safetensors", "qwen_image_vae.safetensors", "ae.safetensors"],
}
FILE_INPUTS = {"ckpt_name", "file", "unet_name", "clip_name", "vae_name"}
SCHEDULERS = ["simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal"]  # the first


def _number(kind: str, default: float, low: float, high: float) -> tuple[str, dict[str, Any]]:
    return kind, {"default": default, "min": low, "max": high}


def _size(default: int) -> tuple[str, dict[str, Any]]:
    return _number("INT", default, 16, MAX_SIZE)


DECLARED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # inputs, outputs
    "LoadVideo": ({"file": (["video.mp4"], {"video_upload": True})}, ("VIDEO",)),
    "GetVideoComponents": ({"video": ("VIDEO",)}, ("IMAGE", "AUDIO", "FLOAT")),
    "CheckpointLoaderSimple": ({"ckpt_name": ([SD15_FILE],)}, ("MODEL", "CLIP", "VAE")),
    "ImageOnlyCheckpointLoader": ({"ckpt_name": ([SVD_FILE],)}, ("MODEL", "CLIP_VISION", "VAE")),
    "CLIPTextEncode": ({"text": ("STRING", {"multiline": True}), "clip": ("CLIP",)}, ("CONDITIONING",)),
    "EmptyLatentImage": (
        {"width": _size(512), "height": _size(512), "batch_size": _number("INT", 1, 1, 4096)},
        ("LATENT",),
    ),
    "VideoLinearCFGGuidance": ({"model": ("MODEL",), "min_cfg": _number("FLOAT", 1.0, 0.0, 100.0)}, ("MODEL",)),
    "SVD_img2vid_Conditioning": (
        {
            "clip_vision": ("CLIP_VISION",),
            "init_image": ("IMAGE",),
            "vae": ("VAE",),
            "width": _size(1024),
            "height": _size(576),
            "video_frames": _number("INT", 14, 1, 4096),
            "motion_bucket_id": _number("INT", 127, 1, 1023),
            "fps": _number("INT", 6, 1, 1024),
            "augmentation_level": _number("FLOAT", 0.0, 0.0, 10.0),
        },
        ("CONDITIONING", "CONDITIONING", "LATENT"),
    ),
    "KSampler": (
        {
            "model": ("MODEL",),
            "seed": _number("INT", 0, 0, 2**64 - 1),
            "steps": _number("INT", 20, 1, 10000),
            "cfg": _number("FLOAT", 8.0, 0.0, 100.0),
            "sampler_name": (["euler", "res_multistep"],),  # of many
            "scheduler": (SCHEDULERS,),
            "positive": ("CONDITIONING",),
            "negative": ("CONDITIONING",),
            "latent_image": ("LATENT",),
            "denoise": _number("FLOAT", 1.0, 0.0, 1.0),
        },
        ("LATENT",),
    ),
    "VAEDecode": ({"samples": ("LATENT",), "vae": ("VAE",)}, ("IMAGE",)),
    "UNETLoader": (
        {"unet_name": (FILES["diffusion_models"],), "weight_dtype": (["default", "fp8_e4m3fn"],)},
        ("MODEL",),
    ),
    "CLIPLoader": (
        {
            "clip_name": (FILES["text_encoders"],),
            "type": (["stable_diffusion", "lumina2", "qwen_image", "cogvideox"],),  # of many
            "device": (["default", "cpu"],),
        },
        ("CLIP",),
    ),
    "VAELoader": ({"vae_name": (FILES["vae"],)}, ("VAE",)),
    "ModelSamplingAuraFlow": ({"model": ("MODEL",), "shift": _number("FLOAT", 1.73, 0.0, 100.0)}, ("MODEL",)),
    "ConditioningZeroOut": ({"conditioning": ("CONDITIONING",)}, ("CONDITIONING",)),
    "EmptySD3LatentImage": (
        {"width": _size(1024), "height": _size(1024), "batch_size": _number("INT", 1, 1, 4096)},
        ("LATENT",),
    ),
}
OPTIONAL = {"CLIPLoader": {"device"}}
NEWER = set[str]()  # not in 0.3.64
NEWER_OPTIONS = {"cogvideox"}


def _node(name: str, inputs: dict[str, Any], outputs: tuple[str, ...]) -> type:
    def INPUT_TYPES(cls: type) -> dict[str, Any]:
        optional = {key: spec for key, spec in inputs.items() if key in OPTIONAL.get(name, ())}
        required = {key: spec for key, spec in inputs.items() if key not in optional}
        return {"required": required, "optional": optional}

    return type(name, (), {"RETURN_TYPES": outputs, "INPUT_TYPES": classmethod(INPUT_TYPES)})


NODE_CLASS_MAPPINGS = {name: _node(name, *declared) for name, declared in DECLARED.items()}
