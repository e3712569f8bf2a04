"""ComfyUI's own nodes in the shipped workflows, as 0.3.64 and newer declare them; only those the pack has no copy of.

Each class has only inputs and outputs; tests/comfyui/test_stand_in_nodes.py compares them with a real ComfyUI.
"""

# ruff: noqa: N802 - INPUT_TYPES is ComfyUI's

from __future__ import annotations

from typing import Any

MAX_SIZE = 16384  # ComfyUI's MAX_RESOLUTION
SD15_FILE = "v1-5-pruned-emaonly-fp16.safetensors"
LTX_FILE = "ltx-2.3-22b-dev-fp8.safetensors"
FILES = {  # named in workflows with one loader per part, by folder in ComfyUI's models
    "diffusion_models": [
        "flux2_dev_fp8mixed.safetensors",
        "minimax_h3_fl2va_pruned_int8_convrot.safetensors",
        "qwen_image_fp8_e4m3fn.safetensors",
        "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
        "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
        "z_image_turbo_bf16.safetensors",
    ],
    "text_encoders": [
        "gemma_3_12B_it_fp4_mixed.safetensors",
        "mistral_3_small_flux2_bf16.safetensors",
        "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
        "qwen_2.5_vl_7b_fp8_scaled.safetensors",
        "qwen_3_4b.safetensors",
        "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    ],
    "vae": [
        "ae.safetensors",
        "full_encoder_small_decoder.safetensors",
        "minimax_h3_audio_vae_fp32.safetensors",
        "minimax_h3_video_vae_int8_convrot.safetensors",
        "qwen_image_vae.safetensors",
        "wan_2.1_vae.safetensors",
    ],
    "checkpoints": [LTX_FILE],
    "loras": ["ltx_2.3_22b_distilled_1.1_lora_dynamic_fro09_avg_rank_111_bf16.safetensors"],
}
FILE_INPUTS = {"ckpt_name", "file", "unet_name", "clip_name", "text_encoder", "vae_name", "lora_name"}
CHECKPOINTS = [SD15_FILE, LTX_FILE]
SEED = ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True})
ON_OFF = ["enable", "disable"]
SAMPLERS = ["euler", "res_multistep"]  # a selection
SCHEDULERS = ["simple", "sgm_uniform", "karras", "exponential", "ddim_uniform", "beta", "normal"]  # the first


def _number(kind: str, default: float, low: float, high: float) -> tuple[str, dict[str, Any]]:
    return kind, {"default": default, "min": low, "max": high}


def _size(default: int, low: int = 16) -> tuple[str, dict[str, Any]]:
    return _number("INT", default, low, MAX_SIZE)


def _latents(width: Any, height: Any, **length: Any) -> tuple[dict[str, Any], str]:
    return {"width": width, "height": height, **length, "batch_size": COUNT}, "LATENT"


