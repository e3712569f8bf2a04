"""Break the tables and decisions in one place at a time, and report the changes that no test detects.

    python scripts/mutants.py
    python scripts/mutants.py precision pipelines comfyui_host --draw 20 --tier test slow

A mutant is a source file with one change: a comparison reversed, `and` for `or`, a condition negated, True for False, a
number raised by one, a table's word replaced. The tests run on each mutant in a separate process. If no test fails, the
place is printed, and the exit code is 1: the line needs a test, or the change has no effect. With --draw, mutants are
drawn at random from all lines of the sources. With --tier, the tests of make targets run on each one until one fails.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("precision/policy.py", "precision/arch.py", "precision/accumulation.py")
TESTS = (
    *(f"tests/precision/test_{name}.py" for name in ("policy", "arch", "accumulation", "fp16_accumulation")),
    "tests/pipelines/test_selftest_kept.py",
    "tests/pipelines/diagnosis",
)
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "output", "__pycache__", ".*_cache", "*.egg-info")
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
}  # fmt: skip
TIERS = ("check", "test", "slow")
LONGEST_WORD = 12  # characters: longer texts are reasons and sources, for people


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the possible replacements of a node."""
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
    """Replaces the nth node by the change."""

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
    """Return the ids of nodes that no run can notice: types, class decorators, and texts for people."""
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


def mutants(source: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each mutant: its place and change, and a function that returns the whole changed source."""
    tree = ast.parse(source)
    silent = _silent(tree)

    def changed(nth: int, change: ast.AST) -> str:
        return ast.unparse(ast.fix_missing_locations(_Put(nth, change).visit(copy.deepcopy(tree))))

    for nth, node in enumerate(_in_order(tree)):
        if id(node) not in silent:
            for change in changes(node):
                place = f"{ast.unparse(node).splitlines()[0]} → {ast.unparse(change).splitlines()[0]}"
                yield f"line {getattr(node, 'lineno', 0)}: {place}", partial(changed, nth, change)


def survives(tests: list[str]) -> bool:
    """Return whether the tests pass, in a forked child that inherits this process's imports."""
    child = os.fork()
    if child == 0:
        import pytest

        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            os._exit(int(pytest.main([*tests, "-x", "-q", "-p", "no:cacheprovider", "--durations=0"])))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def noticed_by(tier: str, module: str) -> bool:
    """Return whether a make target's tests fail, in new processes. Tests that name the module, if any, run first."""
    files = Path("tests").rglob("test_*.py") if module else ()
    naming = [str(file) for file in files if module in file.read_text(encoding="utf-8")]
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd().parent)}  # takes precedence over the installed package
    for files in ([naming] if naming else []) + [[]]:
        command = [sys.executable, "-m", "pytest", "-n", "2", "-x", "-q", "--tier", tier, *files]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 5):  # 5: the target runs none of these files
            print(*(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))), flush=True)
            return True
    return False


def python_files(names: Iterable[str]) -> Iterator[str]:
    for name in map(Path, names):
        yield from (str(file) for file in sorted(name.rglob("*.py"))) if name.is_dir() else [str(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sources", nargs="*", default=SOURCES, help=f"to break (default: {' '.join(SOURCES)})")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="the tests that must fail on a mutant")
    parser.add_argument(
        "--tier", nargs="*", default=[], choices=TIERS, help="instead of --tests: the tests of these make targets"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="N mutants at random instead of all")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="run only the Kth of N parts of --draw")
    parser.add_argument("--green", action="store_true", help="skip the test run on the unchanged source")
    parser.add_argument("--seed", type=int, default=0, help="seed of --draw")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "comfyui_onediff_guard"
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        for environment in ROOT.glob(".venv*"):
            (tree / environment.name).symlink_to(environment)
        sys.path.insert(0, folder)  # before the installed package, which is this file's tree
        os.chdir(tree)
        import hypothesis  # noqa: F401 - once, for all children
        import torch  # noqa: F401

        def noticed(module: str) -> str:
            """Return the tests that noticed it; "" if none did."""
            if options.tier:
                return next((tier for tier in options.tier if noticed_by(tier, module)), "")
            return "" if survives(list(options.tests)) else "tests"

        if not options.green and noticed(""):
            print("The tests fail on the source as it is: nothing to compare with.")
            return 2
        sources = {name: Path(name).read_text(encoding="utf-8") for name in python_files(options.sources)}
        tried = [(name, place, mutant) for name, text in sources.items() for place, mutant in mutants(text)]
        if options.draw:
            part, parts = map(int, options.part.split("/"))
            tried = random.Random(options.seed).sample(tried, options.draw)[part - 1 :: parts]
        by = Counter[str]()
        for name, place, mutant in tried:
            Path(name).write_text(mutant(), encoding="utf-8")
            found = noticed(name.removesuffix(".py").replace("/", "."))
            by[found] += 1
            if options.tier or not found:
                print(f"{f'noticed by {found}' if found else 'let through'}: {name} {place}", flush=True)
            Path(name).write_text(sources[name], encoding="utf-8")
    noticing = ", ".join(f"{count} by {found}" for found, count in by.items() if found)
    print(f"{len(tried) - by['']} of {len(tried)} mutants noticed: {noticing}")
    return 1 if by[""] else 0


if __name__ == "__main__":
    raise SystemExit(main())
