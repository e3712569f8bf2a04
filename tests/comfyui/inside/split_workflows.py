"""The shipped workflows for ComfyUI's own models in several files: MiniMax H3, Wan 2.2, LTX-2, Flux.2, Qwen-Image,
Z-Image.

Their text encoders have billions of weights. So graphs are validated with empty files of these names, and run with
small models that replace the outputs of loaders and text encoders. Sound is sampled, but not decoded.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import guard_video_vae
import pytest
import torch
from in_comfyui import NODE_ID, PACK, on, texts
from native_models import LAYOUTS, make_model, make_vae, prompts, with_fp32_twin

WORKFLOWS = Path(__file__).resolve().parents[3] / "workflows"
NAMES = {  # workflow → the small model and VAE (None: no VAE), and the shape of pictures or latents
    "native_flux2_text_to_image": ("flux2", None, (1, 128, 4, 4)),
    "native_ltx2_text_to_video": ("ltx2", "ltxv", (9, 64, 64, 3)),
    "native_minimax_h3_text_to_video": ("minimax_h3", "minimax_h3", (5, 64, 64, 3)),
    "native_qwen_image_text_to_image": ("qwen_image", "wan2.1", (1, 64, 64, 3)),
    "native_wan22_text_to_video": ("wan", "wan2.1", (5, 64, 64, 3)),
    "native_z_image_text_to_image": ("z_image", "", (1, 64, 64, 3)),
}
STEPS = 2  # of each model
SMALL = {"width": 64, "height": 64, "steps": STEPS, "length": 5, "sigmas": "1.0, 0.5, 0.0"}
SMALLER = {  # other sizes of some workflows
    "native_ltx2_text_to_video": {"length": 9, "frames_number": 9},
    "native_wan22_text_to_video": {"steps": 2 * STEPS},
}
HALVES = {0: 0, 10: STEPS, 20: 2 * STEPS}  # first and last steps of each of two models
FOLDERS = {  # by the loader's input
    "unet_name": "diffusion_models",
    "clip_name": "text_encoders",
    "text_encoder": "text_encoders",
    "vae_name": "vae",
    "ckpt_name": "checkpoints",
    "lora_name": "loras",
}
GUARD = "OneDiffGuardNaNGuardNative"
Graph = dict[str, Any]


def shipped(name: str) -> Graph:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def files(graph: Graph) -> set[tuple[str, str]]:
    """Return folder and name of each file that the graph loads."""
    given = (item for node in graph.values() for item in node["inputs"].items())
    return {(FOLDERS[key], value) for key, value in given if key in FOLDERS}


def node_classes() -> dict[str, Any]:
    """Return ComfyUI's and the pack's node classes by name."""
    nodes = import_module("nodes")
    if "KSamplerSelect" not in nodes.NODE_CLASS_MAPPINGS:
        asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    nodes.NODE_CLASS_MAPPINGS.update(sys.modules[PACK].NODE_CLASS_MAPPINGS)
    return nodes.NODE_CLASS_MAPPINGS


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a workflow whose nodes and model this ComfyUI has."""
    return skip_if_missing(request.param)


def skip_if_missing(name: str) -> str:
    lacking = {node["class_type"] for node in shipped(name).values()} - node_classes().keys()
    if lacking := lacking | {NAMES[name][0]} - LAYOUTS.keys():
        pytest.skip(f"this ComfyUI has no {', '.join(sorted(lacking))}")
    return name


def test_comfyui_validates_shipped_workflow(name: str, tmp_path: Path) -> None:
    """ComfyUI's folders have empty files with the workflow's file names."""
    execution, folder_paths = import_module("execution"), import_module("folder_paths")
    for kind, file in files(shipped(name)):
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / file).touch()
        folder_paths.add_model_folder_path(kind, str(folder))
    valid, error, _, of_nodes = asyncio.run(execution.validate_prompt("1", shipped(name), None))
    assert (valid, error, of_nodes) == (True, None, {})


