"""The design's layers hold: each imports only from those below it, and importing the pack loads nothing heavy."""

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
BELOW = {  # layer → those of ours that it may import from
    "": {"demo", "headless", "nodes"},
    "demo": {"headless", "comfyui_host"},
    "headless": {"nodes", "comfyui_host", "pipelines", "precision", "trust"},
    "nodes": {"comfyui_host", "pipelines", "precision", "trust"},
    "comfyui_host": {"pipelines", "precision", "trust"},
    "pipelines": {"precision", "trust"},
    "precision": {"trust"},
    "trust": set(),
}
# ray is an extra, of `batch`. demo/ builds a model's folder from their own classes; headless/ has them show no bars
LIBRARIES_FOR = {
    "diffusers": {"demo", "headless", "pipelines"},
    "ray": {"headless"},
    "torchao": {"precision"},
    "transformers": {"demo", "headless", "pipelines"},
}
UNKNOWN = "?"  # in place of a name that only shows when it runs


@dataclass(frozen=True)
class Import:
    file: str  # path from the root, with /
    line: int
    module: str  # 'torch.nn', or of ours '.pipelines.load'
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
    for layer in filter(None, BELOW):
        files += (ROOT / layer).rglob("*.py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def file_of(parts: Sequence[str]) -> str:
    """The file of one of our modules or packages, "" where it is none."""
    path = "/".join(parts)
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), "")


def imports_of(file: str, source: str) -> Iterator[Import]:
    """All imports of a file, by statement, by importlib and by sys.modules; a relative one is resolved to
    '.<path from the package's root>'. UNKNOWN where the name of what is imported cannot be read here."""
    folder = file.split("/")[:-1]
    tree = ast.parse(source)
    under_types = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    for_types = {inner for node in under_types for statement in node.body for inner in ast.walk(statement)}
    read: set[ast.AST] = set()

    def climbed(level: int) -> list[str]:
        assert len(folder) >= level - 1, f"{file} climbs out of the package"
        return folder[: len(folder) - (level - 1)]

    def named(node: ast.AST) -> Iterator[tuple[str, bool]]:
        """(module, whether it is only looked up)"""
        match node:
            case ast.Import(names=names):
                yield from ((name.name, False) for name in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                hidden = module == "sys" and "modules" in [name.name for name in names]
                yield UNKNOWN if hidden else module, False
            case ast.ImportFrom(level=level, module=module, names=names):
                parts = [*climbed(level), *(module.split(".") if module else [])]
                for name in names:  # `from . import x` names a module, `from .x import y` most often not
                    whole = not module or file_of([*parts, name.name])
                    yield "." + ".".join([*parts, name.name] if whole else parts), False
            case ast.Call(func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module")):
                name = written(node.args[0])
                level = len(name) - len(name.lstrip("."))
                yield ".".join(["", *climbed(level), name[level:]]) if level else name, False
            case (
                ast.Subscript(value=ast.Attribute(attr="modules") as modules, slice=key)
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="modules") as modules, attr="get"), args=[key, *_]
                )
                | ast.Compare(left=key, comparators=[ast.Attribute(attr="modules") as modules])
            ) if ast.unparse(modules) == "sys.modules":
                read.add(modules)
                yield written(key), True
            case ast.Attribute(attr="modules") if ast.unparse(node) == "sys.modules" and node not in read:
                yield UNKNOWN, True

    for node in ast.walk(tree):  # parents before what is in them
        for module, looked_up in named(node):
            yield Import(file, getattr(node, "lineno", 0), module, node in for_types, looked_up)


def written(name: ast.expr) -> str:
    """A module's name as far as it is written down."""
    match name:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return f"{text}{UNKNOWN}"
    return UNKNOWN


