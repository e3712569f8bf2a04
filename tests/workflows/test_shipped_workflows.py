"""The workflows that ComfyUI lists as templates: valid, and the same graph in both formats."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blueprints
import comfyui_nodes
import pytest
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.errors import ExitCode
from comfyui_onediff_guard.headless.hosts import core_nodes
from comfyui_onediff_guard.headless.workflow import schema, ui_format, ui_values, validate
from comfyui_onediff_guard.headless.workflow.graph import Graph, from_api, is_ui_format
from comfyui_onediff_guard.headless.workflow.schema import Schema
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.trust.message import listed
from PIL import Image
from templates import TITLES, WORKFLOWS, api_file, read, ui_file

UI_FILES = sorted(WORKFLOWS.glob("*.json"))
API_FILES = sorted((WORKFLOWS / "api").glob("*.json"))
HERE = {**core_nodes.NODE_CLASS_MAPPINGS, **NODE_CLASS_MAPPINGS}  # what runs without a ComfyUI
SERVER_ONLY = comfyui_nodes.NODE_CLASS_MAPPINGS
CLASSES = {**HERE, **SERVER_ONLY}
SCHEMAS = {name: schema.from_class(name, node) for name, node in CLASSES.items()}
NATIVE = [name for name in TITLES if name.startswith("native_")]  # for ComfyUI's own models
SPLIT = [name for name in NATIVE if name != "native_sd15_text_to_image"]  # whose models come in several files
GUARD = "OneDiffGuardNaNGuardNative"
WITH_MODEL = ("KSampler", "KSamplerAdvanced", "BasicGuider", "CFGGuider")  # that sample with their MODEL input
DECODERS = ("VAEDecode", "VAEDecodeTiled")  # of pictures
PARTS = {  # input of a loader → folder of the files that it lists
    "unet_name": "diffusion_models",
    "clip_name": "text_encoders",
    "text_encoder": "text_encoders",
    "vae_name": "vae",
    "lora_name": "loras",
    "ckpt_name": "checkpoints",
}
PART_LOADERS = {"UNETLoader", "CLIPLoader", "VAELoader"}
TEXT_TO_VIDEO = api_file("cogvideox_text_to_video")


def api_graph(path: Path) -> Graph:
    return from_api(read(path))


def stem(path: Path) -> str:
    return path.stem


def plain(graph: Graph) -> dict[str, Any]:
    """What determines the result: classes, inputs and links, but no titles."""
    return {node.id: (node.class_type, dict(node.inputs)) for node in graph.nodes.values()}


MODELS = {  # workflow → repository of its model, and GB of the files that are loaded, as the hub lists them
    "cogvideox_text_to_video": ("THUDM/CogVideoX-2b", 13),
    "cogvideox_lora_text_to_video": ("THUDM/CogVideoX-5b", 22),
    "cogvideox_image_to_video": ("THUDM/CogVideoX-5b-I2V", 22),
    "cogvideox_video_to_video": ("THUDM/CogVideoX-5b", 22),
    "cogview3_text_to_image": ("THUDM/CogView3-Plus-3B", 26),
    "cogview4_text_to_image": ("THUDM/CogView4-6B", 31),
    "wan_text_to_video": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 29),
    "svd_image_to_video": ("stabilityai/stable-video-diffusion-img2vid-xt", 9),
    "native_sd15_text_to_image": ("Comfy-Org/stable-diffusion-v1-5-archive", 2.1),
    "native_flux2_text_to_image": ("Comfy-Org/flux2-dev", 71),
    "native_ltx2_text_to_video": ("Lightricks/LTX-2.3-fp8", 41),
    "native_minimax_h3_text_to_video": ("Comfy-Org/MiniMax-H3", 40),
    "native_qwen_image_text_to_image": ("Comfy-Org/Qwen-Image_ComfyUI", 30),
    "native_wan22_text_to_video": ("Comfy-Org/Wan_2.2_ComfyUI_Repackaged", 36),
    "native_z_image_text_to_image": ("Comfy-Org/z_image_turbo", 21),
}
CHOSEN_BY = {"OneDiffGuardLoadPipeline", "CheckpointLoaderSimple", "LTXAVTextEncoderLoader", *PART_LOADERS}


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A models folder with the names that the workflows load, and ComfyUI's example picture."""
    for hub_id, _ in MODELS.values():
        folder = tmp_path / hub_id.partition("/")[2]
        folder.mkdir(exist_ok=True)
        (folder / "model_index.json").write_text("{}", encoding="utf-8")
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    Image.new("RGB", (8, 8)).save(tmp_path / "example.png")
    return tmp_path


