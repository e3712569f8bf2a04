"""What the page makes of texts as it sends them: choices and comments in prompts, patterns in file names.

Each function takes time in proportion to what it is given and what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from random import Random
from typing import Any

from ..errors import WorkflowError
from .graph import Graph, Link, Node
from .schema import SEED_NAMES

MAX_REPLACED = 100_000  # letters of a text with its patterns filled in
_LINE_END = re.compile(r"[\n\r\u2028\u2029]|\Z")
_PATTERN = re.compile(r"%([^%]+)%")
_DATE_PARTS = re.compile(r"dd?|MM?|hh?|mm?|ss?|yyy?y?")
_NO_FILE_NAME = re.compile(r'[/?<>\\:*|"\x00-\x1f\x7f]')


def chosen(graph: Graph) -> Graph:
    """A copy in which the choices of its prompts are made anew: the same seeds make the same choices."""
    seeds = [number for node in graph.nodes.values() for name in SEED_NAMES for number in _numbers(graph, node, name)]
    made: dict[str, dict[str, str]] = {}
    for (node_id, name), text in graph.prompts.items():
        random = Random(f"{sorted(seeds)} {node_id} {name}").random
        made.setdefault(node_id, {})[name] = choose(text, random)
    return graph.with_inputs(made)


def _numbers(graph: Graph, node: Node, name: str) -> list[int]:
    """What is in an input, or in the node that it is linked to."""
    value = node.inputs.get(name)
    source = graph.nodes.get(value.node) if isinstance(value, Link) else None
    values = source.inputs.values() if source else [value]
    return [number for number in values if type(number) is int]


def choose(text: str, random: Callable[[], float]) -> str:
    """A prompt without its comments, of each `{a|b}` one option, and `\\{` as `{`: `processDynamicPrompt` of the page.

    random: asked for a number from 0 to below 1 at each choice.
    """
    text = _without_comments(text)
    if (len(text) - len(text.rstrip("\\"))) % 2:
        text += "undefined"  # what the page reads after its end
    blocks = _blocks(text)
    made: list[str] = []
    around: list[tuple[int, int]] = []  # of the blocks that this stands in: where the text ends, where it goes on
    starts = [0]  # of each option that this stands in, in `made`
    at, end = 0, len(text)
    while at < end or around:
        if at >= end:
            (end, at), _ = around.pop(), starts.pop()
        elif text[at] == "\\":
            made.append("\\")
            _add(made, text[at + 1], starts)
            at += 2
        elif text[at] == "{":
            options = blocks[at]
            option = int(random() * (len(options) - 1))
            around.append((end, options[-1]))
            starts.append(len(made))
            at, end = options[option], options[option + 1] - 1
        else:
            _add(made, text[at], starts)
            at += 1
    return "".join(made)


def _blocks(text: str) -> dict[int, list[int]]:
    """By the place of each opening brace: where its options begin, and where the text goes on after it."""
    blocks: dict[int, list[int]] = {}
    opened: list[list[int]] = []
    at = 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "{":
            opened.append(blocks.setdefault(at, [at + 1]))
        elif text[at] in "|}" and opened:
            (opened.pop() if text[at] == "}" else opened[-1]).append(at + 1)
        at += 1
    for block in opened:  # to the end of the text
        block.append(len(text) + 1)
    return blocks


def _add(made: list[str], letter: str, starts: list[int]) -> None:
    """Every option, and the whole, loses one backslash before a brace, the innermost first."""
    here = len(made)
    if letter in "{}|":
        before = here
        while before and made[before - 1] == "\\":
            before -= 1
        lost = 0
        for start in reversed(starts):
            if lost == here - before:
                break
            lost += here - max(before, start) > lost
        made[here - lost : here] = [""] * lost
    made.append(letter)


def _without_comments(text: str) -> str:
    """Without `/* ... */`, over lines, and `// ...` to the end of the line, wherever they stand: in addresses too."""
    parts: list[str] = []
    at, closes = 0, True
    while (slash := text.find("/", at)) >= 0:
        mark = text[slash : slash + 2]
        after = slash + 1
        if mark == "//":
            after = _line_end(text, slash)
        elif mark == "/*" and closes:
            end = text.find("*/", slash + 2)
            closes = end >= 0
            after = end + 2 if closes else after
        comment = after > slash + 1
        parts.append(text[at : slash if comment else after])
        at = after
    return "".join(parts) + text[at:]


def _line_end(text: str, at: int) -> int:
    found = _LINE_END.search(text, at)
    return found.start() if found else len(text)


def fill_in(text: str, value: Callable[[str, str], Any], now: datetime) -> str:
    """A file name with `%Node.widget%` and `%date:yyyy-MM-dd%` filled in: `applyTextReplacements` of the page. What it
    does not know stays.

    value: of a node's widget, by their names; raises KeyError where there is none.

    Raises:
        WorkflowError: it gets too long.
    """
    room = MAX_REPLACED

    def filled(match: re.Match[str]) -> str:
        nonlocal room
        names = match[1].split(".", 2)
        if len(names) == 2:
            try:
                made = _NO_FILE_NAME.sub("_", as_page_text(value(names[0], names[1])))
            except KeyError:
                return match[0]
        elif names[0].startswith("date:"):
            made = _DATE_PARTS.sub(lambda part: _date_part(part[0], now), names[0][len("date:") :])
        else:
            return match[0]
        room -= len(made)
        if room < 0:
            raise WorkflowError(f"A file name's %patterns% fill in more than {MAX_REPLACED:,} letters. Use fewer.")
        return made

    return _PATTERN.sub(filled, text)


def named_in(text: str) -> list[str]:
    """The nodes that a file name's patterns name."""
    found = (names.split(".", 2) for names in _PATTERN.findall(text))
    return [names[0] for names in found if len(names) == 2]


def _date_part(part: str, now: datetime) -> str:
    year = str(now.year)
    if part[0] == "y":
        return {"yy": year[2:], "yyyy": year}.get(part, part)
    numbers = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}
    return str(numbers[part[0]]).rjust(len(part), "0")


def as_page_text(value: Any) -> str:
    """A widget's value as JavaScript writes it."""
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
    return f"{digits}e{int(power):+}".replace(".0e", "e")
