"""The shipped workflows on the page of a current ComfyUI: templates, runs, reports, errors, help, and unsafe text.

Screenshots are in the test's temporary folder, or in the folder that `ONEDIFF_GUARD_PICTURES` names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import comfyui_nodes
import legs
import pytest
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS
from runs import INSIDE
from runs import SMALL as SMALL_FILE
from templates import TITLES, api_file, read, ui_file

pytestmark = legs.IN_CHECKOUTS

NAME = "cogvideox_text_to_video"
LOADER, SAMPLER = "OneDiffGuardLoadPipeline", "OneDiffGuardSampleCogVideoX"
SMALL = SMALL_FILE | {
    f"{LOADER}.model": INSIDE,
    f"{LOADER}.precision": "fp16",
    "OneDiffGuardNaNGuard.scope": "step",  # no profile is saved for the next test
}


MARKUP_NAME = "<img src=x onerror=window.ran=['name']>"  # a possible folder name
MARKUP = "<img src=x onerror=\"window.ran=['text']\">"
ENDING = f"{MARKUP} & ![a](x) [[b|https://example.org]] __LNK7__"  # newer pages render Markdown and more


@pytest.fixture(scope="module")
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    models = server.base / "models"
    listed = [models / folder / name for folder, names in comfyui_nodes.FILES.items() for name in names]
    listed.append(models / "checkpoints" / comfyui_nodes.SD15_FILE)
    for file in listed:
        file.parent.mkdir(exist_ok=True)
        file.touch()  # listed, but never loaded here
    with browser.canvas(server.url, pictures) as opened:
        yield opened
    for file in listed:
        file.unlink()


@pytest.fixture
def opened(canvas: browser.Canvas) -> browser.Canvas:
    canvas.load(read(ui_file(NAME)))
    return canvas


def test_page_lists_templates_and_serves_picture(canvas: browser.Canvas) -> None:
    assert sorted(canvas.ask("/api/workflow_templates")[legs.FOLDER]) == sorted(TITLES.values())
    address = f"/api/workflow_templates/{legs.FOLDER}/{TITLES[NAME]}"
    assert canvas.ask(f"{address}.json") == read(ui_file(NAME))
    assert "Not Found" not in str(canvas.ask(f"{address}.jpg"))[:100]


@pytest.mark.parametrize("name", TITLES)
def test_template_opens_without_errors_and_equals_api_file(canvas: browser.Canvas, name: str) -> None:
    shipped = read(api_file(name))
    newer = {node["class_type"] for node in shipped.values()} & comfyui_nodes.NEWER
    if lacking := sorted(newer - canvas.ask("/object_info").keys()):
        pytest.skip(f"this ComfyUI has no {', '.join(lacking)}")
    canvas.console_errors.clear()
    canvas.load(read(ui_file(name)))
    canvas.picture(f"opened_{name}")
    assert (canvas.missing(), canvas.notices(), canvas.console_errors) == ([], [], [])
    assert not [url for url in canvas.failed_urls if legs.FOLDER in url]
    assert canvas.prompt_like(shipped) == shipped


def test_saved_template_keeps_widget_values_and_order(canvas: browser.Canvas) -> None:
    """A file stores values by position, and pages hide advanced ones."""
    for name in TITLES:
        workflow = read(ui_file(name))
        canvas.load(workflow)
        assert canvas.saved_values() == browser.values_of(workflow), name


def test_run_shows_report_on_sampler(opened: browser.Canvas) -> None:
    opened.set_widgets(SMALL)
    end, detail = opened.queue()
    assert end == "execution_success", detail
    opened.wait_for_video()
    opened.picture("ran")
    shown = [value for value in opened.widgets(SAMPLER).values() if "overflow protection" in str(value)]
    assert shown and "2 steps, all fine" in shown[0], opened.widgets(SAMPLER)
    assert opened.widgets(SAMPLER)["seed"] != 42, "control after generate: randomize"


def test_cached_run_shows_report_of_first_run(opened: browser.Canvas) -> None:
    fixed_seed = {f"{SAMPLER}.seed": 4711, f"{SAMPLER}.control_after_generate": "fixed"}  # the first run is not cached
    opened.set_widgets(SMALL | fixed_seed)
    shown: list[dict[str, Any]] = []
    for _ in range(2):
        end, detail = opened.queue()
        assert end == "execution_success", detail
        shown.append(opened.widgets(SAMPLER))
    assert "2 steps, all fine" in str(shown[0]) and shown[1] == shown[0]
    runs = sorted(opened.ask("/api/history").values(), key=lambda run: run["prompt"][0])[-2:]
    first, second = ({id_: ui.get("onediff_guard") for id_, ui in run["outputs"].items()} for run in runs)
    assert second == first


def test_missing_model_is_named_on_page(opened: browser.Canvas) -> None:
    """A user may open the workflow before downloading the model."""
    opened.press_run()
    opened.wait_for_error("model 'CogVideoX-2b' was not found")
    opened.picture("no_model")


def test_page_serves_help_pages_and_translations(canvas: browser.Canvas) -> None:
    for name in NODE_CLASS_MAPPINGS:
        page = (legs.ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
        assert canvas.ask(f"/extensions/{legs.FOLDER}/docs/{name}.md") == page
        for translated in (legs.ROOT / "web" / "docs" / name).glob("*.md"):
            page = translated.read_text(encoding="utf-8")
            assert canvas.ask(f"/extensions/{legs.FOLDER}/docs/{name}/{translated.name}") == page
    languages = canvas.ask("/api/i18n")
    for folder in filter(Path.is_dir, (legs.ROOT / "locales").iterdir()):
        assert set(languages[folder.name]["nodeDefs"]) >= set(NODE_CLASS_MAPPINGS)


@pytest.fixture
def hostile_model(server: legs.Server) -> Iterator[str]:
    """The name of a CogView4 with markup in its config. A second folder has markup in its name."""
    models, names = server.base / "models" / "diffusers", ("hostile", MARKUP_NAME)
    for name in names:
        shutil.copytree(models / "CogView4-6B", models / name)
    config = models / "hostile" / "transformer" / "config.json"
    config.write_text(json.dumps(read(config) | {"num_layers": MARKUP}))
    yield "hostile"
    for name in names:
        shutil.rmtree(models / name)


def test_markup_in_model_or_prompt_is_shown_as_text(
    canvas: browser.Canvas, server: legs.Server, hostile_model: str
) -> None:
    """A model's folder and config, and a workflow's prompt, come from other people. The report quotes the end of a
    prompt that is too long."""
    canvas.open(server.url)  # updates the list of folders
    canvas.load(read(ui_file("cogview4_text_to_image")))
    canvas.set_widgets(
        {
            "OneDiffGuardLoadPipeline.backend": "eager",
            "OneDiffGuardEncodePrompt.prompt": "boat " * 1030 + ENDING,
            "OneDiffGuardSampleCogView.width": 96,
            "OneDiffGuardSampleCogView.height": 64,
            "OneDiffGuardSampleCogView.steps": 2,
        }
    )
    canvas.attach("PreviewAny", "OneDiffGuardSampleCogView", 1)
    end, detail = canvas.queue()
    canvas.picture("markup_in_prompt")
    assert end == "execution_success", detail
    assert ENDING in canvas.text_with("this was cut off")
    canvas.set_widgets({"OneDiffGuardLoadPipeline.model": hostile_model})
    assert canvas.queue()[0] == "execution_error", "a denoiser with this config cannot be built"
    canvas.picture("markup_in_config")
    canvas.wait_for_error(MARKUP)
    canvas.open_list("OneDiffGuardLoadPipeline", "model")
    canvas.wait_for_text(hostile_model)
    canvas.picture("markup_in_list")
    assert canvas.count("img[src='x']") == 0 and canvas.evaluate("() => window.ran ?? []") == []


def test_compile_node_compiles_nothing_in_second_run(opened: browser.Canvas) -> None:
    opened.set_widgets(SMALL | {f"{LOADER}.precision": "fp32", f"{LOADER}.backend": "auto"})
    how = {"backend": "inductor", "dynamic": "auto", "mode": "default", "attention": "auto"}
    opened.insert("OneDiffGuardCompile", SAMPLER, **how)
    assert not opened.missing()
    for _ in range(2):
        opened.set_widgets({f"{SAMPLER}.seed": opened.widgets(SAMPLER)["seed"] + 1})
        end, detail = opened.queue(seconds=240)
        assert end == "execution_success", detail
    run = max(opened.ask("/api/history").values(), key=lambda each: each["prompt"][0])
    (sampler,) = (node_id for node_id, node in run["prompt"][2].items() if node["class_type"] == SAMPLER)
    (report,) = run["outputs"][sampler]["onediff_guard"]
    assert report["backend"] == "inductor"
    assert report["graphs"] == 0 and report["backend_reason"] == "as you chose", "a CPU has one attention kernel"
