"""Break the tables and decisions on purpose, one place at a time, and see whether the tests notice.

    python tools/mutants.py

A mutant is a source file with one place changed: a comparison turned round, `and` for `or`, a condition negated, True
for False, a number raised by one, a table's word replaced. The tests run on each in a process of its own. What they
let through is printed with its place, and the exit code is 1: each such line asks for a test, or says nothing that
anybody could notice.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("precision/policy.py", "precision/arch.py", "precision/accumulation.py")
TESTS = ("tests/precision/test_policy.py", "tests/precision/test_arch.py", "tests/precision/test_accumulation.py")
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", "*.egg-info")
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
LONGEST_WORD = 12  # characters: longer texts are reasons and sources, for people


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare():
            changed.ops[0] = OPPOSITE[type(changed.ops[0])]()
            yield changed
        case ast.BoolOp():
            changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.IfExp():
            changed.body, changed.orelse = changed.orelse, changed.body
            yield changed
        case ast.If():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield changed
        case ast.Constant(value=bool()):
            yield ast.Constant(not changed.value)
        case ast.Constant(value=int()):
            yield ast.Constant(changed.value + 1)  # pyright: ignore[reportOperatorIssue]
        case ast.Constant(value=str(word)) if 0 < len(word) <= LONGEST_WORD and word.isidentifier():
            yield ast.Constant(f"{word}_")


class _Put(ast.NodeTransformer):
    """Puts the change in place of the nth node."""

    def __init__(self, nth: int, change: ast.AST):
        self._left, self._change = nth, change

    def visit(self, node: ast.AST) -> ast.AST:
        self._left -= 1
        return self._change if self._left == -1 else super().generic_visit(node)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _silent(tree: ast.AST) -> set[int]:
    """ids of the nodes that no run can notice: types and decorators of classes, and texts for people."""
    roots: list[ast.AST] = []
    for node in ast.walk(tree):
        roots += filter(None, [getattr(node, "annotation", None), getattr(node, "returns", None)])
        if isinstance(node, ast.ClassDef):
            roots += node.decorator_list
        if isinstance(node, (ast.JoinedStr, ast.Raise)):
            roots.append(node)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
            roots.append(node)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            roots.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            roots.append(node)
    return {id(node) for root in roots for node in ast.walk(root)}


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """(where and what, the whole changed source) of each."""
    tree = ast.parse(source)
    silent = _silent(tree)
    for nth, node in enumerate(_in_order(tree)):
        if id(node) in silent:
            continue
        for change in changes(node):
            mutant = ast.unparse(ast.fix_missing_locations(_Put(nth, change).visit(copy.deepcopy(tree))))
            first_line = ast.unparse(change).splitlines()[0]
            yield f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node).splitlines()[0]} → {first_line}", mutant


def survives(tests: list[str]) -> bool:
    """Whether the tests pass, in a child of this process that has imported what they import."""
    child = os.fork()
    if child == 0:
        import pytest

        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "--durations=0"])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="*", default=SOURCES, help=f"files to break (default: {' '.join(SOURCES)})")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="that must notice")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "comfyui_onediff_guard"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        sys.path.insert(0, folder)  # before the installed package, which is the tree that this file stands in
        os.chdir(tree)
        import hypothesis  # noqa: F401 - once, for all children
        import torch  # noqa: F401

        if not survives(list(options.tests)):
            print("The tests fail on the source as it is: nothing to compare with.")
            return 2
        tried, let_through = 0, []
        for name in options.sources:
            source = (tree / name).read_text(encoding="utf-8")
            for place, mutant in mutants(source):
                (tree / name).write_text(mutant, encoding="utf-8")
                tried += 1
                if survives(list(options.tests)):
                    let_through.append(f"{name} {place}")
                    print(let_through[-1], flush=True)
            (tree / name).write_text(source, encoding="utf-8")
    print(f"{tried - len(let_through)} of {tried} mutants noticed")
    return 1 if let_through else 0


if __name__ == "__main__":
    raise SystemExit(main())
