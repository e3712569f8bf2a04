"""The page's changes to texts when it sends them: choices and comments in prompts, patterns in file names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from functools import cache
from random import Random
from typing import Any

from ..errors import WorkflowError
from .graph import Graph, Link
from .schema import SEED_NAMES, Schema
from .ui_file import INPUTS, Canvas, UiNode, Unfolded
from .ui_values import OF_THE_PAGE, PRIMITIVE, Widgets

PREFIX = "filename_prefix"
# nodes whose file names the page fills in; for the last one, its pack does
SAVERS = frozenset(
    {
        *("SaveImage", "SaveImageAdvanced", "SaveSVGNode", "SaveVideo", "SaveAnimatedWEBP", "SaveWEBM", "SaveAudio"),
        *("SaveAudioMP3", "SaveAudioOpus", "SaveAudioAdvanced", "SaveGLB", "Save3DAdvanced", "SaveGaussianSplat"),
        *("SavePointCloud", "SaveAnimatedPNG", "CLIPSave", "VAESave", "ModelSave", "LoraSave", "SaveLatent"),
        "VHS_VideoCombine",
    }
)
MAX_NESTED = 100  # most levels of nested choices
MAX_REPLACED = 100_000  # most characters that one text's patterns fill in
_TOKEN = re.compile(r"\\.|[^\\{|}]+|.", re.DOTALL)
_LINE_COMMENT = re.compile(r"//[^\n\r\u2028\u2029]*")
_COMMENT = re.compile(rf"{_LINE_COMMENT.pattern}|/\*")  # a whole line comment, or the beginning of a block comment
_ESCAPED = re.compile(r"\\([{|}])")
_PATTERN = re.compile(r"%([^%]+)%")
_DATE_PART = re.compile(r"dd?|MM?|hh?|mm?|ss?|yyy?y?")
_NO_FILE_NAME = re.compile(r'[/?<>\\:*|"\x00-\x1f\x7f]')


def chosen(graph: Graph) -> Graph:
    """Return a copy in which the choices in prompts ("{a|b}") are made: the same seeds make the same choices. Raises
    WorkflowError if choices are nested too deep."""
    values = [node.inputs.get(name) for node in graph.nodes.values() for name in SEED_NAMES]
    seeds = sorted(number for value in values for number in _numbers(graph, value))
    made: dict[str, dict[str, str]] = {}
    for (node_id, name), text in graph.prompts.items():
        made.setdefault(node_id, {})[name] = choose(text, Random(f"{seeds} {node_id} {name}").random)
    return graph.with_inputs(made)


def _numbers(graph: Graph, value: Any) -> list[int]:
    """Return an input's integer, or the integers in the node that it is linked to."""
    source = graph.nodes.get(value.node) if isinstance(value, Link) else None
    return [number for number in (source.inputs.values() if source else [value]) if type(number) is int]


def choose(text: str, random: Callable[[], float]) -> str:
    """Return a prompt without comments, with one option of each `{a|b}` and `\\{` as `{`: `processDynamicPrompt` of the
    page. An option loses one backslash before a brace for each choice around it.

    random: returns a number in [0, 1), once per choice. Raises WorkflowError if choices are nested too deep.
    """
    opened: list[list[list[str]]] = [[[]]]  # the text, then each open choice: its options so far, in parts

    def close() -> None:
        options = opened.pop()
        opened[-1][-1].append(_unescaped(options[int(random() * len(options))]))

    for token in _TOKEN.findall(_without_comments(text)):
        if token == "{":
            if len(opened) > MAX_NESTED:
                raise WorkflowError(f"A prompt has choices, such as {{a|b}}, nested more than {MAX_NESTED} deep.")
            opened.append([[]])
        elif token == "|" and len(opened) > 1:
            opened[-1].append([])
        elif token == "}" and len(opened) > 1:
            close()
        else:
            opened[-1][-1].append(token if token != "\\" else r"\undefined")  # the page reads past the end
    while len(opened) > 1:  # an unclosed choice ends with the text
        close()
    return _unescaped(opened[0][0])


def _unescaped(parts: Iterable[str]) -> str:
    return _ESCAPED.sub(r"\1", "".join(parts))


def _without_comments(text: str) -> str:
    """Remove `/* ... */`, over several lines, and `// ...` to the end of the line, wherever they occur: in URLs too."""
    kept: list[str] = []
    at = 0
    while comment := _COMMENT.search(text, at):
        kept.append(text[at : comment.start()])
        at = comment.end()
        if comment[0] == "/*":
            closed = text.find("*/", at)
            if closed < 0:  # no later one is closed either
                return "".join([*kept, "/*", _LINE_COMMENT.sub("", text[at:])])
            at = closed + 2
    return "".join([*kept, text[at:]])


def fill_in(text: str, value: Callable[[str, str], Any], now: datetime) -> str:
    """Fill in `%Node.widget%` and `%date:yyyy-MM-dd%` in a file name: `applyTextReplacements` of the page. Unknown
    patterns stay.

    value: returns a widget's value by the names of node and widget; raises KeyError if there is none. Raises
    WorkflowError if the patterns fill in too much.
    """
    room = MAX_REPLACED

    def filled(match: re.Match[str]) -> str:
        nonlocal room
        names = match[1].split(".")
        if len(names) == 2:
            try:
                made = _NO_FILE_NAME.sub("_", as_page_text(value(*names)))
            except KeyError:
                return match[0]
        elif names[0].startswith("date:"):
            made = _DATE_PART.sub(lambda part: _date_part(part[0], now), names[0].removeprefix("date:"))
        else:
            return match[0]
        room -= len(made)
        if room < 0:
            raise WorkflowError(f"A file name's %patterns% expand to more than {MAX_REPLACED:,} letters. Use fewer.")
        return made

    return _PATTERN.sub(filled, text)


