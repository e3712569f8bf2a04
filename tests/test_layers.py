"""Layers import only from lower layers, and importing the pack loads nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "comfyui_onediff_guard"
COMFYUI = {
    *("app", "comfy", "comfy_aimdo", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution"),
    *("folder_paths", "latent_preview", "nodes", "server"),
}
COMPILERS = {"onediff", "onediffx", "oneflow", "nexfort"}
LOWER_LAYERS = {  # layer → our layers that it may import from
    "": {"demo", "headless", "nodes"},
    "demo": {"headless", "comfyui_host"},
    "headless": {"nodes", "comfyui_host", "pipelines", "precision", "trust"},
    "nodes": {"comfyui_host", "pipelines", "precision", "trust"},
    "comfyui_host": {"pipelines", "precision", "trust"},
    "pipelines": {"precision", "trust"},
    "precision": {"trust"},
    "trust": set(),
}
# ray is an optional extra for `batch`. demo/ builds models from library classes; headless/ hides their progress bars
LIBRARIES_FOR = {
    "diffusers": {"demo", "headless", "pipelines"},
    "ray": {"headless"},
    "torchao": {"precision"},
    "transformers": {"demo", "headless", "pipelines"},
}
UNKNOWN = "?"  # stands for a module name that is known only at run time


@dataclass(frozen=True)
class Import:
    file: str  # path from the root, with /
    line: int
    module: str  # 'torch.nn', or for our own '.pipelines.load'
    for_types: bool = False  # under TYPE_CHECKING: never runs
    looked_up: bool = False  # read from sys.modules, which loads nothing

    @property
    def top(self) -> str:
        return self.module.lstrip(".").split(".")[0]

    @property
    def ours(self) -> bool:
        return self.module.startswith(".")

    @property
    def layer(self) -> str:
        return self.file.split("/")[0] if "/" in self.file else ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def package_files() -> list[str]:
    """Every Python file of the package, as a path from the root."""
    files = [ROOT / "__init__.py", ROOT / "__main__.py"]
    for layer in filter(None, LOWER_LAYERS):
        files += (ROOT / layer).rglob("*.py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def file_of(parts: Sequence[str]) -> str:
    """The file of one of our modules or packages, "" if there is none."""
    path = "/".join(parts)
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), "")


def imports_of(file: str, source: str) -> Iterator[Import]:
    """All imports of a file, by statement, importlib and sys.modules. A relative one is resolved to
    '.<path from the package's root>'. A module whose name is not a literal is UNKNOWN."""
    folder = file.split("/")[:-1]
    tree = ast.parse(source)
    under_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {inner for node in under_types for statement in node.body for inner in ast.walk(statement)}
    used: set[ast.AST] = set()

    def parents(level: int) -> list[str]:
        assert len(folder) >= level - 1, f"{file} imports from outside the package"
        return folder[: len(folder) - (level - 1)]

    def modules_in(node: ast.AST) -> Iterator[tuple[str, bool]]:
        """(module, whether it is only looked up)"""
        match node:
            case ast.Import(names=names):
                yield from ((name.name, False) for name in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                hidden = module == "sys" and "modules" in [name.name for name in names]
                yield UNKNOWN if hidden else module, False
            case ast.ImportFrom(level=level, module=module, names=names):
                parts = [*parents(level), *(module.split(".") if module else [])]
                for name in names:  # `from . import x` names a module, `from .x import y` most often not
                    whole = not module or file_of([*parts, name.name])
                    yield "." + ".".join([*parts, name.name] if whole else parts), False
            case ast.Call(func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module")):
                name = literal_name(node.args[0])
                level = len(name) - len(name.lstrip("."))
                yield ".".join(["", *parents(level), name[level:]]) if level else name, False
            case (
                ast.Subscript(value=ast.Attribute(attr="modules") as modules, slice=key)
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="modules") as modules, attr="get"), args=[key, *_]
                )
                | ast.Compare(left=key, comparators=[ast.Attribute(attr="modules") as modules])
            ) if ast.unparse(modules) == "sys.modules":
                used.add(modules)
                yield literal_name(key), True
            case ast.Attribute(attr="modules") if ast.unparse(node) == "sys.modules" and node not in used:
                yield UNKNOWN, True

    for node in ast.walk(tree):  # parents before children
        for module, looked_up in modules_in(node):
            yield Import(file, getattr(node, "lineno", 0), module, node in for_types, looked_up)


def literal_name(name: ast.expr) -> str:
    """A module's name, as far as it is a literal."""
    match name:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return f"{text}{UNKNOWN}"
    return UNKNOWN


