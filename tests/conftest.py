"""What all tests share: tiers, the repository's root, and a process of its own for what must start from nothing."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import legs
import legs_table
import process_state
import pytest
import reliability
import tiers

ROOT = Path(__file__).resolve().parents[1]
SERVED = (
    "in_comfyui",
    "in_browser",
    "cached_reports",
    "hundred_prompts",
)  # modules of tests/comfyui with one server for each ComfyUI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="all", help="how much to run, see tests/support/tiers.py")
    parser.addoption("--write-figures", action="store_true", help="write docs/reliability.md")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: what is drawn is drawn anew in `make test-all` alone, and inductor's cache is the
    run's, not the machine's. A shell has what it starts with `&` ignore Ctrl+C, which tests send to what they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tier = config.getoption("--tier")
    hypothesis.settings.register_profile("all", deadline=None)
    hypothesis.settings.register_profile("smaller", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("all" if tier == "all" else "smaller")
    os.environ[tiers.VARIABLE] = tier
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other's cores cost many times more
    if not hasattr(config, "workerinput"):  # else a process of a run whose cache stands in the environment
        cache = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="onediff-guard-inductor-")
        config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier does not run."""
    names = [item.nodeid for item in items]
    everything = not config.getoption("keyword") and config.args == config.getini("testpaths")
    if everything and (wrong := tiers.unfitting(names)):
        raise pytest.UsageError(f"tests/support/tiers.py names what is no test: {', '.join(sorted(wrong))}")
    left_out = tiers.left_out(config.getoption("--tier"), names)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> Iterator[None]:
    """Print what tests measured of reliability, and write it down where that was asked for. After all that pytest has
    to say, what came of the tests in each ComfyUI."""
    figures = reliability.found(terminalreporter.stats.get("passed", []))
    if figures and not hasattr(config, "workerinput"):  # a process of a run that has another one to tell of it all
        terminalreporter.section("figures")
        for row in figures:
            terminalreporter.write_line(f"{row['what']}: {row['figure']}")
        if config.getoption("--write-figures"):
            terminalreporter.write_line(f"written: {reliability.write(figures)}")
    yield
    if table := [*legs_table.lines(terminalreporter.stats, {leg.name: leg.version for leg in legs.LEGS})]:
        terminalreporter.section("ComfyUI")
        for line in table:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A module's tests in one ComfyUI go to one process, and so do all that share a server of it."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            what = "server" if any(name in module for name in SERVED) else module
            return f"{what} {legs_table.leg_of(nodeid)}"

    return ByModule(config, log)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """A test leaves the process as it found it: nothing patched, set, open or running that was not."""
    modules, before = {*sys.modules}, process_state.read()
    yield
    if left := process_state.left_behind(before, modules):
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def _kept_elsewhere(
    process_as_before: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a test's runs load, learn and compile is not kept for the next test, nor for whoever runs the tests."""
    if stores := sys.modules.get("comfyui_onediff_guard.pipelines.weights.components"):
        stores._STORES.clear()  # one that a reference cycle keeps is not found again
    monkeypatch.setenv("ONEDIFF_GUARD_PROFILES", str(tmp_path_factory.mktemp("profiles")))
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "0")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """figure(line, value): what a test measured, for docs/reliability.md."""

    def record(line: str, value: object) -> None:
        record_property(f"{reliability.PREFIX}{line}", str(value))

    return record


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that is both the repository and the package."""
    return ROOT


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs code in a new interpreter, away from the repository's root; returns its stdout, fails with its stderr."""
    elsewhere = tmp_path_factory.mktemp("fresh")

    def run(code: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=elsewhere,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model_folder(variant, overflow) → a folder built once a session. Variants: small_families.BUILDERS.

    overflow: the builders', or "inside", see overflows.py.
    """
    from overflows import overflow_inside
    from small_families import BUILDERS
    from small_wan import build_wan

    _leave_imports_out_of_garbage_collection()
    root = tmp_path_factory.mktemp("models")
    builders = {
        **BUILDERS,
        "wan": build_wan,
        "wan-ti2v": partial(build_wan, ti2v=True),
        "wan-two": partial(build_wan, two=True),
    }

    def folder(variant: str = "2b", overflow: str = "none") -> Path:
        path = root / f"{variant}-{overflow}"
        if path.exists():
            return path
        if overflow == "inside":
            return overflow_inside(shutil.copytree(folder(variant), path))
        options = {} if overflow == "none" else {"overflow": overflow}  # Stable Video Diffusion's has no overflow
        return builders[variant](path, **options)

    return folder


def _leave_imports_out_of_garbage_collection() -> None:
    """Each component that is loaded or let go is followed by a garbage collection, which would look at what these
    modules hold every time: more than half of a test's time. Called before there is any pipeline."""
    import diffusers
    import peft  # noqa: F401
    from comfyui_onediff_guard.pipelines.families.table import FAMILIES
    from transformers import CLIPVisionModelWithProjection, GlmModel, T5EncoderModel  # noqa: F401

    for pipeline in FAMILIES:
        getattr(diffusers, pipeline)
    gc.collect()
    gc.freeze()
