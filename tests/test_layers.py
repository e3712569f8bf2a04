"""The design's layers hold: each imports only from those below it, and importing the pack loads nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {
    "accelerate",
    "av",
    "diffusers",
    "matplotlib",
    "onediff",
    "onediffx",
    "oneflow",
    "nexfort",
    "pydantic",
    "torch",
    "transformers",
}
COMFYUI = {
    "app",
    "comfy",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "execution",
    "folder_paths",
    "latent_preview",
    "nodes",
    "server",
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
# demo/ builds a model's folder from their own classes; headless/ has them show no bars
LIBRARIES_FOR = {"diffusers": {"demo", "headless", "pipelines"}, "transformers": {"demo", "headless", "pipelines"}}


@dataclass(frozen=True)
class Import:
    file: str  # path from the root, with /
    line: int
    module: str  # 'torch.nn', or of ours '.pipelines.load'
    at_import: bool  # runs when the module is imported: neither in a function nor under TYPE_CHECKING

    @property
    def top(self) -> str:
        return self.module.lstrip(".").split(".")[0]

    @property
    def ours(self) -> bool:
        return self.module.startswith(".")

    @property
    def layer(self) -> str:
        return layer_of(self.file)

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def layer_of(file: str) -> str:
    return file.split("/")[0] if "/" in file else ""


def package_files() -> list[str]:
    """Every Python file of the package, as a path from the root."""
    files = [ROOT / "__init__.py", ROOT / "__main__.py"]
    for layer in filter(None, BELOW):
        files += (ROOT / layer).rglob("*.py")
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


def imports_of(file: str, source: str) -> Iterator[Import]:
    """All imports of a file; a relative one is resolved to '.<path from the package's root>'."""
    folder = file.split("/")[:-1]

    def walk(node: ast.AST, at_import: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(file, child.lineno, name.name, at_import)
            elif isinstance(child, ast.ImportFrom):
                yield from from_import(child, at_import)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from walk(child, False)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), False)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), at_import)
            else:
                yield from walk(child, at_import)

    def from_import(node: ast.ImportFrom, at_import: bool) -> Iterator[Import]:
        if node.level == 0:
            yield Import(file, node.lineno, node.module or "", at_import)
            return
        base = folder[: len(folder) - (node.level - 1)]
        assert len(folder) >= node.level - 1, f"{file}:{node.lineno} climbs out of the package"
        parts = [*base, *((node.module or "").split(".") if node.module else [])]
        for name in node.names:
            # `from . import x` names a module, `from .x import y` most often not
            target = parts if node.module else [*parts, name.name]
            yield Import(file, node.lineno, "." + ".".join(target), at_import)

    yield from walk(ast.parse(source), True)


ALL = [found for file in package_files() for found in imports_of(file, (ROOT / file).read_text(encoding="utf-8"))]


def loaded_with(start: str) -> list[Import]:
    """What importing one file brings in, itself and every file of ours that it imports along included."""
    by_file: dict[str, list[Import]] = {}
    for found in ALL:
        if found.at_import:
            by_file.setdefault(found.file, []).append(found)
    seen: set[str] = set()
    waiting, result = [start], []
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for found in by_file.get(file, []):
            result.append(found)
            if found.ours:
                path = found.module[1:].replace(".", "/")
                parts = path.split("/")
                above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
                candidates = [f"{path}.py", f"{path}/__init__.py", *(f"{folder}/__init__.py" for folder in above)]
                waiting += [candidate for candidate in candidates if (ROOT / candidate).is_file()]
    return result


@pytest.mark.parametrize("layer", BELOW)
def test_a_layer_imports_only_from_those_below_it(layer: str) -> None:
    allowed = BELOW[layer] | {layer}
    wrong = [str(f) for f in ALL if f.layer == layer and f.ours and f.module != "." and f.top not in allowed]
    assert not wrong, f"{layer or '__init__.py'} may import from {sorted(allowed)}"


ROOMS = sorted({file.rpartition("/")[0] for file in package_files() if file.startswith(("headless/", "pipelines/"))})


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_can_be_taken_in_at_a_glance(room: str) -> None:
    assert len([*(ROOT / room).glob("*.py")]) <= 12


def test_inside_the_package_imports_are_relative() -> None:
    wrong = [str(found) for found in ALL if found.top == "comfyui_onediff_guard" and not found.ours]
    assert not wrong, "ComfyUI imports the folder under another name: an absolute import would load it twice"


def test_only_host_py_knows_comfyui() -> None:
    wrong = [str(f) for f in ALL if not f.ours and f.top in COMFYUI and f.file != "comfyui_host/host.py"]
    assert not wrong


def test_only_compile_py_knows_onediff_and_its_backends() -> None:
    wrong = [str(f) for f in ALL if not f.ours and f.top in COMPILERS and f.file != "pipelines/compile/backends.py"]
    assert not wrong


@pytest.mark.parametrize("library", LIBRARIES_FOR)
def test_a_library_is_known_to_its_layers_alone(library: str) -> None:
    wrong = [str(f) for f in ALL if not f.ours and f.top == library and f.layer not in LIBRARIES_FOR[library]]
    assert not wrong


@pytest.mark.parametrize("start", ["__init__.py", "nodes/__init__.py", "__main__.py"])
def test_importing_loads_nothing_heavy(start: str) -> None:
    wrong = [str(found) for found in loaded_with(start) if not found.ours and found.top in HEAVY]
    assert not wrong, f"reached from {start}; import inside the function that needs it"


def test_the_search_path_is_left_alone() -> None:
    """ComfyUI has modules named `nodes` and `server`: the pack's root on sys.path would shadow or lose to them."""
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in package_files()}
    wrong = [file for file, text in sources.items() if "sys.path.append" in text or "sys.path.insert" in text]
    assert not wrong


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch.nn", [("torch.nn", True)]),
        ("def f():\n    import torch", [("torch", False)]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import av", [("torch", False), ("av", True)]),
        ("try:\n    import torch\nexcept ImportError:\n    torch = None", [("torch", True)]),
        ("class A:\n    from torch import nn", [("torch", True)]),
        ("from . import host", [(".nodes.host", True)]),
        ("from .host import x", [(".nodes.host", True)]),
        ("from ..pipelines.load import x", [(".pipelines.load", True)]),
        ("from .. import precision", [(".precision", True)]),
    ],
)
def test_what_this_check_sees(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(found.module, found.at_import) for found in imports_of("nodes/example.py", source)] == expected
