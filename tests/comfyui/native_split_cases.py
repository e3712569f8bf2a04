"""The shipped workflows whose models come in several files: run in ComfyUI's interpreter, judged in
test_native_split_workflows.py.

Their text encoders have one size, of billions of weights. So graphs are validated with empty files of these names, and
run with small models in place of what the three loaders and the text encoders put out.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import native_video_vae_cases
import torch
from native_in_comfyui import NODE_ID, on, pack_classes, said
from native_models import CPU, LAYOUTS, VAE_SETTINGS, _weights, in_fp32, make_model, prompts

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
NAMES = {  # workflow → the model and the VAE that stand in
    "native_cogvideox_text_to_video": ("cogvideox", "cogvideox"),
    "native_qwen_image_text_to_image": ("qwen_image", "wan2.1"),
    "native_z_image_text_to_image": ("z_image", ""),
}
SMALL = {"width": 64, "height": 64, "length": 13, "steps": 2}
FOLDERS = {"unet_name": "diffusion_models", "clip_name": "text_encoders", "vae_name": "vae"}  # by the loader's input
GUARD = "OneDiffGuardNaNGuardNative"
Graph = dict[str, Any]


def shipped(name: str) -> Graph:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def files(graph: Graph) -> dict[str, str]:
    """The names that its loaders have, by their inputs."""
    return {key: value for node in graph.values() for key, value in node["inputs"].items() if key in FOLDERS}


def known() -> dict[str, Any]:
    """Every node's class by its name: ComfyUI's and the pack's."""
    nodes = import_module("nodes")
    if "KSamplerSelect" not in nodes.NODE_CLASS_MAPPINGS:
        asyncio.run(nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    nodes.NODE_CLASS_MAPPINGS.update(pack_classes())
    return nodes.NODE_CLASS_MAPPINGS


def missing(name: str) -> list[str]:
    """What this ComfyUI lacks: nodes, or the model."""
    lacking = {node["class_type"] for node in shipped(name).values()} - known().keys()
    model, _ = NAMES[name]
    return sorted(lacking) + ([] if model in LAYOUTS else [model])


def case_validated() -> dict[str, Any]:
    """What ComfyUI says of each, with files of these names in its folders."""
    execution, folder_paths = import_module("execution"), import_module("folder_paths")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in FOLDERS.values():
            (Path(folder) / kind).mkdir()
            folder_paths.add_model_folder_path(kind, str(Path(folder) / kind))
        for name in NAMES:
            for key, file in files(shipped(name)).items():
                (Path(folder) / FOLDERS[key] / file).touch()
            found[f"{name}, missing"] = missing(name)
            if not found[f"{name}, missing"]:
                valid, error, _, of_nodes = asyncio.run(execution.validate_prompt("1", shipped(name), None))
                found[name] = [valid, error, of_nodes]
    return found


def case_ran() -> dict[str, Any]:
    """Of each, the pictures: plain and as shipped, on a model that is healthy and on one that overflows fp16."""
    found: dict[str, Any] = {}
    for name in NAMES:
        if missing(name):
            continue
        layout = LAYOUTS[NAMES[name][0]]
        if name == "native_cogvideox_text_to_video":  # as 1.5 is
            layout = replace(layout, sizes={**layout.sizes, "patch_size_t": 2})
        for state in ("healthy", "hot"):
            model = make_model(layout, hot=state == "hot")
            found[f"{name}, {state}, plain"] = run(name, layout, model, guarded=False)
            found[f"{name}, {state}, fp32"] = run(name, layout, in_fp32(model, layout), guarded=False)
            for card in ("cpu", "sm75"):
                said.clear()
                found[f"{name}, {state}, {card}"] = run(name, layout, model, card=card)
                found[f"{name}, {state}, {card}, said"] = list(said)
    return found


def case_note() -> dict[str, Any]:
    """What the note of CogVideoX's workflow has people do with a folder in diffusers format."""
    name = "native_cogvideox_text_to_video"
    if missing(name):
        return {}
    data = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    (note,) = [node["widgets_values"][0] for node in data["nodes"] if node["type"] == "MarkdownNote"]
    script = note.split("```python\n")[1].split("```")[0]
    theirs = _diffusers_model()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(Path(folder) / "CogVideoX1.5-5B" / "transformer")
        file = Path(folder) / files(shipped(name))["unet_name"]
        exec(script.replace('"CogVideoX', f'"{folder}/CogVideoX').replace(f'"{file.name}"', f'"{file}"'), {})
        ours = import_module("comfy.sd").load_diffusion_model(str(file), {"dtype": torch.float32})
    generator = torch.Generator().manual_seed(2)
    latents, text = (torch.randn(shape, generator=generator) for shape in ((1, 16, 4, 16, 24), (1, 226, 32)))
    when = torch.tensor([500.0])
    rotary = import_module("diffusers.models.embeddings").get_3d_rotary_pos_embed(
        embed_dim=64, crops_coords=None, grid_size=(8, 12), temporal_size=2, grid_type="slice", max_size=(48, 85)
    )
    with torch.inference_mode():
        return {
            "class": type(ours.model).__name__,
            "ours": ours.model.diffusion_model(latents, when, text),
            "theirs": theirs(latents.transpose(1, 2), text, when, image_rotary_emb=rotary).sample.transpose(1, 2),
        }


def _diffusers_model() -> Any:
    """CogVideoX1.5's, small."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 64, "num_layers": 2, "text_embed_dim": 32}
    sizes |= {"time_embed_dim": 32, "sample_width": 170, "sample_height": 96, "sample_frames": 81, "patch_size_t": 2}
    sizes |= {"patch_bias": False, "use_rotary_positional_embeddings": True}
    model = import_module("diffusers").CogVideoXTransformer3DModel(**sizes).eval().requires_grad_(False)
    model.load_state_dict(_weights(model, {}))
    return model


def run(name: str, layout: Any, model: Any, *, guarded: bool = True, card: str = "cpu") -> torch.Tensor:
    """The pictures that the workflow's VAE Decode puts out."""
    graph = shipped(name)
    positive, negative = prompts(layout)
    made: dict[tuple[str, int], Any] = {}
    for id_, node in graph.items():
        kind = node["class_type"]
        node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
        if kind == "UNETLoader":
            made[id_, 0] = model
        elif kind == "CLIPLoader":
            made[id_, 0] = None
        elif kind == "VAELoader":
            made[id_, 0] = _vae(NAMES[name][1])
        elif kind == "CLIPTextEncode":
            made[id_, 0] = negative if node["_meta"]["title"].startswith("Negative") else positive
    (decoder,) = [id_ for id_, node in graph.items() if node["class_type"] == "VAEDecode"]

    def output(id_: str, slot: int) -> Any:
        if (id_, slot) not in made:
            node = graph[id_]
            if node["class_type"] == GUARD and not guarded:
                return output(*node["inputs"][("model", "vae")[slot]])
            inputs = {key: output(*v) if isinstance(v, list) else v for key, v in node["inputs"].items()}
            made.update({(id_, i): value for i, value in enumerate(_call(node["class_type"], inputs))})
        return made[id_, slot]

    with torch.inference_mode(), on(card) if card != "cpu" else nullcontext():
        return output(decoder, 0)


def _call(kind: str, inputs: dict[str, Any]) -> Any:
    cls = known()[kind]
    if kind == GUARD:
        inputs = inputs | {"node_id": NODE_ID}
    if hasattr(cls, "execute") and hasattr(cls, "define_schema"):
        return cls.execute(**inputs).result
    return getattr(cls(), cls.FUNCTION)(**inputs)


def _vae(kind: str) -> Any:
    if kind:
        kinds = native_video_vae_cases.KINDS
        return native_video_vae_cases.make(kinds[kind], torch.float32)
    settings = VAE_SETTINGS | {"z_channels": 16}  # Flux's, which Z-Image has
    config = {"params": {"ddconfig": settings, "embed_dim": 16}}
    vae = import_module("comfy.sd").VAE(sd={}, device=CPU, config=config, dtype=torch.float32)
    network = vae.first_stage_model.requires_grad_(False)
    network.load_state_dict(_weights(network, {}))
    return vae
