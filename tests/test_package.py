"""What users install: the wheel, requirements.txt, the registry's fields and files, and what the native guard loads."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from PIL import Image

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

PACKAGE = "comfyui_onediff_guard"
REGISTRY_CLASSIFIERS = {  # https://docs.comfy.org/registry/specifications
    *("Operating System :: OS Independent", "Operating System :: Microsoft :: Windows"),
    *("Operating System :: POSIX :: Linux", "Operating System :: MacOS"),
    *("Environment :: GPU :: NVIDIA CUDA", "Environment :: GPU :: AMD ROCm", "Environment :: GPU :: Intel Arc"),
    *("Environment :: NPU :: Huawei Ascend", "Environment :: GPU :: Apple Metal"),
}
NOT_SOURCE = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")  # neither environments nor caches
NOT_BUILT = {"build", "dist", "input", "models", "output", "tests"}  # in the root folder


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy, so that the repository stays unchanged."""
    folder = tmp_path_factory.mktemp("wheel")

    def ignored(where: str, names: list[str]) -> set[str]:
        return NOT_SOURCE(where, names) | (NOT_BUILT & {*names} if Path(where) == root else set())

    shutil.copytree(root, folder / "source", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "-w", str(folder), str(folder / "source")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def shipped_files(root: Path) -> set[str]:
    """The files that a wheel must have, as paths from the root."""
    files = [root / "__init__.py", root / "__main__.py"]
    for folder in ("comfyui_host", "demo", "headless", "nodes", "pipelines", "precision", "trust"):
        files += (root / folder).rglob("*.py")
    for folder in ("workflows", "subgraphs", "locales", "web"):
        files += (file for file in (root / folder).rglob("*") if file.is_file())
    return {file.relative_to(root).as_posix() for file in files}


def test_wheel_contains_exactly_shipped_files(root: Path, wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    inside = {name.removeprefix(f"{PACKAGE}/") for name in names if name.startswith(f"{PACKAGE}/")}
    assert inside == shipped_files(root), "list the folder or the file type under [tool.setuptools] in pyproject.toml"
    others = {name.split(".dist-info/")[-1]: name for name in names if not name.startswith(f"{PACKAGE}/")}
    assert all(".dist-info/" in name for name in others.values()) and "licenses/LICENSE" in others
    assert f"onediff-guard = {PACKAGE}.__main__:main" in wheel.read(others["entry_points.txt"]).decode()


def test_requirements_txt_matches_pyproject_dependencies(root: Path, project: dict[str, Any]) -> None:
    lines = (root / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line and not line.startswith("#")] == project["project"]["dependencies"]


def test_dependencies_do_not_include_torch(project: dict[str, Any]) -> None:
    names = {Requirement(line).name for line in project["project"]["dependencies"]}
    assert not {name for name in names if name.startswith(("torch", "nvidia"))}


UNTESTED_BOUNDS = {"protobuf", "packaging"}  # pyproject.toml says that their lower bounds are untested


def pins(root: Path, constraints: str) -> dict[str, list[Version]]:
    """The versions that a file of constraints/ pins, by canonical name."""
    found: dict[str, list[Version]] = {}
    for line in (root / "constraints" / constraints).read_text(encoding="utf-8").splitlines():
        if "==" in (text := line.partition("#")[0].strip()):
            pin = Requirement(text)
            found.setdefault(canonicalize_name(pin.name), []).extend(Version(each.version) for each in pin.specifier)
    return found


def test_pinned_environments_cover_dependencies_and_lower_bounds(root: Path, project: dict[str, Any]) -> None:
    environments = {file.name: pins(root, file.name) for file in (root / "constraints").glob("*.txt")}
    assert {"test.txt", "comfyui-0.0.1.txt"} <= {*environments}
    for wanted in map(Requirement, project["project"]["dependencies"]):
        name = canonicalize_name(wanted.name)
        for file in ("test.txt", "comfyui-0.0.1.txt"):
            found = environments[file].get(name, [])
            assert found and all(map(wanted.specifier.contains, found)), f"{wanted}: constraints/{file} has {found}"
        oldest = min(version for found in environments.values() for version in found.get(name, []))
        for bound in wanted.specifier:
            if bound.operator == ">=" and wanted.name not in UNTESTED_BOUNDS:
                lowest = Version(bound.version)
                assert lowest <= oldest and lowest.release[:2] == oldest.release[:2], f"{wanted}: {oldest} is run"


def test_pyproject_has_comfy_registry_fields(root: Path, project: dict[str, Any]) -> None:
    table = project["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", table["version"])
    assert re.fullmatch(r"[a-z0-9-]+", table["name"])
    assert table["description"]
    assert len(table["name"]) < 100
    assert table["urls"]["Repository"]
    assert table["license"] == "Apache-2.0"
    assert "Apache License" in (root / "LICENSE").read_text(encoding="utf-8")
    comfy = project["tool"]["comfy"]
    assert comfy["PublisherId"] and comfy["DisplayName"]
    assert SpecifierSet(comfy["requires-comfyui"]).contains("0.33.0")
    systems = [line for line in table["classifiers"] if line.startswith(("Operating System ::", "Environment ::"))]
    assert set(systems) <= REGISTRY_CLASSIFIERS and len(systems) >= 2
    at = f"{table['urls']['Repository']}/main/".replace("https://github.com", "https://raw.githubusercontent.com")
    for name, width, height in (("Icon", 400, 400), ("Banner", 1260, 540)):
        with Image.open(root / comfy[name].removeprefix(at)) as picture:
            assert picture.size == (width, height), "a square, and 21:9"


IMPORT_BY_PATH = """
import importlib.util, sys
import comfyui_onediff_guard as installed
root = sys.argv[1]
name = root.replace(".", "_x_")  # as ComfyUI does
spec = importlib.util.spec_from_file_location(name, root + "/__init__.py", submodule_search_locations=[root])
pack = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
assert sorted(pack.NODE_CLASS_MAPPINGS) == sorted(installed.NODE_CLASS_MAPPINGS)
print(*pack.NODE_CLASS_MAPPINGS)
"""


def test_published_files_load_all_nodes_and_exclude_tests(
    root: Path, tmp_path: Path, fresh_python: Callable[..., str]
) -> None:
    """Import a copy of the published files by path, as ComfyUI does, beside the installed pack."""
    lines = (root / ".comfyignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.rstrip("/") for line in lines if line and not line.startswith("#")]
    target = tmp_path / "ComfyUI-OneDiff-Guard"

    def ignored(where: str, names: list[str]) -> set[str]:
        folder = Path(where).relative_to(root)
        published = [name for name in names if not any((folder / name).match(pattern) for pattern in patterns)]
        return (
            {*names} - {*published}
            | NOT_SOURCE(where, names)
            | (NOT_BUILT & {*names} if Path(where) == root else set())
        )

    shutil.copytree(root, target, ignore=ignored)
    output = fresh_python(IMPORT_BY_PATH, str(target))
    assert set(output.split()) == set(NODE_CLASS_MAPPINGS)
    for name in NODE_CLASS_MAPPINGS:
        assert (target / "web" / "docs" / f"{name}.md").is_file()
    assert (target / "workflows" / "api").is_dir() and (target / "LICENSE").is_file()
    assert not (target / "tests").exists() and not (target / "scripts").exists()


def test_repository_address_is_consistent(root: Path, project: dict[str, Any]) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    address, publisher = project["project"]["urls"]["Repository"], project["tool"]["comfy"]["PublisherId"]
    assert re.findall(r"^git clone (.*)$", readme, re.MULTILINE) == [address], "README.md and pyproject.toml differ"
    assert f"git clone {address}\n" in (root / "README.zh.md").read_text(encoding="utf-8")
    assert address.endswith("/ComfyUI-OneDiff-Guard"), "the folder that README.md's next command expects"
    unpublished = ["__OWNER__" in text for text in (address, publisher)] + ["has no public address yet" in readme]
    assert len(set(unpublished)) == 1, "address, publisher, README.md's sentence: all replaced, or none"


NATIVE = """
import json, sys
from types import ModuleType, SimpleNamespace
import torch
from comfyui_onediff_guard.comfyui_host.native_guards import guarded_model, guarded_vae
from comfyui_onediff_guard.comfyui_host.runs import Settings
from comfyui_onediff_guard.precision.guard import GuardPolicy

class Network(torch.nn.Linear):
    def decode(self, x):
        return self(self(x)) / 1e6  # from 1e4 by way of 2.5e5, which overflows fp16
    encode = decode

class Vae:
    vae_dtype, device = torch.float16, torch.device("cpu")
    def __init__(self):
        self.first_stage_model = Network(4, 4, bias=False).requires_grad_(False).half()
        self.first_stage_model.weight.copy_(5 * torch.eye(4))
    def decode(self, x):
        return self.first_stage_model.decode(x.half()).float()
    decode_tiled = encode = encode_tiled = decode

class Executor(Vae):  # stands in for a WrapperExecutor and a BaseModel
    manual_cast_dtype, model_config, current_patcher = torch.float16, None, None
    def __call__(self, x, *_):
        return self.decode(x)
    class_obj = property(lambda self: self)
    diffusion_model = property(lambda self: self.first_stage_model)

class Patcher(dict):  # kind → wrapper
    def clone(self):
        return Patcher()
    def remove_wrappers_with_key(self, kind, key):
        pass
    def add_wrapper_with_key(self, kind, key, wrapper):
        self[kind] = wrapper

def loaded():
    return [name for name in sys.modules if name.startswith("comfyui_onediff_guard")]

def run(model, vae):
    x = torch.full((1, 4), 1e4)
    for made in (model["APPLY_MODEL"](Executor(), x, torch.ones(1)), vae.decode(x)):
        assert torch.allclose(made, torch.tensor(0.25), rtol=1e-2), made
    return loaded()

sys.modules["comfy.patcher_extension"] = extension = ModuleType("comfy.patcher_extension")
sys.modules["comfy.ldm.modules.attention"] = SimpleNamespace(attention_pytorch=None)
kinds = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")
extension.WrappersMP = SimpleNamespace(**{kind: kind for kind in kinds})
extension.WrapperExecutor = type("WrapperExecutor", (), {"__call__": lambda self, *args, **kwargs: None})
imported, settings = loaded(), Settings(GuardPolicy())
ran = run(guarded_model(Patcher(), settings), guarded_vae(Vae(), settings))

from comfyui_onediff_guard import NODE_CLASS_MAPPINGS as nodes
through_nodes = run(*nodes["OneDiffGuardNaNGuardNative"]().apply(Patcher(), Vae()))
import comfyui_onediff_guard.comfyui_host.probe
print(json.dumps([imported, ran, through_nodes, loaded()]))
"""
NATIVE_MODULES = 45  # of ours, at most


def test_native_guard_loads_no_pipelines_module(fresh_python: Callable[..., str], tmp_path: Path) -> None:
    """Checked at import, after reruns of a MODEL and a VAE, through the nodes, and with the probe."""
    found = json.loads(fresh_python(NATIVE, ONEDIFF_GUARD_PROFILES=str(tmp_path)))
    assert max(map(len, found[:2])) <= NATIVE_MODULES
    assert not [name for names in found for name in names if name.startswith(f"{PACKAGE}.pipelines")]
    assert len([*tmp_path.iterdir()]) == 2, "one profile each"


@pytest.mark.parametrize("script", sorted(path.name for path in (Path(__file__).parents[1] / "web").glob("*.js")))
def test_web_script_has_valid_syntax(script: str, root: Path, tmp_path: Path) -> None:
    if not (node := shutil.which("node")):
        pytest.skip("node: not on PATH")
    module = shutil.copy(root / "web" / script, tmp_path / "script.mjs")
    done = subprocess.run([node, "--check", str(module)], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
