"""The report of Load Pipeline: what `doctor` says, for its pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shared_models
from as_comfyui import call
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands.doctor import examine
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH


@pytest.fixture
def folder(model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Path]:
    model = shared_models.copied(model_folder("5b"), tmp_path / "models" / "small-5b")
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path):
        yield model


def load(folder: Path, precision: str = "auto", **more: str) -> dict[str, Any]:
    return call("LoadPipeline", model=folder.name, precision=precision, backend="eager", **more)


def diagnosis_of(loaded: dict[str, Any]) -> dict[str, Any]:
    return loaded["ui"]["onediff_guard"][0]["diagnosis"]


def test_loader_report_equals_doctor_report(folder: Path) -> None:
    shown = diagnosis_of(load(folder))
    examined = examine(folder).as_dict()
    assert shown["backends"]["chosen"] == "eager", "the pipeline's own"
    assert shown | {"backends": None} == examined | {"backends": None}
    assert shown["backends"]["states"] == examined["backends"]["states"]


def test_strip_has_reason_and_full_report(folder: Path) -> None:
    ui = load(folder)["ui"]
    (shown,) = ui["onediff_guard"]
    (text,) = ui["text"]
    assert text.splitlines()[0] == shown["plan"]["reason"] and "unknown variant (" in text
    assert (shown["architecture"], shown["plan"]["dtype"], shown["cells"]) == ("CPU", "bf16", [])
    assert shown["text"].startswith("Plan for small-5b: CogVideoX-5B on CPU") and "This machine" in shown["text"]
    json.dumps(ui, allow_nan=False)


def test_report_shows_settings_of_loader_and_reads_no_weight(folder: Path) -> None:
    loaded = load(folder, "fp16", accumulation="fast")
    shown = diagnosis_of(loaded)
    assert (shown["precision"], shown["accumulation"]) == ("fp16", "fast")
    assert {plan["dtype"] for plan in shown["models"][0]["plans"]} == {"fp16"}
    assert loaded["result"][0].store.loaded() == {}, "no weight was read for it"


def test_report_shows_current_value_of_switch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTENTION_SWITCH, "maybe")
    assert f"{ATTENTION_SWITCH} = maybe" in load(folder)["ui"]["onediff_guard"][0]["text"]


def test_load_pipeline_is_only_loader_node() -> None:
    loading = {
        NODE_DISPLAY_NAME_MAPPINGS[name]
        for name, cls in NODE_CLASS_MAPPINGS.items()
        if "ONEDIFF_PIPELINE" in cls.RETURN_TYPES and "pipeline" not in cls.INPUT_TYPES()["required"]
    }
    assert loading == {"Load Pipeline"}
