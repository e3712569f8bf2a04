"""Where the nodes of the shipped graphs stand: large enough to be read, nothing on another, no wire behind a node."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from templates import WORKFLOWS, ui_file

FILES = sorted(WORKFLOWS.glob("*.json"))
SCREEN = 1600, 900  # pixels
FILLED = 0.75  # of the screen, by litegraph's fitToBounds
PADDING = 20  # that the page adds to width and height
READABLE, READABLE_OF_MANY = 0.75, 0.6  # zoom: at 0.55 and less, the classic frontend draws no text
MANY = 16  # nodes: models with two experts, with sound
TITLE = 30  # above a node's position
SLOT = 20  # a row
GROWTH = {  # below a node, in a run: a preview, a strip
    **dict.fromkeys(("OneDiffGuardSample", "KSampler", "SamplerCustomAdvanced"), 340),
    "KSamplerSelect": 0,
    "OneDiffGuardNaNGuardNative": 300,
    "OneDiffGuardEncodePrompt": 260,
    "OneDiffGuardDecodeLatents": 180,
    "OneDiffGuardLoadPipeline": 200,
}


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, x: float, y: float) -> bool:
        return self.left < x < self.right and self.top < y < self.bottom

    def meets(self, other: Box) -> bool:
        apart = self.right <= other.left or other.right <= self.left
        return not (apart or self.bottom <= other.top or other.bottom <= self.top)


def stem(path: Path) -> str:
    return path.stem


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def label(node: dict[str, Any]) -> str:
    return f"{node['id']} {node['type']}"


def boxes(graph: dict[str, Any]) -> dict[str, Box]:
    return {
        label(node): Box(x, y - TITLE, x + width, y + height)
        for node in graph["nodes"]
        for (x, y), (width, height) in [(node["pos"], node["size"])]
    }


def wires(graph: dict[str, Any]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Every link without reroutes, as points of the spline that litegraph's LinkRenderType.SPLINE_LINK draws."""
    nodes = {node["id"]: node for node in graph["nodes"]}
    rerouted = {link["id"] for link in graph["extra"].get("linkExtensions", [])}
    for link, origin, origin_slot, target, target_slot, kind in graph["links"]:
        if link in rerouted:  # the browser's test looks at them
            continue
        a, b = nodes[origin], nodes[target]
        x0, y0 = a["pos"][0] + a["size"][0], a["pos"][1] + (origin_slot + 0.7) * SLOT
        x1, y1 = b["pos"][0], b["pos"][1] + (target_slot + 0.7) * SLOT
        bend = math.hypot(x1 - x0, y1 - y0) / 4
        points = []
        for i in range(1, 200):
            t = i / 200
            s = 1 - t
            points.append(
                (
                    s**3 * x0 + 3 * s * s * t * (x0 + bend) + 3 * s * t * t * (x1 - bend) + t**3 * x1,
                    s**3 * y0 + 3 * s * s * t * y0 + 3 * s * t * t * y1 + t**3 * y1,
                )
            )
        yield f"{kind} of {label(a)} to {label(b)}", points


def zoom(placed: dict[str, Box]) -> float:
    """At which the page opens them."""
    width = max(box.right for box in placed.values()) - min(box.left for box in placed.values())
    height = max(box.bottom for box in placed.values()) - min(box.top for box in placed.values())
    return FILLED * min(SCREEN[0] / (width + PADDING), SCREEN[1] / (height + PADDING))


def faults(graph: dict[str, Any]) -> list[str]:
    placed = boxes(graph)
    found = []
    if (scale := zoom(placed)) < (READABLE_OF_MANY if len(placed) >= MANY else READABLE):
        found.append(f"it opens at {scale:.0%}")
    names = list(placed)
    for i, name in enumerate(names):
        found += [f"{name} lies on {other}" for other in names[i + 1 :] if placed[name].meets(placed[other])]
    for wire, points in wires(graph):
        found += [f"{wire} runs behind {name}" for name, box in placed.items() if any(box.holds(*p) for p in points)]
    for name, box in placed.items():
        kinds = [kind for kind in GROWTH if name.split()[1].startswith(kind)]
        growth = GROWTH[max(kinds, key=len)] if kinds else 0
        grown = box._replace(bottom=box.bottom + growth)
        found += [f"{name} will grow into {other}" for other in names if other != name and grown.meets(placed[other])]
    return found


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_it_opens_large_enough_to_be_read_and_no_wire_runs_behind_a_node(path: Path) -> None:
    assert faults(read(path)) == []


@pytest.mark.parametrize("path", FILES, ids=stem)
def test_a_note_has_no_inline_code(path: Path) -> None:
    """On a note's colours it cannot be read."""
    for node in read(path)["nodes"]:
        if node["type"] == "MarkdownNote":
            (text,) = node["widgets_values"]
            assert "`" not in "".join(text.split("```")[::2])


def test_what_is_wrong_is_found() -> None:
    good = read(ui_file("cogvideox_text_to_video"))

    def with_node(kind: str, **moved: list[float]) -> list[str]:
        graph = copy.deepcopy(good)
        next(node for node in graph["nodes"] if node["type"] == kind).update(moved)
        return faults(graph)

    sampler, decode = (
        next(node for node in good["nodes"] if node["type"] == f"OneDiffGuard{name}")
        for name in ("SampleCogVideoX", "DecodeLatents")
    )
    x, y = sampler["pos"]
    assert any("runs behind 4 OneDiffGuardSampleCogVideoX" in fault for fault in with_node(sampler["type"], pos=[x, 0]))
    assert any("lies on" in fault for fault in with_node(decode["type"], pos=[x, y]))
    assert any("opens at" in fault for fault in with_node("SaveVideo", pos=[1700, 0]))
    below = [x, y + sampler["size"][1] + 100]
    assert any("will grow into" in fault for fault in with_node("MarkdownNote", pos=below))
