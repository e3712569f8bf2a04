"""Layout of the shipped graphs on the page: no overlaps, by the drawn sizes and wires, in both frontends and modes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import legs
import pytest
from templates import TITLES, api_file, read, ui_file

pytestmark = legs.IN_CHECKOUTS

WIDEST, WIDEST_OF_MANY = 1600, 2000
MANY = 16  # nodes, as in tests/workflows/test_layout.py
# Node edges are checked every two units: a wire behind a node crosses an edge. A wire's ends lie inside its own two
# nodes, so those are not checked.
FAULTS = """widest => {
    const boxes = app.graph.nodes.map(node => {
        const drawn = document.querySelector(`[data-node-id="${node.id}"]`)
        const [x, y] = node.pos
        const [width, height] = drawn ? [drawn.offsetWidth, drawn.offsetHeight - 30] : node.size
        const name = `${node.id} ${node.type}`
        return {id: node.id, name, left: x, top: y - 30, right: x + width, bottom: y + height}
    })
    const found = []
    const width = Math.max(...boxes.map(b => b.right)) - Math.min(...boxes.map(b => b.left))
    if (width > widest) found.push(`it is ${width} wide`)
    for (const [i, a] of boxes.entries())
        for (const b of boxes.slice(i + 1))
            if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
                found.push(`${a.name} lies on ${b.name}`)
    const pen = document.createElement('canvas').getContext('2d')
    pen.lineWidth = 3
    let wires = 0
    for (const link of app.graph.links.values()) {
        if (!link.path) continue
        wires += 1
        const turns = [...(app.graph.reroutes?.values() ?? [])].filter(turn => turn.linkIds.has(link.id))
        const paths = [link.path, ...turns.map(turn => turn.path)]
        for (const box of boxes) {
            if ([link.origin_id, link.target_id].some(id => id == box.id)) continue
            const edge = []
            for (let x = box.left + 2; x < box.right; x += 2) edge.push([x, box.top + 2], [x, box.bottom - 2])
            for (let y = box.top + 2; y < box.bottom; y += 2) edge.push([box.left + 2, y], [box.right - 2, y])
            if (edge.some(([x, y]) => paths.some(path => pen.isPointInStroke(path, x, y))))
                found.push(`${link.type} of ${link.origin_id} to ${link.target_id} runs behind ${box.name}`)
        }
    }
    return [found, wires, app.graph.nodes.length]
}"""
# In classic mode, long text scrolls. In Nodes 2.0, the box grows.
IS_LONG = """heights => app.graph.nodes.some(node => node.size[1] > (heights[node.id] ?? Infinity))
    || [...document.querySelectorAll('.comfy-markdown .tiptap')].some(text => text.scrollHeight > text.clientHeight)"""
FIT = "() => { app.canvas.ds.scale = 0.4; app.canvas.ds.offset = [300, 900]; app.canvas.setDirty(true, true) }"


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "nodes_2"])
def canvas(request: pytest.FixtureRequest, server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    if request.param and server.leg.id == "leg_b":
        pytest.skip("Nodes 2.0 is newer than this frontend")
    with browser.canvas(server.url, pictures) as opened, opened.nodes_2(server.url, on=request.param):
        yield opened


def types(name: str) -> set[str]:
    """Return the types of a shipped workflow's nodes."""
    return {node["class_type"] for node in read(api_file(name)).values()}


def faults(canvas: browser.Canvas, graph: dict[str, Any]) -> list[str]:
    canvas.load(graph)
    notes = {node["id"]: node["size"][1] for node in graph["nodes"] if node["type"] == "MarkdownNote"}
    long = ["a note is longer than its box"] * canvas.evaluate(IS_LONG, notes)  # before zooming out hides text
    canvas.evaluate(FIT)  # the page draws only what is on the screen
    canvas.settle()
    found, wires, nodes = canvas.evaluate(FAULTS, WIDEST_OF_MANY if len(graph["nodes"]) >= MANY else WIDEST)
    assert (wires, nodes) == (len(graph["links"]), len(graph["nodes"]))
    return long + found


def test_nodes_do_not_overlap_and_wires_do_not_cross_nodes(canvas: browser.Canvas) -> None:
    known = canvas.ask("/object_info")
    wrong = {
        name: found for name in TITLES if types(name) <= set(known) and (found := faults(canvas, read(ui_file(name))))
    }
    assert wrong == {}, json.dumps(wrong, indent=1)
