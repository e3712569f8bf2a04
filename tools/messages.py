"""The templates of what the program says to people, read off the source: `python tools/messages.py` writes those that a
language lacks into its `locales/<language>/messages.json`, to be filled in, and takes out those that are gone.

An f-string's template has {0}, {1} where something is filled in. Of an error it is the first sentence.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from comfyui_onediff_guard.comfyui_host.language import JOINTS
from comfyui_onediff_guard.precision.policy import Component

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = ("ru", "zh")
PACKAGES = ("nodes", "comfyui_host", "pipelines", "precision")
# functions whose strings are lines that nodes show, or parts of them; "": those of the module itself
TOLD = {
    "comfyui_host/plans.py": ("_dtype", "_automatic"),
    "comfyui_host/refining.py": ("extra_conds",),
    "comfyui_host/runs.py": ("call", "end"),
    "nodes/hub.py": ("fetch", "_amount"),
    "nodes/native.py": ("step_done",),
    "nodes/probe.py": ("step_done",),
    "nodes/sample.py": ("step_done",),
    "pipelines/compile/block.py": ("_limit", "_first_call", "_give_up"),
    "pipelines/compile/cache.py": ("_own_turn",),
    "pipelines/compile/warm_up.py": ("on_step", "__str__"),
    "pipelines/families/svd.py": ("_variant",),
    "pipelines/models/folder.py": ("unknown_fields", "_unlike", "_mixed"),
    "pipelines/models/hub_transfer.py": ("__init__", "alone", "_download"),
    "pipelines/models/lora.py": ("_notes",),
    "pipelines/models/single_file.py": ("_notes",),
    "pipelines/pace.py": ("in_words",),
    "pipelines/reading.py": ("reading",),
    "pipelines/run/calls.py": ("_tell",),
    "pipelines/run/encode.py": ("_cut_off", "_unknown"),
    "pipelines/run/handle.py": ("idle_guard",),
    "pipelines/run/lessons.py": ("known",),
    "pipelines/run/profiles.py": ("misfit", "in_words"),
    "pipelines/run/stage.py": ("_layout",),
    "pipelines/weights/ladder.py": ("in_words", "foresee", "_next"),
    "precision/consistency.py": ("_put_back", "_soften_norms", "_name_strangers"),
    "precision/drift.py": ("in_short", "warning"),
    "precision/findings.py": ("find", "found_in_half", "taught", "_beside"),
    "precision/guard.py": ("", "__call__", "_call"),
    "precision/learned.py": ("", "in_words", "parts_in_words"),
    "precision/narrowing.py": ("_bring_back", "_count_small"),
    "precision/policy.py": ("said", "_automatic", "_asked", "_in_fp16", "as_stored"),
    "precision/report.py": ("compiled", "finding", "summary"),
    "precision/sums.py": ("__str__", "_named"),
}
LABELS = {
    "comfyui_host/labelled.py": ("prompt_of", "latents_of")
}  # functions whose strings begin errors raised elsewhere
OUTCOMES = ("non-finite", "saturated")  # of a step that failed
_WORD = re.compile(r"[A-Za-z]{3,}")


def error_names(trees: dict[str, ast.Module]) -> set[str]:
    classes = (node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return {
        each.name
        for each in classes
        if not each.name.startswith("_") and any(ast.unparse(base).endswith("Error") for base in each.bases)
    }


@dataclass
class _Module:
    tree: ast.Module
    functions: dict[str, list[ast.FunctionDef]] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.constants = _assigned(self.tree.body)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault(node.name, []).append(node)


def _assigned(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """What names stand for that are given one text, once."""
    found: dict[str, list[ast.expr]] = {}
    for node in (inner for statement in body for inner in ast.walk(statement)):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).extend([node.value] * 2)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and _is_text(values[0])}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def template(node: ast.AST, known: dict[str, ast.expr]) -> str:
    """known: texts that names stand for."""

    def pieces(node: ast.AST) -> Iterator[str | None]:
        if isinstance(node, ast.Constant):
            yield str(node.value)
        elif isinstance(node, ast.JoinedStr):
            for value in node.values:
                yield from pieces(value)
        elif isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id in known:
            yield from pieces(known[node.value.id])
        else:
            yield None

    return _numbered(re.sub(r"(\{0\})+", "{0}", "".join("{0}" if piece is None else piece for piece in pieces(node))))


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.?])\s", text, maxsplit=1)[0]


def _strings(node: ast.AST) -> Iterator[ast.AST]:
    """The texts in a function, whole: not what is filled into them, nor docstrings, errors and the log."""
    logged = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger.")
    if logged or isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        return
    if _is_text(node):
        yield node
        return
    for child in ast.iter_child_nodes(node):
        yield from _strings(child)


def _said_in_errors(module: _Module, errors: set[str]) -> Iterator[str]:
    def texts(node: ast.AST, function: ast.FunctionDef, known: dict[str, ast.expr]) -> Iterator[str]:
        if _is_text(node):
            yield template(node, known)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from texts(value, function, known)
        elif isinstance(node, ast.Name):
            for inner in ast.walk(function):
                if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) == node.id and _is_text(inner.value):
                    yield template(inner.value, known)
        elif isinstance(node, ast.Call) and (name := ast.unparse(node.func).split(".")[-1]) in module.functions:
            for called in module.functions[name]:
                for inner in ast.walk(called):
                    if isinstance(inner, ast.Return) and inner.value is not None and _is_text(inner.value):
                        yield template(inner.value, module.constants | _assigned(called.body))

    for functions in module.functions.values():
        for function in functions:
            known = module.constants | _assigned(function.body)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in errors | {"cls"}:
                    yield from map(first_sentence, texts(node.args[0], function, known))


def _told(module: _Module, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        for function in module.functions.get(name, []) if name else [module.tree]:
            known = module.constants | _assigned(function.body)
            for statement in function.body:
                if name or isinstance(statement, ast.Assign):
                    yield from (template(node, known) for node in _strings(statement))


def _part(text: str) -> str:
    """What stands between joints that are filled in on both sides."""
    text = re.sub(r"^(\{\d+\})?[,;:] ", "", text.rstrip("."))
    return _numbered(re.sub(r"[,;:]( \{\d+\})?$", "", text).strip())


def _numbered(text: str) -> str:
    numbers = count()
    return re.sub(r"\{\d+\}", lambda _: f"{{{next(numbers)}}}", text)


def _counted(tree: ast.Module) -> Iterator[str]:
    """What `counted` (precision/report.py) and `Calls` (pipelines/run/calls.py) make of their words, and answers of
    VALIDATE_INPUTS."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            if name == "Calls" and _is_text(call.args[0]):
                yield _numbered(f"{template(call.args[0], {})} {{0}} of {{0}}")
            elif name == "with_first_sentence_translated" and _is_text(call.args[0]):
                yield first_sentence(template(call.args[0], {}))
            elif name == "counted" and len(call.args) == 2:
                nouns = [call.args[1], *_nouns(function, call.args[1])]
                for noun in (each.value for each in nouns if isinstance(each, ast.Constant)):
                    yield from (f"1 {noun}", f"{{0}} {noun}s")


def _nouns(function: ast.FunctionDef, name: ast.expr) -> Iterator[ast.AST]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(name):
            yield from ast.iter_child_nodes(node.value)


def templates() -> set[str]:
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in paths}
    errors, found = error_names(trees), {*JOINTS, ".", *OUTCOMES, *(component.words for component in Component)}
    for name, tree in trees.items():
        module = _Module(tree)
        said = [*_said_in_errors(module, errors), *map(first_sentence, _told(module, LABELS.get(name, ())))]
        said += [*map(_part, _told(module, TOLD.get(name, ()))), *_counted(tree)]
        found |= {text for text in said if _WORD.search(re.sub(r"\{\d+\}", "", text)) and " " in text}
    return found


def catalogue(language: str) -> dict[str, str]:
    file = ROOT / "locales" / language / "messages.json"
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


def main() -> None:
    for language in LANGUAGES:
        known = catalogue(language)
        kept = {text: known.get(text, "") for text in sorted(templates())}
        written = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
        (ROOT / "locales" / language / "messages.json").write_text(written, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