COUNT, STEPS = _number("INT", 1, 1, 4096), _number("INT", 20, 1, 10000)
CFG, DENOISE = _number("FLOAT", 8.0, 0.0, 100.0), _number("FLOAT", 1.0, 0.0, 1.0)
CHOSEN = {"sampler_name": SAMPLERS, "scheduler": SCHEDULERS}
PROMPTS = {"positive": "CONDITIONING", "negative": "CONDITIONING"}
SAMPLED = {**CHOSEN, **PROMPTS, "latent_image": "LATENT"}
LATENTS = {"samples": "LATENT", "vae": "VAE"}
DECLARED: dict[str, tuple[dict[str, Any], str]] = {  # inputs: a type, a list or both with options; outputs
    "LoadVideo": ({"file": (["video.mp4"], {"video_upload": True})}, "VIDEO"),
    "GetVideoComponents": ({"video": "VIDEO"}, "IMAGE AUDIO FLOAT"),
    "CheckpointLoaderSimple": ({"ckpt_name": CHECKPOINTS}, "MODEL CLIP VAE"),
    "CLIPTextEncode": ({"text": ("STRING", {"multiline": True}), "clip": "CLIP"}, "CONDITIONING"),
    "EmptyLatentImage": _latents(_size(512), _size(512)),
    "KSampler": (
        {
            "model": "MODEL",
            "seed": _number("INT", 0, 0, 2**64 - 1),
            "steps": STEPS,
            "cfg": CFG,
            **SAMPLED,
            "denoise": DENOISE,
        },
        "LATENT",
    ),
    "KSamplerAdvanced": (
        {
            "model": "MODEL",
            "add_noise": ON_OFF,
            "noise_seed": SEED,
            "steps": STEPS,
            "cfg": CFG,
            **SAMPLED,
            "start_at_step": _number("INT", 0, 0, 10000),
            "end_at_step": _number("INT", 10000, 0, 10000),
            "return_with_leftover_noise": ON_OFF[::-1],
        },
        "LATENT",
    ),
    "SamplerCustomAdvanced": (
        {"noise": "NOISE", "guider": "GUIDER", "sampler": "SAMPLER", "sigmas": "SIGMAS", "latent_image": "LATENT"},
        "LATENT LATENT",
    ),
    "RandomNoise": ({"noise_seed": SEED}, "NOISE"),
    "KSamplerSelect": ({"sampler_name": SAMPLERS}, "SAMPLER"),
    "BasicScheduler": ({"model": "MODEL", "scheduler": SCHEDULERS, "steps": STEPS, "denoise": DENOISE}, "SIGMAS"),
    "Flux2Scheduler": (
        {"steps": _number("INT", 20, 1, 4096), "width": _size(1024), "height": _size(1024)},
        "SIGMAS",
    ),
    "ManualSigmas": ({"sigmas": ("STRING", {"default": "1, 0.5", "multiline": False})}, "SIGMAS"),
    "BasicGuider": ({"model": "MODEL", "conditioning": "CONDITIONING"}, "GUIDER"),
    "CFGGuider": ({"model": "MODEL", **PROMPTS, "cfg": CFG}, "GUIDER"),
    "VAEDecode": (LATENTS, "IMAGE"),
    "VAEDecodeTiled": (
        {
            **LATENTS,
            "tile_size": _number("INT", 512, 64, 4096),
            "overlap": _number("INT", 64, 0, 4096),
            "temporal_size": _number("INT", 64, 8, 4096),
            "temporal_overlap": _number("INT", 8, 4, 4096),
        },
        "IMAGE",
    ),
    "VAEDecodeAudio": (LATENTS, "AUDIO"),
    "LTXVAudioVAEDecode": ({"samples": "LATENT", "audio_vae": "VAE"}, "AUDIO"),
    "UNETLoader": ({"unet_name": FILES["diffusion_models"], "weight_dtype": ["default", "fp8_e4m3fn"]}, "MODEL"),
    "CLIPLoader": (
        {
            "clip_name": FILES["text_encoders"],
            "type": ["stable_diffusion", "lumina2", "wan", "qwen_image", "flux2", "minimax"],  # of many
            "device": ["default", "cpu"],
        },
        "CLIP",
    ),
    "VAELoader": ({"vae_name": FILES["vae"]}, "VAE"),
    "LTXVAudioVAELoader": ({"ckpt_name": CHECKPOINTS}, "VAE"),
    "LTXAVTextEncoderLoader": (
        {"text_encoder": FILES["text_encoders"], "ckpt_name": CHECKPOINTS, "device": ["default", "cpu"]},
        "CLIP",
    ),
    "LoraLoaderModelOnly": (
        {"model": "MODEL", "lora_name": FILES["loras"], "strength_model": _number("FLOAT", 1.0, -100.0, 100.0)},
        "MODEL",
    ),
    "ModelSamplingSD3": ({"model": "MODEL", "shift": _number("FLOAT", 3.0, 0.0, 100.0)}, "MODEL"),
    "ModelSamplingAuraFlow": ({"model": "MODEL", "shift": _number("FLOAT", 1.73, 0.0, 100.0)}, "MODEL"),
    "ConditioningZeroOut": ({"conditioning": "CONDITIONING"}, "CONDITIONING"),
    "EmptySD3LatentImage": _latents(_size(1024), _size(1024)),
    "EmptyFlux2LatentImage": _latents(_size(1024), _size(1024)),
    "EmptyHunyuanLatentVideo": _latents(_size(848), _size(480), length=_size(25, 1)),
    "EmptyLTXVLatentVideo": _latents(_size(768, 64), _size(512, 64), length=_size(97, 1)),
    "LTXVEmptyLatentAudio": (
        {
            "frames_number": _number("INT", 97, 1, 1000),
            "frame_rate": ("FLOAT,INT", {"default": 25.0, "min": 1.0, "max": 1000.0, "widgetType": "FLOAT"}),
            "batch_size": COUNT,
            "audio_vae": "VAE",
        },
        "LATENT",
    ),
    "LTXVConcatAVLatent": ({"video_latent": "LATENT", "audio_latent": "LATENT"}, "LATENT"),
    "LTXVSeparateAVLatent": ({"av_latent": "LATENT"}, "LATENT LATENT"),
    "LTXVConditioning": (
        {**PROMPTS, "frame_rate": _number("FLOAT", 25.0, 0.0, 1000.0)},
        "CONDITIONING CONDITIONING",
    ),
    "FluxGuidance": (
        {"conditioning": "CONDITIONING", "guidance": _number("FLOAT", 3.5, 0.0, 100.0)},
        "CONDITIONING",
    ),
    "MiniMaxH3ImageToVideo": (
        {
            "clip": "CLIP",
            "vae": "VAE",
            "prompt": ("STRING", {"multiline": True, "dynamicPrompts": True}),
            "width": _size(1344, 32),
            "height": _size(768, 32),
            "length": _number("INT", 124, 5, 3600),
            "first_frame": "IMAGE",
            "last_frame": "IMAGE",
        },
        "CONDITIONING LATENT",
    ),
}
OPTIONAL = {"CLIPLoader": ["device"], "MiniMaxH3ImageToVideo": ["first_frame", "last_frame"]}
NEWER = {  # not in 0.3.64
    *("EmptyFlux2LatentImage", "Flux2Scheduler", "MiniMaxH3ImageToVideo"),
    *("LTXAVTextEncoderLoader", "LTXVAudioVAELoader", "LTXVAudioVAEDecode", "LTXVEmptyLatentAudio"),
    *("LTXVConcatAVLatent", "LTXVSeparateAVLatent", "ManualSigmas"),
}
NEWER_OPTIONS = {"flux2", "minimax"}


def _node(name: str, inputs: dict[str, Any], outputs: str) -> type:
    def INPUT_TYPES(cls: type) -> dict[str, Any]:
        specs = {key: spec if isinstance(spec, tuple) else (spec,) for key, spec in inputs.items()}
        optional = {key: specs.pop(key) for key in OPTIONAL.get(name, ())}
        return {"required": specs, "optional": optional}

    return type(name, (), {"RETURN_TYPES": tuple(outputs.split()), "INPUT_TYPES": classmethod(INPUT_TYPES)})


NODE_CLASS_MAPPINGS = {name: _node(name, *declared) for name, declared in DECLARED.items()}