ALL = [found for file in package_files() for found in imports_of(file, (ROOT / file).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_from_those_below_it(layer: str) -> None:
    allowed = BELOW[layer] | {layer}
    wrong = [str(f) for f in ALL if f.layer == layer and f.ours and f.module != "." and f.top not in allowed]
    assert not wrong, f"{layer or '__init__.py'} may import from {sorted(allowed)}"


RULES: dict[str, Callable[[Import], bool]] = {
    "the package is imported absolutely: ComfyUI has it under another name, and would load it twice": lambda f: (
        f.top == PACKAGE
    ),
    # headless/hosts/checkout.py starts one in a process of its own, and core_nodes.py stands in for six of its nodes
    "ComfyUI is known outside of comfyui_host": lambda f: f.top in COMFYUI and f.layer != "comfyui_host",
    "ComfyUI is imported, not looked up: a process that has it is not one that it runs in": lambda f: (
        f.top in COMFYUI and not f.looked_up
    ),
    # in comfyui_host, names of ComfyUI's modules stand in tables
    "a name that cannot be read is a way round the layers": lambda f: f.top == UNKNOWN and f.layer != "comfyui_host",
    "a compiler is known outside of backends.py": lambda f: (
        f.top in COMPILERS and f.file != "pipelines/compile/backends.py"
    ),
    "a library is known outside of its layers": lambda f: f.layer not in LIBRARIES_FOR.get(f.top, {f.layer}),
}


@pytest.mark.parametrize("wrong", RULES)
def test_nothing_else_is_imported(wrong: str) -> None:
    assert not [str(found) for found in ALL if not found.ours and RULES[wrong](found)], wrong


def test_no_module_imports_itself_in_the_end() -> None:
    """Imports in functions are counted, what is for types alone not."""
    after: dict[str, set[str]] = {}
    for found in ALL:
        target = file_of(found.module[1:].split(".")) if found.ours and not found.for_types else ""
        after.setdefault(found.file, set()).update({target} - {""})
    TopologicalSorter(after).prepare()  # raises what names the circle


def test_the_search_path_is_left_alone() -> None:
    """ComfyUI has modules named `nodes` and `server`: the pack's root on sys.path would shadow or lose to them."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in package_files()}
    wrong = [file for file, text in sources.items() if "sys.path.append" in text or "sys.path.insert" in text]
    assert not wrong


MOST_ENTERED = {"first": (35, 16), "later": (30, 16)}  # by a sampling run: files of ours, frames on its deepest stack
MOST_LOADED = 42  # modules of ours, by NaN Guard (MODEL)


def test_what_a_run_enters_and_the_guard_loads_stays_small() -> None:
    command = [sys.executable, "scripts/run_depth.py"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for which, most in MOST_ENTERED.items():
        (counts,) = re.findall(rf"A {which} run: (\d+) files, (\d+) frames", said)
        assert all(int(now) <= limit for now, limit in zip(counts, most, strict=True)), said
    (loaded,) = re.findall(r"loads (\d+) modules", said)
    assert int(loaded) <= MOST_LOADED


IMPORT = """
import json, sys
sys.dont_write_bytecode = True  # that of a source that is newer is written, and renamed
before, events = set(sys.modules), []
sys.addaudithook(lambda name, values: events.append((name, str(values[0]) if values else "")))
import comfyui_onediff_guard
comfyui_onediff_guard.NODE_CLASS_MAPPINGS, comfyui_onediff_guard.NODE_DISPLAY_NAME_MAPPINGS
modules, told = sorted(set(sys.modules) - before), list(events)
import comfyui_onediff_guard.__main__
print(json.dumps([modules, sorted(set(sys.modules) - before), told]))
"""
IMPORTED_MODULES = 40  # of ours; more than the nodes need at import would be late where a disk is slow
BY_THE_IMPORT_SYSTEM = {"import", "open", "compile", "exec", "os.listdir", "os.scandir", "marshal.loads"}


def test_importing_the_pack_loads_its_nodes_and_does_nothing_else(fresh_python: Callable[..., str]) -> None:
    """Then it is quick, on any machine: no library, no folder of models, no process and no network is waited for."""
    modules, with_command, events = json.loads(fresh_python(IMPORT))
    assert {name.split(".")[0] for name in with_command} - sys.stdlib_module_names == {PACKAGE}
    assert len([name for name in modules if name.startswith(PACKAGE)]) <= IMPORTED_MODULES
    assert all(value.endswith((".py", ".pyc")) for name, value in events if name == "open")
    others = {name for name, _ in events} - BY_THE_IMPORT_SYSTEM
    assert not {name for name in others if name.startswith(("os.", "shutil.", "socket.", "subprocess.", "urllib."))}