def test_every_workflow_has_ui_and_api_file() -> None:
    assert [path.stem for path in UI_FILES] == [*TITLES.values()]
    assert {path.stem for path in API_FILES} == TITLES.keys() | {"cogvideox_text_to_video_webp"}


@pytest.mark.parametrize("title", TITLES.values())
def test_title_is_searchable_and_valid_in_urls_and_file_names(title: str) -> None:
    assert {"nan", "black", "fp16"} <= {*title.lower().split()}, "ComfyUI searches for beginnings of words"
    assert re.fullmatch(r"[\w .-]{1,80}", title, re.ASCII)


@pytest.mark.parametrize("path", UI_FILES, ids=stem)
def test_workflow_has_small_square_picture(path: Path) -> None:
    data = path.with_suffix(".jpg").read_bytes()
    assert data.startswith(b"\xff\xd8\xff") and len(data) < 40_000
    with Image.open(path.with_suffix(".jpg")) as picture:
        assert picture.width == picture.height


@pytest.mark.parametrize("name", NATIVE)
def test_native_workflow_guards_each_sampler_and_decoder(name: str) -> None:
    """One for each model: Wan 2.2 has two."""
    graph = api_graph(api_file(name))
    nodes = graph.nodes
    taken = {(id_, key): nodes[link.node] for id_, node in nodes.items() for key, link in node.links().items()}
    models = {id_ for id_, node in nodes.items() if node.class_type in ("UNETLoader", "CheckpointLoaderSimple")}
    guards = [taken[id_, "model"] for id_, node in nodes.items() if node.class_type in WITH_MODEL]
    assert {guard.class_type for guard in guards} == {GUARD}
    assert len({guard.id for guard in guards}) == len(guards) == len(models)
    decoding = [taken[id_, "vae"] for id_, node in nodes.items() if node.class_type in DECODERS]
    assert [guard.class_type for guard in decoding] == [GUARD]
    assert taken[decoding[0].id, "vae"].class_type in ("VAELoader", "CheckpointLoaderSimple")
    precisions = {guard.inputs["precision"] for guard in (*guards, *decoding)}
    assert precisions == ({"auto"} if name in SPLIT else {"inherit"})


@pytest.mark.parametrize("name", SPLIT)
def test_native_workflow_offers_each_model_file(name: str) -> None:
    data = read(ui_file(name))
    ((note,),) = (node["widgets_values"] for node in data["nodes"] if node["type"] == "MarkdownNote")
    offered = {str(node["id"]): node["properties"].get("models", []) for node in data["nodes"]}
    named: set[tuple[str, str]] = set()
    for node in api_graph(api_file(name)).nodes.values():
        files = {(node.inputs[key], folder) for key, folder in PARTS.items() if key in node.inputs}
        assert files == {(model["name"], model["directory"]) for model in offered[node.id]}
        for model in offered[node.id]:
            assert model["url"].startswith("https://huggingface.co/") and model["url"].endswith(f"/{model['name']}")
            assert f"[{model['name']}]({model['url']}), " in note and f"{model['directory']}/{model['name']}" in note
        named |= files
    assert all(file in comfyui_nodes.FILES[folder] for file, folder in named)
    assert note.count("https://huggingface.co/") == len(named) + 1, "each file once, and the model's page"


@pytest.mark.parametrize("name", TITLES)
def test_note_names_model_size_and_download(name: str) -> None:
    nodes = read(ui_file(name))["nodes"]
    ((note,),) = (node["widgets_values"] for node in nodes if node["type"] == "MarkdownNote")
    hub_id, size = MODELS[name]
    about, place, _ = note.split("```")
    assert f"[{hub_id}](https://huggingface.co/{hub_id})" in about and f", {size} GB" in about
    files = [node["widgets_values"][0] for node in nodes if node["type"] in CHOSEN_BY]
    assert files and "ComfyUI/models/" in place and all(f"/{file}" in place for file in files)
    assert (f"write **{hub_id}** into **hub_id**" if "diffusers/" in place else "ownload") in about
    assert "ut its folder here" in about or re.search(r"put (it|them) here, and choose (it|each)", about)


@pytest.mark.parametrize("file", [ui_file, api_file])
@pytest.mark.parametrize("name", [*NATIVE, "cogvideox_video_to_video"])
def test_run_without_server_names_missing_node_types(
    file: Callable[[str], Path], name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["run", str(file(name)), "--out", str(tmp_path)]) == ExitCode.BAD_INPUT
    err = capsys.readouterr().err
    lacking = sorted(api_graph(api_file(name)).class_types() & set(SERVER_ONLY))
    assert f"Node type {listed(lacking)} needs ComfyUI:" in err
    assert "--server URL" in err and "--comfyui DIR" in err


