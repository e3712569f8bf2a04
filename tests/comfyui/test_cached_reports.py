"""A prompt that runs again from ComfyUI's cache has the reports of the run that it remembers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import families
import legs
import pytest
from runs import Ran

pytestmark = pytest.mark.comfyui

SHOWING = {  # workflow: its nodes with a report
    "cogview3_text_to_image": {"LoadPipeline", "EncodePrompt", "SampleCogView", "DecodeLatents"},
    "svd_image_to_video": {"LoadPipeline", "SampleStableVideoDiffusion", "DecodeLatents"},
}


@pytest.mark.parametrize("name", SHOWING)
def test_the_second_run_of_a_prompt_has_the_reports_of_the_first(
    server: legs.Server, run_graph: Callable[..., Ran], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "workflow.json"
    graph = families.small(legs.ROOT / "workflows" / "api" / f"{name}.json", server.ask("/object_info"))
    file.write_text(json.dumps(graph), encoding="utf-8")
    first, second = run_graph(file), run_graph(file)
    assert (first.code, second.code) == (0, 0), (first.answer, second.answer)
    reporting = {id_ for id_, ui in first.answer["outputs"].items() if "onediff_guard" in ui}
    assert {graph[id_]["class_type"].removeprefix("OneDiffGuard") for id_ in reporting} == SHOWING[name]
    for id_ in reporting:  # seconds and all: nothing was computed again
        assert second.answer["outputs"].get(id_) == first.answer["outputs"][id_], graph[id_]["class_type"]
