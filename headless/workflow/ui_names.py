"""The widgets that `%Node.widget%` in a file name means, those of muted nodes too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from .schema import NOTHING, Schema
from .subgraphs import Canvas, Unfolded
from .ui_file import UiNode
from .ui_links import GETTER, PRIMITIVE, SETTER, Sources
from .ui_texts import fill_in, named_in
from .ui_widgets import widget_values

PREFIX = "filename_prefix"
# the nodes whose file names the page fills in; of the last, its pack does
SAVERS = frozenset(
    {
        *("SaveImage", "SaveImageAdvanced", "SaveSVGNode", "SaveVideo", "SaveAnimatedWEBP", "SaveWEBM", "SaveAudio"),
        *("SaveAudioMP3", "SaveAudioOpus", "SaveAudioAdvanced", "SaveGLB", "Save3DAdvanced", "SaveGaussianSplat"),
        *("SavePointCloud", "SaveAnimatedPNG", "CLIPSave", "VAESave", "ModelSave", "LoraSave", "SaveLatent"),
        "VHS_VideoCombine",
    }
)
OF_THE_PAGE = {PRIMITIVE: "value", "Note": "text", "MarkdownNote": "text", SETTER: "Constant", GETTER: "Constant"}


class Names:
    """Fills in file names as of one moment.

    Args:
        schemas: by node type; of nodes without one no widget is known.
    """

    def __init__(self, unfolded: Unfolded, schemas: Mapping[str, Schema], sources: Sources) -> None:
        self.unfolded, self.schemas, self.sources = unfolded, schemas, sources
        self.nodes = _by_name(unfolded, schemas)
        self.levels = {id(level.canvas): level for level in unfolded.levels.values()}
        self.known: dict[tuple[str, str], Any] = {}
        self.now = datetime.now()

    def fill_in(self, text: str) -> str:
        """Raises WorkflowError: it gets too long."""
        return fill_in(text, self._value, self.now)

    def _value(self, name: str, widget: str) -> Any:
        if (name, widget) not in self.known:
            self.known[name, widget] = self._read(name, widget)
        return self.known[name, widget]

    def _read(self, name: str, widget: str) -> Any:
        canvas, node = self.nodes[name]
        value: Any = NOTHING
        if node.type in self.unfolded.subgraphs:
            place = self.unfolded.subgraphs[node.type].places.get(widget)
            value = NOTHING if place is None else self.sources.shown.of(node).values[place]
        elif node.type in OF_THE_PAGE:
            value = node.first_value if widget == OF_THE_PAGE[node.type] else NOTHING
        elif node.type in self.schemas:
            value = widget_values(node, self.schemas[node.type]).get(widget, NOTHING)
            level = self.levels.get(id(canvas))
            for slot in node.inputs or ():
                if level is None or value is NOTHING or slot.name != widget:
                    continue
                found = self.sources.of(level, node, slot)
                value = found.value if found and found.in_widget else value
        if value is NOTHING:
            raise KeyError(widget)
        return value


def types_named(unfolded: Unfolded) -> set[str]:
    """The types of the nodes that the file names of a workflow may mean."""
    nodes = _by_name(unfolded, {})
    texts = (text for _, node in _nodes(unfolded) if node.type in SAVERS | {PRIMITIVE} for text in _texts(node))
    return {nodes[name][1].type for text in texts for name in named_in(text) if name in nodes}


def _texts(node: UiNode) -> Iterator[str]:
    stored = node.widgets_values
    values: Iterable[Any] = stored.values() if isinstance(stored, dict) else stored if isinstance(stored, list) else ()
    return (value for value in values if isinstance(value, str))


def _by_name(unfolded: Unfolded, schemas: Mapping[str, Schema]) -> dict[str, tuple[Canvas, UiNode]]:
    """The first node of each name, else of each title."""
    names: dict[str, tuple[Canvas, UiNode]] = {}
    titles: dict[str, tuple[Canvas, UiNode]] = {}
    for canvas, node in _nodes(unfolded):
        name = node.name
        if name == "" and node.type not in SAVERS | OF_THE_PAGE.keys():
            name = node.type
        if name:
            names.setdefault(name, (canvas, node))
        title = node.title or (node.type in schemas and schemas[node.type].title) or node.type
        titles.setdefault(title, (canvas, node))
    return titles | names


def _nodes(unfolded: Unfolded) -> Iterator[tuple[Canvas, UiNode]]:
    """Every node in the page's order: what is in a subgraph before its node, and only once where that is used twice."""
    canvas = unfolded.levels[""].canvas
    entered = {id(canvas)}
    around: list[tuple[Canvas, UiNode | None, Iterator[UiNode]]] = [(canvas, None, iter(canvas.nodes.values()))]
    while around:
        canvas, host, nodes = around[-1]
        node = next(nodes, None)
        if node is None:
            around.pop()
            if host is not None:
                yield around[-1][0], host
            continue
        inside = unfolded.subgraphs.get(node.type)
        if inside is None or id(inside) in entered:
            yield canvas, node
        else:
            entered.add(id(inside))
            around.append((inside, node, iter(inside.nodes.values())))
