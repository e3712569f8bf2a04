"""The Precision Report node: what `doctor` says, of the pipeline on its wire."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_models
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands.doctor import examine
from comfyui_onediff_guard.headless.hosts.local import run_local
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH


def node(name: str) -> Any:
    return NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]()


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    model = shared_models.copied(model_folder("5b"), tmp_path / "models" / "small-5b")
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path):
        yield model


def load(folder: Path, precision: str = "auto", **more: str) -> Any:
    return node("LoadPipeline").load(folder.name, precision, "eager", "none", **more)[0]


def told(pipeline: Any, *card: str) -> dict[str, Any]:
    return node("PrecisionReport").show(pipeline, *card)["ui"]["onediff_guard"][0]


def test_it_says_what_doctor_says(folder: Path) -> None:
    shown = told(load(folder))
    examined = examine(folder).as_dict()
    assert shown["backends"]["chosen"] == "eager", "the pipeline's own"
    assert shown | {"backends": None} == examined | {"backends": None}
    assert shown["backends"]["states"] == examined["backends"]["states"]


def test_the_text_is_shown_handed_on_and_in_the_history(comfyui: Any, model_folder: Callable[..., Path]) -> None:
    answer = node("PrecisionReport").show(load(model_folder("2b")), node_id="7")
    (text,) = answer["result"]
    assert answer["ui"]["text"] == [text] and comfyui.texts == [("7", text)]
    assert "Plan for 2b-none: CogVideoX-2B on CPU" in text
    json.dumps(answer["ui"], allow_nan=False)


def test_it_is_the_pipelines_own_settings(folder: Path) -> None:
    pipeline = load(folder, "fp16", accumulation="fast")
    (pipeline,) = node("NaNGuard").apply(pipeline, "stop", True)
    shown = told(pipeline)
    assert (shown["precision"], shown["accumulation"]) == ("fp16", "fast")
    assert (shown["on_failure"], shown["strict"]) == ("stop", True)
    assert {plan["dtype"] for plan in shown["models"][0]["plans"]} == {"fp16"}
    assert pipeline.store.loaded() == {}, "no weight was read for it"


def test_another_card_changes_the_plan_and_not_the_pipeline(folder: Path) -> None:
    pipeline = load(folder)
    here, there = told(pipeline), told(pipeline, "sm75")
    assert (here["architecture"]["name"], there["architecture"]["name"]) == ("cpu", "sm75")
    assert (here["here"], there["here"]) == (True, False)
    dtypes = [{plan["dtype"] for plan in shown["models"][0]["plans"]} for shown in (here, there)]
    assert dtypes == [{"bf16"}, {"fp16"}]
    assert pipeline.architecture.name == "cpu"


def test_it_is_made_anew_in_each_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert math.isnan(node("PrecisionReport").IS_CHANGED(architecture="sm75"))
    pipeline = load(folder)
    monkeypatch.setenv(ATTENTION_SWITCH, "maybe")
    assert f"{ATTENTION_SWITCH} = maybe" in node("PrecisionReport").show(pipeline)["result"][0]


def test_it_ends_a_graph_of_its_own(folder: Path, tmp_path: Path) -> None:
    graph = {
        "1": {
            "class_type": "OneDiffGuardLoadPipeline",
            "inputs": {"model": folder.name, "precision": "auto", "backend": "auto", "offload": "none"},
        },
        "2": {"class_type": "OneDiffGuardPrecisionReport", "inputs": {"pipeline": ["1", 0], "architecture": "sm86"}},
    }
    ran = run_local(graph, models=[folder.parent], input_dir=tmp_path, output_dir=tmp_path / "out")
    assert "on sm86 (Ampere)" in ran.results["2"][0]


def test_every_loader_is_known_to_it() -> None:
    loading = {
        NODE_DISPLAY_NAME_MAPPINGS[name]
        for name, cls in NODE_CLASS_MAPPINGS.items()
        if "ONEDIFF_PIPELINE" in cls.RETURN_TYPES and "pipeline" not in cls.INPUT_TYPES()["required"]
    }
    assert loading == {"Load Pipeline"}
