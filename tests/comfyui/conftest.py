"""Fixtures: one ComfyUI server for each leg, shared by the session, with small models; and runs on it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import browser
import families
import legs
import pytest
import shared_models
from runs import HEALTHY, SMALL, Ran, finish, start


def _leg_or_skip(request: pytest.FixtureRequest) -> legs.Leg:
    if request.param.missing:
        pytest.skip(request.param.missing)
    return request.param


@pytest.fixture(scope="session", params=legs.LEGS, ids=attrgetter("id"))
def any_leg(request: pytest.FixtureRequest) -> legs.Leg:
    """Each ComfyUI, one after the other."""
    return _leg_or_skip(request)


@pytest.fixture(scope="session", params=legs.CHECKOUTS, ids=attrgetter("id"))
def leg(request: pytest.FixtureRequest) -> legs.Leg:
    """Each checkout, one after the other, for tests that need a current ComfyUI."""
    return _leg_or_skip(request)


@pytest.fixture(scope="session")
def small_models() -> Path:
    """A `models` folder for ComfyUI, with small models."""
    return shared_models.built(families.build)


@pytest.fixture(scope="session")
def server(any_leg: legs.Leg, small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    """A running ComfyUI with the pack and the small models."""
    base = tmp_path_factory.mktemp(any_leg.id)
    legs.install_pack(base / "custom_nodes")
    shared_models.copied(small_models, base / "models")
    families.write_inputs(base / "input")
    options = ["--fp16-vae"] if any_leg.name == "a" else []  # for VAEs of ComfyUI's own models; pipelines ignore it
    with legs.started(any_leg, base, *options) as running:
        yield running


@pytest.fixture(scope="module")
def pictures(server: legs.Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for screenshots: in `ONEDIFF_GUARD_PICTURES` if set, else a temporary one."""
    named = os.environ.get("ONEDIFF_GUARD_PICTURES")
    folder = (Path(named) if named else tmp_path_factory.mktemp("pictures")) / server.leg.id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    """The server's page in a browser."""
    with browser.canvas(server.url, pictures) as opened:
        yield opened


@pytest.fixture
def start_graph(server: legs.Server, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Function that starts `onediff-guard run --server` on a workflow. changes: become --set."""
    return lambda workflow, changes=None: start(server, workflow, tmp_path, changes)


@pytest.fixture
def run_graph(server: legs.Server, start_graph: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ran]:
    """Function that starts it, waits, and returns the result."""
    return lambda *arguments: finish(start_graph(*arguments), server)


@pytest.fixture
def start_run(
    server: legs.Server, start_graph: Callable[..., subprocess.Popen[str]]
) -> Callable[..., subprocess.Popen[str]]:
    """Function that starts the leg's text-to-video workflow, small enough for a CPU. Keywords become --set."""

    def start_small(**settings: Any) -> subprocess.Popen[str]:
        changes = {
            "OneDiffGuardLoadPipeline.model": HEALTHY,
            **SMALL,
            **{f"OneDiffGuard{name.replace('__', '.')}": value for name, value in settings.items()},
        }
        return start_graph(server.leg.workflow, changes)

    return start_small


@pytest.fixture
def run(server: legs.Server, start_run: Callable[..., subprocess.Popen[str]]) -> Callable[..., Ran]:
    """Function that starts it, waits, and returns the result."""

    def run_and_wait(**settings: Any) -> Ran:
        return finish(start_run(**settings), server)

    return run_and_wait