@pytest.mark.parametrize("name", TITLES)
def test_ui_and_api_files_give_same_graph(name: str) -> None:
    data = read(ui_file(name))
    assert is_ui_format(data)
    assert plain(ui_format.convert(data, SCHEMAS)) == plain(api_graph(api_file(name)))


@pytest.mark.parametrize("path", API_FILES, ids=stem)
def test_workflow_is_valid_and_needs_every_node(path: Path, model_folder: Path) -> None:
    graph = api_graph(path)
    with host.plain_folders(models=[model_folder], input=model_folder, output=model_folder):
        assert {*validate.plan(graph, CLASSES).order} == graph.nodes.keys()
    assert not [node.label for node in graph.nodes.values() if not node.title], "each node has a title"


def test_webp_workflow_differs_only_in_saver() -> None:
    twin = plain(api_graph(TEXT_TO_VIDEO.with_name("cogvideox_text_to_video_webp.json")))
    graph = plain(api_graph(TEXT_TO_VIDEO))
    savers = {"CreateVideo", "SaveVideo", "SaveAnimatedWEBP"}
    assert {id_: node for id_, node in twin.items() if node[0] not in savers} == {
        id_: node for id_, node in graph.items() if node[0] not in savers
    }
    (webp,) = [inputs for kind, inputs in twin.values() if kind in savers]
    (video,) = [inputs for kind, inputs in graph.values() if kind == "CreateVideo"]
    assert (webp["images"], webp["fps"]) == (video["images"], video["fps"])


# --- what only the browser reads --------------------------------------------------------------------------------------


def boxes(data: dict[str, Any]) -> dict[str, tuple[float, float, float, float]]:
    """{title: left, top, right, bottom} of every node on the canvas, its title bar of 30 units included."""
    return {
        f"{node['id']} {node['type']}": (x, y - 30, x + width, y + height)
        for node in data["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    }


@pytest.mark.parametrize("path", UI_FILES, ids=stem)
def test_nodes_do_not_overlap(path: Path) -> None:
    placed = list(boxes(read(path)).items())
    for i, (name, a) in enumerate(placed):
        for other, b in placed[i + 1 :]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, f"{name} overlaps {other}"


@pytest.mark.parametrize("path", UI_FILES, ids=stem)
def test_link_table_matches_slots(path: Path) -> None:
    data = read(path)
    nodes = {node["id"]: node for node in data["nodes"]}
    for link, origin, origin_slot, target, target_slot, kind in data["links"]:
        assert link in nodes[origin]["outputs"][origin_slot]["links"]
        assert nodes[target]["inputs"][target_slot]["link"] == link
        assert nodes[origin]["outputs"][origin_slot]["type"] == nodes[target]["inputs"][target_slot]["type"] == kind
    assert data["last_link_id"] >= max(link[0] for link in data["links"])
    assert data["last_node_id"] >= max(nodes)


@pytest.mark.parametrize("path", UI_FILES, ids=stem)
def test_nodes_name_their_pack(path: Path) -> None:
    for node in read(path)["nodes"]:
        if node["type"] not in ui_format.FRONTEND_ONLY:
            ours = node["type"] in NODE_CLASS_MAPPINGS
            assert node["properties"]["cnr_id"] == ("comfyui-onediff-guard" if ours else "comfy-core")
            assert node["properties"]["Node name for S&R"] == node["type"]


@pytest.mark.parametrize("path", UI_FILES, ids=stem)
def test_seed_widget_is_followed_by_its_control(path: Path) -> None:
    controls: list[str] = []
    for node in read(path)["nodes"]:
        spec: Schema | None = SCHEMAS.get(node["type"])
        if spec is None:
            continue
        names = [name for w in spec.widgets for name in ([w.name, "control"] if w.may_have_control else [w.name])]
        assert len(node["widgets_values"]) == len(names), node["type"]
        controls += [value for name, value in zip(names, node["widgets_values"], strict=True) if name == "control"]
    assert controls and set(controls) <= set(ui_values.CONTROL_VALUES)


# --- subgraphs/, which scripts/blueprints.py folds out of them --------------------------------------------------------


def test_blueprint_files_match_generator() -> None:
    written = dict(blueprints.files())
    found = {file: file.read_text(encoding="utf-8") for file in blueprints.FOLDER.iterdir()}
    assert found == written, "run python scripts/blueprints.py"


def test_blueprint_names_have_at_most_32_letters() -> None:
    """ComfyUI's search does not find a longer name that is typed in full."""
    assert max(len(blueprint.name) for blueprint in blueprints.BLUEPRINTS) <= 32
