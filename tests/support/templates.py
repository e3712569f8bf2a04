"""The shipped workflows: a file named by its title in ComfyUI's gallery, and a file in API format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
_VIDEO, _IMAGE = "no NaN or black frames in fp16", "no NaN or black image in fp16"
TITLES = {  # API file → title, in order
    "cogvideox_text_to_video": f"CogVideoX 2B text to video - {_VIDEO}",
    "cogvideox_image_to_video": f"CogVideoX 5B image to video - {_VIDEO}",
    "cogvideox_lora_text_to_video": f"CogVideoX 5B text to video with LoRA - {_VIDEO}",
    "cogvideox_video_to_video": f"CogVideoX 5B video to video - {_VIDEO}",
    "cogview3_text_to_image": f"CogView3-Plus text to image - {_IMAGE}",
    "cogview4_text_to_image": f"CogView4 text to image - {_IMAGE}",
    "native_flux2_text_to_image": f"Flux.2 native text to image - {_IMAGE}",
    "native_ltx2_text_to_video": f"LTX-2.3 native text to video - {_VIDEO}",
    "native_minimax_h3_text_to_video": f"MiniMax H3 native text to video - {_VIDEO}",
    "native_qwen_image_text_to_image": f"Qwen-Image native text to image - {_IMAGE}",
    "native_sd15_text_to_image": f"SD 1.5 native text to image - {_IMAGE}",
    "svd_image_to_video": f"SVD image to video - {_VIDEO}",
    "wan_text_to_video": f"Wan 2.1 text to video - {_VIDEO}",
    "native_wan22_text_to_video": f"Wan 2.2 14B native text to video - {_VIDEO}",
    "native_z_image_text_to_image": f"Z-Image native text to image - {_IMAGE}",
}


def ui_file(name: str) -> Path:
    """name: of the API file, without extension."""
    return WORKFLOWS / f"{TITLES[name]}.json"


def api_file(name: str) -> Path:
    return WORKFLOWS / "api" / f"{name}.json"


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