def test_healthy_run_is_bit_equal_and_overflowing_run_is_near_fp32(name: str) -> None:
    """Compare the pictures without the guards and with them."""
    model, _, shape = NAMES[name]
    healthy, (hot, twin) = make_model(model), with_fp32_twin(model, hot=True)
    plain, made = run(name, healthy, guarded=False), run(name, healthy)
    assert plain.reshape(-1, *plain.shape[-3:]).shape == shape
    assert plain.isfinite().all() and plain.std() > 0.01 and plain.equal(made)
    plain, exact = (run(name, each, guarded=False) for each in (hot, twin))
    assert exact.isfinite().all() and exact.std() > 0.01
    assert not (plain - exact).norm() <= 0.05 * exact.norm(), "NaN, or wrong where the model clips"
    for card in ("cpu", "sm75"):
        texts.clear()
        assert (run(name, hot, card=card) - exact).norm() <= 0.02 * exact.norm()
        reports = {text for text in texts if f"{STEPS} steps" in text and "VAE" not in text}
        protected = [f"overflow protection; {STEPS} steps, all fine" in text for text in reports]
        assert reports and all(protected) is (card == "sm75"), reports  # the second model uses the first one's profile


class Encoder:
    """A text encoder that returns the same prompt for each text."""

    def __init__(self, prompt: Any):
        self._prompt = prompt

    def tokenize(self, text: str, **_pictures: Any) -> str:
        return text

    def encode_from_tokens_scheduled(self, _tokens: str) -> Any:
        return self._prompt


def run(name: str, model: Any, *, guarded: bool = True, card: str = "cpu") -> torch.Tensor:
    """Return the pictures of the workflow's VAE Decode node; without a VAE, its latents."""
    graph, kind_of_vae, layout = shipped(name), NAMES[name][1], model.model.layout
    positive, negative = prompts(layout)
    made: dict[tuple[str, int], Any] = {}
    sizes = SMALL | SMALLER.get(name, {})
    for id_, node in graph.items():
        kind = node["class_type"]
        given = {key: value for key, value in node["inputs"].items() if not isinstance(value, list)}
        node["inputs"] |= {key: sizes[key] for key in given if key in sizes}
        node["inputs"] |= {key: HALVES[value] for key, value in given.items() if key.endswith("_at_step")}
        if kind in ("UNETLoader", "CheckpointLoaderSimple", "LoraLoaderModelOnly"):
            made[id_, 0] = model
        if kind in ("CLIPLoader", "LTXAVTextEncoderLoader"):
            made[id_, 0] = Encoder(positive)
        if kind in ("VAELoader", "CheckpointLoaderSimple"):
            made[id_, 0 if kind == "VAELoader" else 2] = None if kind_of_vae is None else _vae(kind_of_vae)
        if kind == "LTXVAudioVAELoader":
            made[id_, 0] = _sizes_of_sound(layout)
        if kind == "CLIPTextEncode":
            made[id_, 0] = negative if node["_meta"]["title"].startswith("Negative") else positive
    (decoder,) = [id_ for id_, node in graph.items() if node["class_type"] in ("VAEDecode", "VAEDecodeTiled")]
    latents = graph[decoder]["inputs"]["samples"]

    def output(id_: str, slot: int) -> Any:
        if (id_, slot) not in made:
            node = graph[id_]
            if node["class_type"] == GUARD and not guarded:
                return output(*node["inputs"][("model", "vae")[slot]])
            inputs = {key: output(*v) if isinstance(v, list) else v for key, v in node["inputs"].items()}
            made.update({(id_, i): value for i, value in enumerate(_call(node["class_type"], inputs))})
        return made[id_, slot]

    with torch.inference_mode(), on(card) if card != "cpu" else nullcontext():
        return output(*latents)["samples"] if kind_of_vae is None else output(decoder, 0)


def _call(kind: str, inputs: dict[str, Any]) -> Any:
    cls = node_classes()[kind]
    if kind == GUARD:
        inputs = inputs | {"node_id": NODE_ID}
    if hasattr(cls, "execute") and hasattr(cls, "define_schema"):
        return cls.execute(**inputs).result
    return getattr(cls(), cls.FUNCTION)(**inputs)


def _sizes_of_sound(layout: Any) -> Any:
    """Return the part of a sound VAE that is needed for empty latents."""
    _, channels, length, bins = layout.sound
    network = SimpleNamespace(latent_frequency_bins=bins, num_of_latents_from_frames=lambda *_: length)
    return SimpleNamespace(latent_channels=channels, first_stage_model=network)


def _vae(kind: str) -> Any:
    if kind:
        return guard_video_vae.make(guard_video_vae.KINDS[kind], torch.float32)
    return make_vae(torch.float32, channels=16)  # Flux's VAE, which Z-Image uses
