"""`compare`: which inputs set the precision, which stay fixed, and which frames are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless.comparison.precisions import SHOWN, Comparable, comparable
from comfyui_onediff_guard.headless.errors import WorkflowError
from comfyui_onediff_guard.headless.hosts.local import read_local
from comfyui_onediff_guard.headless.workflow.graph import from_api, read_json
from comfyui_onediff_guard.headless.workflow.schema import from_object_info
from comfyui_onediff_guard.headless.workflow.settings import Setting

API = Path(__file__).resolve().parents[2] / "workflows" / "api"
PRECISIONS = ("fp32", "fp16 (plain)", "fp16", "bf16")
NEED_COMFYUI = ("cogvideox_video_to_video", "native_")  # use ComfyUI's own nodes
LOCAL = sorted(path.stem for path in API.glob("*.json") if not path.stem.startswith(NEED_COMFYUI))


def load(name: str = "cogvideox_text_to_video", *changes: str) -> Comparable:
    graph, schemas = read_local(read_json(API / f"{name}.json"))
    return comparable(graph, schemas, [Setting.parse(change) for change in changes], PRECISIONS)


def values(found: Comparable, precision: str, name: str = "precision") -> dict[str, Any]:
    nodes = found.in_precision(precision).nodes.values()
    return {node.class_type: node.inputs[name] for node in nodes if name in node.inputs}


@pytest.mark.parametrize("name", LOCAL)
def test_shipped_workflow_can_be_compared(name: str) -> None:
    found = load(name)
    graph = found.in_precision("bf16")
    assert graph.nodes[SHOWN].inputs == {"images": found.frames}
    assert graph.nodes[found.frames.node].class_type == "OneDiffGuardDecodeLatents"
    (loader,) = (kind for kind, value in values(found, "bf16").items() if value == "bf16")
    assert loader.startswith("OneDiffGuardLoad")
    assert {value for kind, value in values(found, "bf16").items() if kind != loader} == {"inherit"}
    assert not {"SaveVideo", "SaveImage", "SaveAnimatedWEBP"} & graph.class_types()


def test_compared_graphs_differ_only_in_precision() -> None:
    one, other = (load().in_precision(precision) for precision in ("fp32", "bf16"))
    assert one.with_inputs({"1": {"precision": "bf16"}}) == other
    assert other.nodes["4"].inputs["seed"] == 42


@pytest.mark.parametrize(
    ("changes", "precision", "name", "node", "value"),
    [
        ([], "fp16 (plain)", "on_failure", "NaNGuard", "off"),
        ([], "fp16", "on_failure", "NaNGuard", "rerun"),
        (["NaN Guard.on_failure=stop"], "fp16 (plain)", "on_failure", "NaNGuard", "stop"),
        (["Decode Latents.precision=fp32"], "bf16", "precision", "DecodeLatents", "fp32"),
        (["Decode Latents.precision=fp32"], "bf16", "precision", "LoadPipeline", "bf16"),
    ],
)
def test_precision_sets_inputs_unless_user_set_them(
    changes: list[str], precision: str, name: str, node: str, value: str
) -> None:
    assert values(load("cogvideox_text_to_video", *changes), precision, name)[f"OneDiffGuard{node}"] == value


def test_precision_of_decoder_in_workflow_is_replaced() -> None:
    workflow = dict(read_json(API / "cogvideox_text_to_video.json"))
    workflow["5"]["inputs"]["precision"] = "fp32"
    found = comparable(*read_local(workflow), [], PRECISIONS)
    assert values(found, "bf16")["OneDiffGuardDecodeLatents"] == "bf16"


def test_compared_frames_are_those_that_depend_on_precision() -> None:
    workflow = dict(read_json(API / "cogvideox_image_to_video.json"))
    first = {"class_type": "PreviewImage", "inputs": {"images": ["image", 0]}}
    workflow = {"image": {"class_type": "LoadImage", "inputs": {"image": "a.png"}}, "first": first, **workflow}
    graph, schemas = read_local(workflow)
    found = comparable(graph, schemas, [], PRECISIONS)
    assert graph.nodes[found.frames.node].class_type == "OneDiffGuardDecodeLatents"
    assert "first" not in found.in_precision("bf16").nodes


def test_native_workflow_is_rejected_with_reason() -> None:
    kinds = {
        "CheckpointLoaderSimple": {"input": {"required": {"ckpt_name": [["a"]]}}, "output": ["MODEL", "CLIP", "VAE"]},
        "UNETLoader": {"input": {"required": {"weight_dtype": [["default", "fp4"]]}}, "output": ["MODEL"]},
    }
    graph = from_api({str(n): {"class_type": kind, "inputs": {}} for n, kind in enumerate(kinds)})
    with pytest.raises(WorkflowError, match=r"(?s)Found: CheckpointLoaderSimple, UNETLoader\. .*--force-fp16"):
        comparable(graph, {kind: from_object_info(kind, info) for kind, info in kinds.items()}, [], PRECISIONS)


def test_workflow_without_pictures_is_rejected() -> None:
    workflow = {key: node for key, node in read_json(API / "cogvideox_text_to_video.json").items() if key in "123"}
    workflow["4"] = {"class_type": "OneDiffGuardSelfTest", "inputs": {}}
    graph, schemas = read_local(workflow)
    with pytest.raises(WorkflowError, match=r"no images to compare.*SaveImage"):
        comparable(graph, schemas, [], PRECISIONS)
