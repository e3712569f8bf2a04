"""ComfyUI nodes that load the small models of native_models.py, and a node that saves results.

A file in custom_nodes of a running ComfyUI imports this module.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import native_models
import torch
from native_models import HOT_DECODER, HOT_ENCODER, LAYOUTS, in_fp32, make_model, make_vae, prompts, vae_in_fp32

controlnets, video = import_module("guard_controlnets"), import_module("guard_video_vae")
STATES = ["healthy", "hot", "hot in fp32"]
IMAGES = ("image", "temporal")  # VAEs of native_models.py, not video VAEs


def required(**inputs: Any) -> Any:
    """Return a node's INPUT_TYPES."""
    return classmethod(lambda _cls: {"required": inputs})


class SmallModel:
    RETURN_TYPES = ("MODEL", "CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "make"
    INPUT_TYPES = required(name=([*LAYOUTS],), state=(STATES,))

    def make(self, name: str, state: str) -> tuple[Any, ...]:
        layout = LAYOUTS[name]
        with torch.inference_mode(False):
            model = make_model(name, hot=state != "healthy")
            model = in_fp32(model) if state == STATES[2] else model
        start = native_models._nested([torch.zeros(shape) for shape in layout.streams])
        return model, *prompts(layout), {"samples": start}


class Controlled:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "apply"
    INPUT_TYPES = required(conditioning=("CONDITIONING",), name=([*controlnets.HOT],), state=(STATES,))

    def apply(self, conditioning: list[Any], name: str, state: str) -> tuple[Any]:
        dtype = torch.float32 if state == STATES[2] else torch.float16
        with torch.inference_mode(False):
            control = controlnets.applied(controlnets.controlnet(name, dtype, hot=state != "healthy"))
        return ([[text, more | {"control": control}] for text, more in conditioning],)


class SmallVAE:
    RETURN_TYPES = ("VAE", "LATENT", "IMAGE")
    FUNCTION = "make"
    INPUT_TYPES = required(name=([*IMAGES, *video.KINDS],), state=(STATES,))

    def make(self, name: str, state: str) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(3)
        with torch.inference_mode(False):
            if name in IMAGES:
                temporal = name == "temporal"
                vae = make_vae(
                    torch.float16, {} if state == "healthy" else HOT_DECODER | HOT_ENCODER, temporal=temporal
                )
                vae = vae_in_fp32(vae, temporal=temporal) if state == STATES[2] else vae
                shape = (3, 4, 6, 6) if temporal else (1, 4, 12, 12)
            else:
                kind = video.KINDS[name]
                vae = video.make(kind, torch.float16, {} if state == "healthy" else kind.hot)
                vae = video.in_fp32(vae, kind) if state == STATES[2] else vae
                shape = (1, vae.latent_channels, kind.frames, 2, 2)
        images = torch.randint(257, (1, 96, 96, 3), generator=generator) / 256
        return vae, {"samples": torch.randn(shape, generator=generator).half().float()}, images


class Anything(str):
    """A type that matches every type: ComfyUI 0.3.64 compares the types of linked nodes only with `!=`."""

    def __ne__(self, _other: object) -> bool:
        return False


class Keep:
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "keep"
    INPUT_TYPES = required(made=(Anything("*"),), file=("STRING", {"default": ""}))

    def keep(self, made: Any, file: str) -> dict[str, Any]:
        held = made["samples"] if isinstance(made, dict) else made
        parts = held.unbind() if getattr(held, "is_nested", False) else [held]
        path = Path(import_module("folder_paths").get_output_directory()) / file
        torch.save(torch.cat([part.float().flatten() for part in parts]), path)
        return {}


NODE_CLASS_MAPPINGS = {"TestSmallModel": SmallModel, "TestSmallVAE": SmallVAE, "TestKeep": Keep}
NODE_CLASS_MAPPINGS["TestControlled"] = Controlled
