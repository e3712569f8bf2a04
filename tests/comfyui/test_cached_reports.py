"""Reports of a prompt that runs again from ComfyUI's cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import families
import legs
import pytest
from runs import Ran

pytestmark = pytest.mark.comfyui

REPORTING_NODES = {  # workflow → its nodes with a report
    "cogview3_text_to_image": {"LoadPipeline", "EncodePrompt", "SampleCogView", "DecodeLatents"},
    "svd_image_to_video": {"LoadPipeline", "SampleStableVideoDiffusion", "DecodeLatents"},
}


@pytest.mark.parametrize("name", REPORTING_NODES)
def test_second_run_of_prompt_returns_reports_of_first(
    server: legs.Server, run_graph: Callable[..., Ran], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "workflow.json"
    graph = families.small(legs.ROOT / "workflows" / "api" / f"{name}.json", server.ask("/object_info"))
    file.write_text(json.dumps(graph), encoding="utf-8")
    first, second = run_graph(file), run_graph(file)
    assert (first.code, second.code) == (0, 0), (first.answer, second.answer)
    reporting = {id_ for id_, ui in first.answer["outputs"].items() if "onediff_guard" in ui}
    assert {graph[id_]["class_type"].removeprefix("OneDiffGuard") for id_ in reporting} == REPORTING_NODES[name]
    for id_ in reporting:  # including seconds: nothing was computed again
        assert second.answer["outputs"].get(id_) == first.answer["outputs"][id_], graph[id_]["class_type"]
