"""A server for each leg, shared by all tests of a session, with small models in its models/diffusers."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import legs
import pytest
from runs import HEALTHY, OVERFLOWING, SMALL, Ran, finish, start

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
def leg() -> legs.Leg:
    """Leg (b), for tests that need a current ComfyUI."""
    found = legs.leg_b()
    if found.missing:
        pytest.skip(found.missing)
    return found


@pytest.fixture(scope="session")
def small_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ComfyUI's models: of every family, and a CogVideoX whose residual stream leaves fp16's range."""
    from comfyui_onediff_guard.headless.small_model import build_cogvideox

    models = tmp_path_factory.mktemp("comfyui") / "models"
    build_cogvideox(models / "diffusers" / HEALTHY)
    build_cogvideox(models / "diffusers" / OVERFLOWING, overflow="stream")
    families.build(models)
    return models


@pytest.fixture(scope="session", params=LEGS, ids=lambda name: f"leg_{name}")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    """A running ComfyUI with the pack and the small models in it."""
    leg = LEGS[request.param]()
    if leg.missing:
        pytest.skip(leg.missing)
    small_models: Path = request.getfixturevalue("small_models")
    base = tmp_path_factory.mktemp(f"leg_{leg.name}")
    legs.install_pack(base / "custom_nodes")
    shutil.copytree(small_models, base / "models")
    families.write_inputs(base / "input")
    with legs.started(leg, base) as running:
        _started[leg.name] = leg
        yield running


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: `ONEDIFF_GUARD_PICTURES`, else a temporary folder."""
    named = os.environ.get("ONEDIFF_GUARD_PICTURES")
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def start_graph(server: legs.Server, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts `onediff-guard run --server` on a workflow; changes become --set."""
    return lambda workflow, changes=None: start(server, workflow, tmp_path, changes)


@pytest.fixture
def run_graph(server: legs.Server, start_graph: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ran]:
    """The same, waited for."""
    return lambda *arguments: finish(start_graph(*arguments), server)


@pytest.fixture
def start_run(
    server: legs.Server, start_graph: Callable[..., subprocess.Popen[str]]
) -> Callable[..., subprocess.Popen[str]]:
    """Starts the leg's text-to-video workflow, small enough for a CPU; keywords become --set."""

    def start_small(**settings: Any) -> subprocess.Popen[str]:
        changes = {
            "OneDiffGuardLoadCogVideoX.model": HEALTHY,
            **SMALL,
            **{f"OneDiffGuard{name.replace('__', '.')}": value for name, value in settings.items()},
        }
        return start_graph(server.leg.workflow, changes)

    return start_small


@pytest.fixture
def run(server: legs.Server, start_run: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ran]:
    """The same, waited for."""

    def run_and_wait(**settings: Any) -> Ran:
        return finish(start_run(**settings), server)

    return run_and_wait
