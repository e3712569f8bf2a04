"""Every shipped workflow with the pack's own loaders, run in a real ComfyUI on small models of its family.

Workflows with ComfyUI's own loaders, which need models of published sizes, are in test_every_workflow_in_comfyui.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import legs
import pytest
from runs import Ran, frames_of

pytestmark = pytest.mark.comfyui

API = legs.ROOT / "workflows" / "api"
TESTED_ELSEWHERE = ("cogvideox_text_to_video", "native_")  # test_in_comfyui.py, test_every_workflow_in_comfyui.py
WORKFLOWS = sorted(path.stem for path in API.glob("*.json") if not path.stem.startswith(TESTED_ELSEWHERE))
SIZES = {  # frames, height, width
    "cogvideox_lora_text_to_video": (9, 64, 96),
    "cogvideox_image_to_video": (9, 64, 96),
    "cogvideox_video_to_video": (9, 64, 96),
    "cogview3_text_to_image": (1, 64, 96),
    "cogview4_text_to_image": (1, 64, 96),
    "wan_text_to_video": (9, 64, 96),
    "svd_image_to_video": (3, 64, 64),
}


@pytest.fixture
def make(server: legs.Server, run_graph: Callable[..., Ran], tmp_path: Path) -> Callable[..., Any]:
    """make(graph, size) → (frames, reports); checks the frames' size, and that they are not black."""

    def run_workflow(graph: dict[str, Any], size: tuple[int, int, int]) -> tuple[Any, list[dict[str, Any]]]:
        file = tmp_path / "workflow.json"
        file.write_text(json.dumps(graph), encoding="utf-8")
        ran = run_graph(file)
        assert ran.code == 0, (ran.answer, server.tail())
        (saved,) = ran.files
        frames = frames_of(saved)
        assert frames.shape == (*size, 3)
        assert all(frame.std() > 2 for frame in frames), [float(frame.std()) for frame in frames]
        return frames, [*ran.reports(), *ran.reports("diagnosis")]

    return run_workflow


def small(server: legs.Server, name: str) -> dict[str, Any]:
    known = server.ask("/object_info")
    graph = families.small(API / f"{name}.json", known)
    if missing := {node["class_type"] for node in graph.values()} - set(known):
        pytest.skip(f"this ComfyUI has no {', '.join(sorted(missing))}")
    return graph


@pytest.mark.parametrize("name", WORKFLOWS)
def test_shipped_workflow_makes_frames_of_right_size(server: legs.Server, make: Callable[..., Any], name: str) -> None:
    graph = small(server, name)
    _, reports = make(graph, SIZES[name])
    assert any(report.get("plan", {}).get("component") == "denoiser" and report.get("steps") for report in reports)
    versions = {report["diagnosis"]["comfyui"]["version"] for report in reports if "diagnosis" in report}
    assert versions == {server.leg.version}


def test_svd_loads_from_comfyui_single_file(server: legs.Server, make: Callable[..., Any]) -> None:
    graph = small(server, "svd_image_to_video")
    families.change(graph, "OneDiffGuardLoadPipeline", model=families.SVD_FILE)
    _, reports = make(graph, SIZES["svd_image_to_video"])
    assert {report["variant"] for report in reports if "variant" in report} == {"SVD-XT"}


def test_lora_from_loras_folder_changes_frames(server: legs.Server, make: Callable[..., Any]) -> None:
    graph = small(server, "cogvideox_lora_text_to_video")
    without, _ = make(families.change(graph, "OneDiffGuardLoadLoRA", strength=0.0), (9, 64, 96))
    frames, reports = make(families.change(graph, "OneDiffGuardLoadLoRA", strength=0.8), (9, 64, 96))
    assert any(f"LoRA {families.LORA} at 0.8" in report.get("notes", []) for report in reports)
    assert abs(frames.astype(int) - without).max() > 4
