"""The pack's blueprints on the page of a current ComfyUI: search finds them, adds one node, and it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import blueprints
import browser
import legs
import pytest
from comfyui_onediff_guard.headless.workflow import schema, ui_format
from runs import INSIDE
from templates import read
from test_strip_in_browser import console_errors

pytestmark = legs.IN_CHECKOUTS

TEXT_TO_VIDEO = "Guarded CogVideoX Text to Video"
SHOWN = "() => app.graph.nodes.map(node => [node.title, (node.widgets ?? []).map(widget => widget.name)])"
PUT = """values => {
    const [folded] = app.graph.nodes
    for (const widget of folded.widgets) if (widget.name in values) widget.value = values[widget.name]
    for (const node of folded.subgraph.nodes)
        for (const widget of node.widgets ?? []) if (widget.name === 'backend') widget.value = 'eager'
    const images = LiteGraph.createNode('SaveImage')
    app.graph.add(images)
    images.pos = [folded.pos[0] + folded.size[0] + 80, folded.pos[1]]
    folded.connect(0, images, 0)
}"""
SMALL = {"model": INSIDE, "precision": "fp16", "width": 96, "height": 64, "frames": 9, "steps": 2}


@pytest.fixture(scope="module")
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    if not server.leg.is_current:
        pytest.skip("this ComfyUI lists no blueprints of packs")
    with browser.canvas(server.url, pictures) as opened:
        yield opened


@pytest.fixture(params=["classic", "nodes_2"])
def page(request: pytest.FixtureRequest, server: legs.Server, canvas: browser.Canvas) -> Iterator[browser.Canvas]:
    with canvas.nodes_2(server.url, on=request.param == "nodes_2"):
        canvas.load({"nodes": [], "links": [], "version": 0.4})
        canvas.console_errors.clear()
        yield canvas


def test_server_lists_every_blueprint(canvas: browser.Canvas) -> None:
    listed = {entry["name"] for entry in canvas.ask("/api/global_subgraphs").values() if legs.FOLDER in str(entry)}
    assert listed == {blueprint.name for blueprint in blueprints.BLUEPRINTS}


@pytest.mark.parametrize("blueprint", blueprints.BLUEPRINTS, ids=lambda blueprint: blueprint.name)
def test_search_adds_blueprint_as_one_node(
    page: browser.Canvas, request: pytest.FixtureRequest, blueprint: blueprints.Blueprint
) -> None:
    page.search(blueprint.name)
    ((title, widgets),) = page.evaluate(SHOWN)
    page.picture(f"blueprint_{request.node.callspec.id}".replace(" ", "_"))
    assert title == blueprint.name
    assert widgets == [name for names in blueprint.shown.values() for name in names]
    assert (page.missing(), console_errors(page)) == ([], [])


@pytest.mark.parametrize("blueprint", blueprints.BLUEPRINTS, ids=lambda blueprint: blueprint.name)
def test_page_and_headless_reader_make_same_graph(page: browser.Canvas, blueprint: blueprints.Blueprint) -> None:
    schemas = {name: schema.from_object_info(name, info) for name, info in page.ask("/object_info").items()}
    saved = read(blueprints.FOLDER / f"{blueprint.name}.json")
    page.load(saved)
    shown = page.prompt()
    ours = ui_format.convert(saved, schemas).to_api()
    assert {id_: (node["class_type"], node["inputs"]) for id_, node in shown.items()} == {
        id_: (node["class_type"], node["inputs"]) for id_, node in ours.items()
    }


def test_text_to_video_blueprint_runs(page: browser.Canvas, request: pytest.FixtureRequest) -> None:
    page.search(TEXT_TO_VIDEO)
    page.evaluate(PUT, SMALL)
    end, detail = page.queue()
    page.picture(f"blueprint_ran_{request.node.callspec.id}".replace(" ", "_"))
    assert end == "execution_success", detail
    assert console_errors(page) == []