def _date_part(part: str, now: datetime) -> str:
    if part[0] == "y":
        return {"yy": f"{now:%y}", "yyyy": f"{now:%Y}"}.get(part, part)
    numbers = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}
    return str(numbers[part[0]]).rjust(len(part), "0")


def as_page_text(value: Any) -> str:
    """Return a widget's value as JavaScript converts it to text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(map(as_page_text, value))
    return _number(value) if isinstance(value, (int, float)) else "[object Object]"


def _number(number: float) -> str:
    try:
        value = float(number)
    except OverflowError:
        return "Infinity"
    text = repr(value)
    if value == 0 or 1e-6 <= abs(value) < 1e21:
        return f"{Decimal(text) + 0:f}".removesuffix(".0")
    digits, _, power = text.partition("e")
    return f"{digits.removesuffix('.0')}e{int(power):+}"


def filling_in(
    unfolded: Unfolded, schemas: Mapping[str, Schema], widgets: Widgets, changed: Mapping[tuple[str, str], Any]
) -> Callable[[str], str]:
    """What fills in the file names of a workflow, as of one moment. It raises WorkflowError where one gets too long."""
    nodes, was_set, now = _by_name(unfolded, schemas), _as_set(unfolded, changed), datetime.now()

    @cache
    def value(name: str, widget: str) -> Any:
        """Return a widget's value, also of a muted node. Raises KeyError."""
        canvas, node = nodes[name]
        if (id(node), widget) in was_set:
            return was_set[id(node), widget]
        held = widgets.of(node)[widget]
        slot = next((slot for slot in node.inputs or () if slot.name == widget), None)
        link = canvas.links.get(slot.link) if slot and slot.link else None
        source = canvas.nodes.get(link.origin_id) if link else None
        return source.first_value if source and source.type == PRIMITIVE else held

    return lambda text: fill_in(text, value, now)


def _as_set(unfolded: Unfolded, changed: Mapping[tuple[str, str], Any]) -> dict[tuple[int, str], Any]:
    """Return changed widget values by node and widget. Values that differ between uses of a subgraph are left out."""
    uses = Counter(id(node) for level in unfolded.levels.values() for node in level.canvas.nodes.values())
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for (node_id, name), value in changed.items():
        for place, node, widget in _showing(unfolded, node_id, name):
            found.setdefault((id(node), widget), {})[place] = value
    alike = {key: [*values.values()] for key, values in found.items() if len(values) == uses[key[0]]}
    return {
        key: values[0]
        for key, values in alike.items()
        if not isinstance(values[0], Link) and values.count(values[0]) == len(values)
    }


def _showing(unfolded: Unfolded, node_id: str, name: str) -> Iterator[tuple[str, UiNode, str]]:
    """Yield (path, node, widget) of a node's widget, then of each subgraph node around it that shows this widget."""
    path, _, own = node_id.rpartition(":")
    level = unfolded.levels.get(f"{path}:" if path else "")
    node = level.canvas.nodes.get(own) if level else None
    while level and node:
        yield level.path, node, name
        slot = next((slot for slot in node.inputs or () if slot.name == name), None)
        link = level.canvas.links.get(slot.link) if slot and slot.link else None
        if not (level.host and link and link.origin_id == INPUTS and link.origin_slot < len(level.canvas.inputs)):
            return
        name = level.canvas.inputs[link.origin_slot].name
        level, node = level.host


def types_named(unfolded: Unfolded) -> set[str]:
    """Return the types of all nodes if a file name may refer to one, else an empty set."""
    nodes = [node for _, node in _in_order(unfolded)]
    stored = [node.widgets_values for node in nodes if node.type in SAVERS | {PRIMITIVE}]
    texts = [text for each in stored for text in (each.values() if isinstance(each, dict) else each or ())]
    is_named = any(isinstance(text, str) and "." in "".join(_PATTERN.findall(text)) for text in texts)
    return {node.type for node in nodes} - OF_THE_PAGE.keys() - unfolded.subgraphs.keys() if is_named else set()


def _by_name(unfolded: Unfolded, schemas: Mapping[str, Schema]) -> dict[str, tuple[Canvas, UiNode]]:
    """Return nodes by name, else by title; the first node of each."""
    names: dict[str, tuple[Canvas, UiNode]] = {}
    titles: dict[str, tuple[Canvas, UiNode]] = {}
    for canvas, node in _in_order(unfolded):
        unnamed = "" if node.type in SAVERS | OF_THE_PAGE.keys() else node.type
        name = unnamed if node.name == "" else node.name
        if isinstance(name, str) and name:
            names.setdefault(name, (canvas, node))
        inside = unfolded.subgraphs.get(node.type)
        new = inside.name if inside else schemas[node.type].title if node.type in schemas else ""
        titles.setdefault(node.title or new or node.type, (canvas, node))
    return titles | names


def _in_order(unfolded: Unfolded) -> Iterator[tuple[Canvas, UiNode]]:
    """Yield every node in the page's order: a subgraph's inner nodes before its node, and only at its first use."""
    canvas, entered = unfolded.levels[""].canvas, set[Canvas]()
    waiting = [(canvas, node) for node in canvas.nodes.values()][::-1]
    while waiting:
        canvas, node = waiting.pop()
        inside = unfolded.subgraphs.get(node.type)
        if inside is None or inside in entered:
            yield canvas, node
            continue
        entered.add(inside)
        waiting += [*((inside, each) for each in inside.nodes.values()), (canvas, node)][::-1]
