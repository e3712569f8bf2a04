"""README's install steps in a new environment with ComfyUI's requirements: install, add a model, run a template. No
package of ComfyUI changes its version."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import browser
import legs
import pytest
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from packaging.utils import canonicalize_name
from runs import SMALL
from templates import TITLES

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.parametrize("core", legs.CHECKOUTS, indirect=True, ids=[leg.id for leg in legs.CHECKOUTS]),
]

_PINNED = re.compile(r"^(?:TORCH|BESIDE_TORCH) := (.+)$", re.MULTILINE)
TORCH, BESIDE_TORCH = (line.split() for line in _PINNED.findall((legs.ROOT / "Makefile").read_text(encoding="utf-8")))
README_COMMAND = "python -m pip install -r ComfyUI-OneDiff-Guard/requirements.txt"
TEMPLATE = "cogvideox_text_to_video"
SIZES = {name: value for name, value in SMALL.items() if "Sample" in name}  # the template's own take days on a CPU


@dataclass(frozen=True)
class Core:
    """A ComfyUI with an environment of its own requirements only."""

    leg: legs.Leg
    versions: dict[str, str]  # of every package in the environment


@pytest.fixture(scope="module")
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Core:
    leg: legs.Leg = request.param
    if leg.missing:
        pytest.skip(leg.missing)
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([getattr(sys, "_base_executable", sys.executable), "-m", "venv", environment], check=True)
    fresh = replace(leg, python=environment / legs.BIN / leg.python.name)
    theirs = [
        line
        for line in (leg.checkout / "requirements.txt").read_text(encoding="utf-8").splitlines()
        if not re.match(r"torch(vision|audio)?([^a-z]|$)", line)
    ]
    wanted = environment / "requirements.txt"
    wanted.write_text("\n".join(theirs), encoding="utf-8")
    pip(fresh, "install", *TORCH)
    pip(fresh, "install", *TORCH, "-r", wanted)
    pip(fresh, "install", "--no-deps", *BESIDE_TORCH)
    subprocess.run([fresh.python, legs.ROOT / "tests" / "comfyui" / "cpu_wheels.py"], check=True)
    return Core(fresh, versions(fresh))


@pytest.fixture(scope="module")
def base(core: Core, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's folder with the pack, installed by README's command."""
    base = tmp_path_factory.mktemp("comfyui")
    legs.install_pack(base / "custom_nodes")
    readme = (legs.ROOT / "README.md").read_text(encoding="utf-8")
    assert README_COMMAND in readme
    command = README_COMMAND.replace("python", str(core.leg.python), 1).split()
    subprocess.run(command, cwd=base / "custom_nodes", check=True, capture_output=True)
    return base


def pip(leg: legs.Leg, *arguments: str | Path) -> str:
    done = subprocess.run([leg.python, "-m", "pip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def versions(leg: legs.Leg) -> dict[str, str]:
    """Return {package: version} of an environment."""
    return {
        canonicalize_name(found["name"]): found["version"] for found in json.loads(pip(leg, "list", "--format=json"))
    }


def test_install_changes_no_package_version_of_comfyui(core: Core, base: Path) -> None:
    after = versions(core.leg)
    assert after["onediff"] and {name: after.get(name) for name in core.versions} == core.versions


@pytest.fixture
def running(core: Core, base: Path) -> Iterator[legs.Server]:
    build_cogvideox(base / "models" / "diffusers" / "CogVideoX-2b")
    with legs.started(core.leg, base) as server:
        yield server
    shutil.rmtree(base / "models")


def test_template_makes_video_after_install(running: legs.Server, tmp_path: Path) -> None:
    """The pack and a small model are in place. This test opens the template, sets small sizes, and presses Run."""
    with browser.canvas(running.url, tmp_path) as canvas:
        canvas.load(canvas.ask(f"/api/workflow_templates/{legs.FOLDER}/{TITLES[TEMPLATE]}.json"))
        canvas.set_widgets(SIZES)
        end, detail = canvas.queue()
        assert end == "execution_success", detail
        canvas.wait_for_video()
    (video,) = (running.base / "output" / "video").iterdir()
    assert video.suffix == ".mp4" and video.stat().st_size > 1000
