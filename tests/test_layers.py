"""The design's layers hold: each imports only from those below it, and importing the pack loads nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
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
    "ray",
    "torch",
    "torchao",
    "transformers",
}
COMFYUI = {
    "app",
    "comfy",
    "comfy_aimdo",
    "comfy_api",
    "comfy_execution",
    "comfy_extras",
    "comfyui_version",
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
    at_import: bool  # runs when the module is imported: neither in a function nor under TYPE_CHECKING
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


def file_of(parts: Sequence[str]) -> str:
    """The file of one of our modules or packages, "" where it is none."""
    path = "/".join(parts)
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if (ROOT / file).is_file()), "")


def imports_of(file: str, source: str) -> Iterator[Import]:
    """All imports of a file, by statement, by importlib and by sys.modules; a relative one is resolved to
    '.<path from the package's root>'. UNKNOWN where the name of what is imported cannot be read here."""
    folder = file.split("/")[:-1]

    def walk(node: ast.AST, at_import: bool, for_types: bool = False) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for name in child.names:
                    yield Import(file, child.lineno, name.name, at_import, for_types)
            elif isinstance(child, ast.ImportFrom):
                yield from from_import(child, at_import, for_types)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                yield from walk(child, False, for_types)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for statement in child.body:
                    yield from walk(ast.Module([statement], []), False, True)
                for statement in child.orelse:
                    yield from walk(ast.Module([statement], []), at_import, for_types)
            else:
                yield from by_name(child, at_import)
                yield from walk(child, at_import, for_types)

    def from_import(node: ast.ImportFrom, at_import: bool, for_types: bool) -> Iterator[Import]:
        if node.level == 0:
            hidden = node.module == "sys" and "modules" in [name.name for name in node.names]
            yield Import(file, node.lineno, UNKNOWN if hidden else node.module or "", at_import, for_types)
            return
        base = climbed(node.level, node.lineno)
        parts = [*base, *((node.module or "").split(".") if node.module else [])]
        for name in node.names:
            # `from . import x` names a module, `from .x import y` most often not
            target = parts if node.module and not file_of([*parts, name.name]) else [*parts, name.name]
            yield Import(file, node.lineno, "." + ".".join(target), at_import, for_types)

    def climbed(level: int, line: int) -> list[str]:
        assert len(folder) >= level - 1, f"{file}:{line} climbs out of the package"
        return folder[: len(folder) - (level - 1)]

    def by_name(node: ast.AST, at_import: bool) -> Iterator[Import]:
        match node:
            case ast.Call(func=ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module")):
                name = written(node.args[0])
                level = len(name) - len(name.lstrip("."))
                module = ".".join(["", *climbed(level, node.lineno), name[level:]]) if level else name
                yield Import(file, node.lineno, module, at_import)
            case (
                ast.Subscript(value=ast.Attribute(attr="modules") as modules, slice=key)
                | ast.Call(
                    func=ast.Attribute(value=ast.Attribute(attr="modules") as modules, attr="get"), args=[key, *_]
                )
                | ast.Compare(left=key, comparators=[ast.Attribute(attr="modules") as modules])
            ) if ast.unparse(modules) == "sys.modules":
                read.add(modules)
                yield Import(file, node.lineno, written(key), False, looked_up=True)
            case ast.Attribute(attr="modules") if ast.unparse(node) == "sys.modules" and node not in read:
                yield Import(file, node.lineno, UNKNOWN, False, looked_up=True)

    def written(name: ast.expr) -> str:
        """A module's name as far as it is written down."""
        match name:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
                return f"{text}{UNKNOWN}"
        return UNKNOWN

    read: set[ast.AST] = set()
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


def test_inside_the_package_imports_are_relative() -> None:
    wrong = [str(found) for found in ALL if found.top == "comfyui_onediff_guard" and not found.ours]
    assert not wrong, "ComfyUI imports the folder under another name: an absolute import would load it twice"


def test_comfyui_is_known_in_one_package_alone() -> None:
    """headless/hosts/checkout.py starts one in a process of its own and reads its files, and
    headless/hosts/core_nodes.py stands in for six of its nodes: neither reaches a module of it in this process."""
    wrong = [str(f) for f in ALL if not f.ours and f.top in COMFYUI and f.layer != "comfyui_host"]
    assert not wrong


def test_comfyui_is_looked_up_and_never_imported() -> None:
    """A process that has it installed is not one that it runs in."""
    wrong = [str(f) for f in ALL if not f.ours and f.top in COMFYUI and not f.looked_up]
    assert not wrong


def test_only_comfyui_host_looks_up_what_the_source_does_not_name() -> None:
    """There, names of ComfyUI's modules stand in tables; anywhere else, a name that cannot be read is a way round the
    layers."""
    wrong = [str(f) for f in ALL if f.top == UNKNOWN and not f.ours and f.layer != "comfyui_host"]
    assert not wrong


def circles(imports: Sequence[Import]) -> list[list[str]]:
    """The files of ours that import each other, those in functions counted, what is for types alone not."""
    after: dict[str, set[str]] = {}
    for found in imports:
        if found.ours and not found.for_types and (target := file_of(found.module[1:].split("."))):
            after.setdefault(found.file, set()).add(target)

    def reached(start: str) -> set[str]:
        seen, waiting = set[str](), [*after.get(start, ())]
        while waiting:
            if (file := waiting.pop()) not in seen:
                seen.add(file)
                waiting += after.get(file, ())
        return seen

    below = {file: reached(file) for file in after}
    trips = {tuple(sorted(other for other in after if other in below[file] and file in below[other])) for file in after}
    return [[*files] for files in sorted(trips) if files]


def test_no_module_imports_itself_in_the_end() -> None:
    assert not circles(ALL)


@pytest.mark.parametrize(
    ("first", "second", "there"),
    [
        ("from . import profiles", "from . import handle", True),
        ("from .profiles import load_profile", "def f():\n    from ..run.handle import PipelineHandle", True),
        ("from .profiles import load_profile", "from importlib import import_module\nimport_module('.handle')", True),
        ("from .profiles import load_profile", "if TYPE_CHECKING:\n    from .handle import PipelineHandle", False),
        ("from .profiles import load_profile", "from ...precision import learned", False),
    ],
)
def test_what_counts_as_a_circle(first: str, second: str, there: bool) -> None:
    files = ["pipelines/run/handle.py", "pipelines/run/profiles.py"]
    found = [each for file, source in zip(files, (first, second), strict=True) for each in imports_of(file, source)]
    assert circles(found) == ([files] if there else [])


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
        ("from ..pipelines.run import handle", [(".pipelines.run.handle", True)]),
        ("import_module('comfy.ops')", [("comfy.ops", True)]),
        ("def f():\n    return importlib.import_module('..headless.run', __package__)", [(".headless.run", False)]),
        ("import_module(f'.{name}', __package__)", [(".nodes.?", True)]),
        ("import_module(f'comfy.{name}')", [("comfy.?", True)]),
        ("import_module(name)", [("?", True)]),
        ("__import__('folder_paths')", [("folder_paths", True)]),
        ("sys.modules['comfy.sample'].sample()", [("comfy.sample", False)]),
        ("sys.modules.get('server')", [("server", False)]),
        ("'comfy' in sys.modules", [("comfy", False)]),
        ("sys.modules[f'comfy.{name}']", [("comfy.?", False)]),
        ("for name in sys.modules: pass", [("?", False)]),
        ("from sys import modules", [("?", True)]),
    ],
)
def test_what_this_check_sees(source: str, expected: list[tuple[str, bool]]) -> None:
    assert [(found.module, found.at_import) for found in imports_of("nodes/example.py", source)] == expected
