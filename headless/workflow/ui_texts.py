"""What the page makes of texts as it sends them: choices and comments in prompts, dates in file names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import datetime
from random import Random
from typing import Any

from ...trust.text import shown
from ..errors import WorkflowError
from .graph import Graph, Link
from .schema import SEED_NAMES

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
MAX_NESTED = 100  # choices in choices
_TOKEN = re.compile(r"\\.|[^\\{|}]+|.", re.DOTALL)
_LINE_COMMENT = re.compile(r"//[^\n\r\u2028\u2029]*")
_COMMENT = re.compile(rf"{_LINE_COMMENT.pattern}|/\*")  # the whole of it, or where it begins
_ESCAPED = re.compile(r"\\([{|}])")
_PATTERN = re.compile(r"%([^%]+)%")
_DATE_PART = re.compile(r"dd?|MM?|hh?|mm?|ss?|yyy?y?")


def chosen(graph: Graph) -> Graph:
    """A copy in which the choices of its prompts are made anew: the same seeds make the same choices. Raises
    WorkflowError where choices are nested too deep."""
    values = [node.inputs.get(name) for node in graph.nodes.values() for name in SEED_NAMES]
    seeds = sorted(number for value in values for number in _numbers(graph, value))
    made: dict[str, dict[str, str]] = {}
    for (node_id, name), text in graph.prompts.items():
        made.setdefault(node_id, {})[name] = choose(text, Random(f"{seeds} {node_id} {name}").random)
    return graph.with_inputs(made)


def _numbers(graph: Graph, value: Any) -> list[int]:
    """What is in an input, or in the node that it is linked to."""
    source = graph.nodes.get(value.node) if isinstance(value, Link) else None
    return [number for number in (source.inputs.values() if source else [value]) if type(number) is int]


def choose(text: str, random: Callable[[], float]) -> str:
    """A prompt without its comments, of each `{a|b}` one option, and `\\{` as `{`: `processDynamicPrompt` of the page.
    An option loses one backslash before a brace for each choice that it stands in.

    random: asked for a number from 0 to below 1 at each choice. Raises WorkflowError where choices are nested too deep.
    """
    opened: list[list[list[str]]] = [[[]]]  # the text, then each open choice: its options so far, in parts

    def close() -> None:
        options = opened.pop()
        opened[-1][-1].append(_unescaped(options[int(random() * len(options))]))

    for token in _TOKEN.findall(_without_comments(text)):
        if token == "{":
            if len(opened) > MAX_NESTED:
                raise WorkflowError(f"A prompt has choices, as {{a|b}}, that are nested more than {MAX_NESTED} deep.")
            opened.append([[]])
        elif token == "|" and len(opened) > 1:
            opened[-1].append([])
        elif token == "}" and len(opened) > 1:
            close()
        else:
            opened[-1][-1].append(token if token != "\\" else r"\undefined")  # which the page reads after the end
    while len(opened) > 1:  # to the end of the text
        close()
    return _unescaped(opened[0][0])


def _unescaped(parts: Iterable[str]) -> str:
    return _ESCAPED.sub(r"\1", "".join(parts))


def _without_comments(text: str) -> str:
    """Without `/* ... */`, over lines, and `// ...` to the end of the line, wherever they stand: in addresses too."""
    kept: list[str] = []
    at = 0
    while comment := _COMMENT.search(text, at):
        kept.append(text[at : comment.start()])
        at = comment.end()
        if comment[0] == "/*":
            closed = text.find("*/", at)
            if closed < 0:  # nor is any that follows
                return "".join([*kept, "/*", _LINE_COMMENT.sub("", text[at:])])
            at = closed + 2
    return "".join([*kept, text[at:]])


def fill_in(text: str, now: datetime) -> str:
    """A file name with `%date:yyyy-MM-dd%` filled in: `applyTextReplacements` of the page. What it does not know stays.
    Raises WorkflowError where the name has `%Node.widget%`, which the page looks up in all that it shows."""

    def filled(match: re.Match[str]) -> str:
        names = match[1].split(".")
        if len(names) == 2:
            raise WorkflowError(f"A file name has {shown(match[0])}, which the browser alone fills in.")
        if not names[0].startswith("date:"):
            return match[0]
        return _DATE_PART.sub(lambda part: _date_part(part[0], now), names[0].removeprefix("date:"))

    return _PATTERN.sub(filled, text)


def _date_part(part: str, now: datetime) -> str:
    if part[0] == "y":
        return {"yy": f"{now:%y}", "yyyy": f"{now:%Y}"}.get(part, part)
    numbers = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}
    return str(numbers[part[0]]).rjust(len(part), "0")
