"""A server for each leg, shared by all tests of a session, with small models in its models/diffusers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import legs
import pytest
from runs import HEALTHY, OVERFLOWING, Ran, finish

LEGS = {"a": legs.leg_a, "b": legs.leg_b}
_started: dict[str, legs.Leg] = {}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which ComfyUIs the pack ran in."""
    terminalreporter.section("ComfyUI")
    for name, find in LEGS.items():
        leg = find()
        if leg.missing:
            terminalreporter.write_line(f"SKIPPED {leg.missing}")
        elif name in _started:
            terminalreporter.write_line(f"leg ({name}): ran in ComfyUI {leg.version}, {leg.python}")


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models/diffusers folder with a healthy CogVideoX and one whose residual stream leaves fp16's range."""
    from comfyui_onediff_guard.headless.small_model import build_cogvideox

    folder = tmp_path_factory.mktemp("models") / "diffusers"
    build_cogvideox(folder / HEALTHY)
    build_cogvideox(folder / OVERFLOWING, overflow="stream")
    return folder


@pytest.fixture(scope="session", params=LEGS, ids=lambda name: f"leg_{name}")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    """A running ComfyUI with the pack and the small models in it."""
    leg = LEGS[request.param]()
    if leg.missing:
        pytest.skip(leg.missing)
    small_models: Path = request.getfixturevalue("small_models")
    base = tmp_path_factory.mktemp(f"leg_{leg.name}")
    legs.install_pack(base / "custom_nodes")
    (base / "models").mkdir()
    shutil.copytree(small_models, base / "models" / "diffusers")
    with legs.started(leg, base) as running:
        _started[leg.name] = leg
        yield running


@pytest.fixture
def start_run(server: legs.Server, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `onediff-guard run --server` on the leg's workflow, small enough for a CPU; keywords become --set."""

    def start(**settings: Any) -> subprocess.Popen[str]:
        changes = {
            "OneDiffGuardLoadCogVideoX.model": HEALTHY,
            "OneDiffGuardLoadCogVideoX.backend": "eager",
            "OneDiffGuardSampleCogVideoX.width": 96,
            "OneDiffGuardSampleCogVideoX.height": 64,
            "OneDiffGuardSampleCogVideoX.frames": 9,
            "OneDiffGuardSampleCogVideoX.steps": 2,
            "OneDiffGuardDecodeLatents.tiling": False,
            **{f"OneDiffGuard{name.replace('__', '.')}": value for name, value in settings.items()},
        }
        command = [sys.executable, "-m", "comfyui_onediff_guard.headless", "run", str(server.leg.workflow)]
        command += ["--server", server.url, "--out", str(tmp_path / "out"), "--json", "--timeout", "240"]
        for name, value in changes.items():
            command += ["--set", f"{name}={json.dumps(value)}"]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )

    return start


@pytest.fixture
def run(server: legs.Server, start_run: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ran]:
    """The same, waited for."""

    def run_and_wait(**settings: Any) -> Ran:
        return finish(start_run(**settings), server)

    return run_and_wait
