"""Small models and inputs for the shipped workflows of every family, with sizes for a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import av
import numpy as np
import shared_models
from PIL import Image
from runs import HEALTHY, INSIDE, OVERFLOWING
from trained_lora import train_lora

MODELS = {  # folder that a workflow names → the small model used for it
    HEALTHY: "2b",
    OVERFLOWING: "2b stream",
    INSIDE: "2b inside",
    "CogVideoX-5b": "5b",
    "CogVideoX-5b-I2V": "5b-i2v",
    "CogView3-Plus-3B": "cogview3",
    "CogView4-6B": "cogview4",
    "stable-video-diffusion-img2vid-xt": "svd-xt",
    "Wan2.1-T2V-1.3B-Diffusers": "wan",
}
SVD_FILE = "svd_xt.safetensors"
LORA = "pytorch_lora_weights.safetensors"
IMAGE, VIDEO = "example.png", "video.mp4"
FRAMES = 9
SIZES = {"width": 96, "height": 64, "frames": FRAMES, "steps": 2, "length": FRAMES, "tiling": False, "backend": "eager"}
SVD_SIZES = {"width": 64, "height": 64, "frames": 3}


def build(models: Path) -> None:
    """Fill ComfyUI's `models` folder: a small model of each family, two CogVideoX that overflow fp16, a single file and
    a LoRA."""
    for name, kind in MODELS.items():
        shared_models.copied(shared_models.model_folder(*kind.split()), models / "diffusers" / name)
    (models / "checkpoints").mkdir(parents=True)
    shutil.copyfile(shared_models.svd_file(image=224, patch=56), models / "checkpoints" / SVD_FILE)
    (models / "loras").mkdir()
    train_lora(models / "loras", models / "diffusers" / "CogVideoX-5b", LORA, ("to_q", "to_v"), seed=1)


def write_inputs(folder: Path) -> None:
    """Write a picture and a video whose aspect and size differ from the models'."""
    folder.mkdir(parents=True, exist_ok=True)
    ramp = np.linspace(0, 255, 120 * 90 * 3).reshape(90, 120, 3).astype(np.uint8)
    Image.fromarray(ramp).save(folder / IMAGE)
    with av.open(str(folder / VIDEO), "w") as container:
        stream: Any = container.add_stream("h264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 120, 90, "yuv420p"
        for shift in range(FRAMES + 2):
            frame = av.VideoFrame.from_ndarray(np.roll(ramp, 10 * shift, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def small(workflow: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """Read a shipped API file, with small sizes and a save node that this ComfyUI has. known: its nodes by class."""
    graph = json.loads(workflow.read_text(encoding="utf-8"))
    for node in graph.values():
        sizes = SIZES | (SVD_SIZES if "StableVideo" in node["class_type"] else {})
        node["inputs"] |= {name: value for name, value in sizes.items() if name in node["inputs"]}
    if "CreateVideo" not in known:
        _save_as_webp(graph)
    return graph


def change(graph: dict[str, Any], class_type: str, **values: Any) -> dict[str, Any]:
    for node in graph.values():
        if node["class_type"] == class_type:
            node["inputs"] |= values
    return graph


def _save_as_webp(graph: dict[str, Any]) -> None:
    creators = {id_: node for id_, node in graph.items() if node["class_type"] == "CreateVideo"}
    for node in graph.values():
        if node["class_type"] == "SaveVideo":
            images = creators[node["inputs"]["video"][0]]["inputs"]["images"]
            node["class_type"] = "SaveAnimatedWEBP"
            node["inputs"] = {"images": images, "filename_prefix": "made", "fps": 8.0}
            node["inputs"] |= {"lossless": True, "quality": 90, "method": "default"}
    for id_ in creators:
        del graph[id_]