IMPORTS = [found for file in package_files() for found in imports_of(file, (ROOT / file).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("layer", LOWER_LAYERS)
def test_layer_imports_only_from_lower_layers(layer: str) -> None:
    allowed = LOWER_LAYERS[layer] | {layer}
    wrong = [str(f) for f in IMPORTS if f.layer == layer and f.ours and f.module != "." and f.top not in allowed]
    assert not wrong, f"{layer or '__init__.py'} may import from {sorted(allowed)}"


RULES: dict[str, Callable[[Import], bool]] = {
    "imports of the package are relative: ComfyUI renames it, and an absolute one would load it twice": lambda f: (
        f.top == PACKAGE
    ),
    # headless/hosts/checkout.py starts ComfyUI as another process, and core_nodes.py replaces six of its nodes
    "only comfyui_host imports ComfyUI": lambda f: f.top in COMFYUI and f.layer != "comfyui_host",
    "ComfyUI is read from sys.modules, not imported: an installed ComfyUI may not be running": lambda f: (
        f.top in COMFYUI and not f.looked_up
    ),
    # comfyui_host reads names of ComfyUI's modules from tables
    "only comfyui_host imports by computed names": lambda f: f.top == UNKNOWN and f.layer != "comfyui_host",
    "only backends.py imports compilers": lambda f: f.top in COMPILERS and f.file != "pipelines/compile/backends.py",
    "libraries are imported only by their layers": lambda f: f.layer not in LIBRARIES_FOR.get(f.top, {f.layer}),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_import_breaks_rule(rule: str) -> None:
    assert not [str(found) for found in IMPORTS if not found.ours and RULES[rule](found)], rule


def test_imports_have_no_cycle() -> None:
    """Imports in functions count; imports under TYPE_CHECKING do not."""
    after: dict[str, set[str]] = {}
    for found in IMPORTS:
        target = file_of(found.module[1:].split(".")) if found.ours and not found.for_types else ""
        after.setdefault(found.file, set()).update({target} - {""})
    TopologicalSorter(after).prepare()  # raises an error that names the circle


def test_package_does_not_extend_sys_path() -> None:
    """ComfyUI has modules named `nodes` and `server`, which ours would conflict with if the root were on sys.path."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in package_files()}
    wrong = [file for file, text in sources.items() if "sys.path.append" in text or "sys.path.insert" in text]
    assert not wrong


RUN_LIMITS = {"first": (35, 16), "later": (30, 16)}  # a sampling run: its files of ours, frames on its deepest stack
MAX_GUARD_MODULES = 42  # modules of ours that NaN Guard (MODEL) loads


def test_run_depth_and_guard_modules_stay_within_limits() -> None:
    command = [sys.executable, "scripts/run_depth.py"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for run, limits in RUN_LIMITS.items():
        (counts,) = re.findall(rf"A {run} run: (\d+) files, (\d+) frames", output)
        assert all(int(count) <= limit for count, limit in zip(counts, limits, strict=True)), output
    (loaded,) = re.findall(r"loads (\d+) modules", output)
    assert int(loaded) <= MAX_GUARD_MODULES


IMPORT = """
import json, sys
sys.dont_write_bytecode = True  # else bytecode of a changed source is written and renamed
before, events = set(sys.modules), []
sys.addaudithook(lambda name, values: events.append((name, str(values[0]) if values else "")))
import comfyui_onediff_guard
comfyui_onediff_guard.NODE_CLASS_MAPPINGS, comfyui_onediff_guard.NODE_DISPLAY_NAME_MAPPINGS
modules, told = sorted(set(sys.modules) - before), list(events)
import comfyui_onediff_guard.__main__
print(json.dumps([modules, sorted(set(sys.modules) - before), told]))
"""
IMPORTED_MODULES = 40  # of ours, at most; more would make the start slow on a slow disk
IMPORT_EVENTS = {"import", "open", "compile", "exec", "os.listdir", "os.scandir", "marshal.loads"}


def test_import_loads_only_pack_modules_and_has_no_side_effects(fresh_python: Callable[..., str]) -> None:
    """The import is quick on any machine: it waits for no library, model folder, process or network."""
    modules, with_command, events = json.loads(fresh_python(IMPORT))
    assert {name.split(".")[0] for name in with_command} - sys.stdlib_module_names == {PACKAGE}
    assert len([name for name in modules if name.startswith(PACKAGE)]) <= IMPORTED_MODULES
    assert all(value.endswith((".py", ".pyc")) for name, value in events if name == "open")
    others = {name for name, _ in events} - IMPORT_EVENTS
    assert not {name for name in others if name.startswith(("os.", "shutil.", "socket.", "subprocess.", "urllib."))}
