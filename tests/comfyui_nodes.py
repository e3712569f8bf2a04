"""ComfyUI's own nodes in the shipped workflows, as 0.3.64 declares them: those that no run without a ComfyUI has.

Each is a class with inputs and outputs alone; tests/comfyui/test_native_workflows.py holds them to a real ComfyUI.
"""

# ruff: noqa: N802 - INPUT_TYPES is ComfyUI's

from __future__ import annotations

from typing import Any

MAX_SIZE = 16384  # ComfyUI's MAX_RESOLUTION
SD15_FILE, SVD_FILE = "v1-5-pruned-emaonly-fp16.safetensors", "svd_xt.safetensors"


def _number(kind: str, default: float, low: float, high: float) -> tuple[str, dict[str, Any]]:
    return kind, {"default": default, "min": low, "max": high}


def _size(default: int) -> tuple[str, dict[str, Any]]:
    return _number("INT", default, 16, MAX_SIZE)


DECLARED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {  # inputs, outputs
    "LoadVideo": ({"file": (["video.mp4"], {"video_upload": True})}, ("VIDEO",)),
    "GetVideoComponents": ({"video": ("VIDEO",)}, ("IMAGE", "AUDIO", "FLOAT")),
    "ImageFromBatch": (
        {"image": ("IMAGE",), "batch_index": _number("INT", 0, 0, 4095), "length": _number("INT", 1, 1, 4096)},
        ("IMAGE",),
    ),
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
            "sampler_name": (["euler"],),  # the first of many
            "scheduler": (["simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal"],),
            "positive": ("CONDITIONING",),
            "negative": ("CONDITIONING",),
            "latent_image": ("LATENT",),
            "denoise": _number("FLOAT", 1.0, 0.0, 1.0),
        },
        ("LATENT",),
    ),
    "VAEDecode": ({"samples": ("LATENT",), "vae": ("VAE",)}, ("IMAGE",)),
}


def _node(name: str, inputs: dict[str, Any], outputs: tuple[str, ...]) -> type:
    def INPUT_TYPES(cls: type) -> dict[str, Any]:
        return {"required": inputs}

    return type(name, (), {"RETURN_TYPES": outputs, "INPUT_TYPES": classmethod(INPUT_TYPES)})


NODE_CLASS_MAPPINGS = {name: _node(name, *declared) for name, declared in DECLARED.items()}
