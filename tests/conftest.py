"""Fixtures and hooks of all tests: tiers, a clean process and caches for each test, a fresh interpreter."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import process_state
import pytest
import reliability
import shared_models
import tiers

# Set before any conftest.py imports torch, which reads it at import. More threads than cores make tests many times
# slower, and a forked child would wait forever for threads that it does not have.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
SERVER_MODULES = (
    "in_comfyui",
    "in_browser",
    "cached_reports",
    "hundred_prompts",
    "in_old_comfyui",
)  # test modules of tests/comfyui that share one server per ComfyUI


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=tiers.TIERS, default="all", help="how much to run, see tests/support/tiers.py")
    parser.addoption("--write-figures", action="store_true", help="write docs/reliability.md")


def pytest_configure(config: pytest.Config) -> None:
    """Set the tier, hypothesis' profile (random examples in `make test-all` only) and cache folders for this run alone.
    A shell makes commands that it starts with `&` ignore Ctrl+C, but tests send Ctrl+C to what they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    tier = config.getoption("--tier")
    hypothesis.settings.register_profile("all", deadline=None)
    hypothesis.settings.register_profile("smaller", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("all" if tier == "all" else "smaller")
    os.environ[tiers.VARIABLE] = tier
    if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):  # without this, PyTorch's attention raises in bf16
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    if not hasattr(config, "workerinput"):  # a worker of xdist inherits the folders of the run
        for variable, name in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), (shared_models.VARIABLE, "models")):
            folder = os.environ[variable] = tempfile.mkdtemp(prefix=f"onediff-guard-{name}-")
            config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files and folders in which the tier runs nothing, and so their conftest.py."""
    listed = tiers.files(config.getoption("--tier"))
    if listed is None or not (collection_path.match("test_*.py") or collection_path.is_dir()):
        return None
    name = collection_path.relative_to(ROOT).as_posix() + "/" * collection_path.is_dir()
    within = any(name == each or (each.endswith("/") and name.startswith(each)) for each in listed)
    return None if within or (name.endswith("/") and any(each.startswith(name) for each in listed)) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are not in the tier."""
    tier, names = config.getoption("--tier"), [item.nodeid for item in items]
    selected = tiers.selected(tier, names)
    if tier == "slow":
        selected &= tiers.covering((item.nodeid, *tiers.axes(item)) for item in items if item.nodeid in selected)
    whole = config.args == config.getini("testpaths")
    whole = whole and not config.getoption("keyword") and not config.getoption("ignore")
    if whole and (wrong := tiers.unmatched(tier, names)):
        raise pytest.UsageError(f"tests/tiers.toml names unknown tests: {', '.join(sorted(wrong))}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected])
    items[:] = [item for item in items if item.nodeid in selected]
    tests_in = Counter(_process_of(item.nodeid) for item in items)
    items.sort(  # tests that share a server take longest, then tests in files with few tests
        key=lambda item: (not _process_of(item.nodeid).startswith("server"), tests_in[_process_of(item.nodeid)])
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a test changed a shared model."""
    if not hasattr(session.config, "workerinput") and shared_models.changed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the reliability figures that tests measured, and write them with --write-figures."""
    if hasattr(config, "workerinput"):  # a worker of xdist: the main process prints for all
        return
    if figures := reliability.collect_figures(terminalreporter.stats.get("passed", [])):
        terminalreporter.section("figures")
        for row in figures:
            terminalreporter.write_line(f"{row['what']}: {row['figure']}")
        if config.getoption("--write-figures"):
            terminalreporter.write_line(f"written: {reliability.write(figures)}")
    if changed := shared_models.changed():
        terminalreporter.section("the run fails", red=True)
        for name in changed:
            terminalreporter.write_line(f"changed by a test, though all tests share it: {name}", red=True)


def _process_of(nodeid: str) -> str:
    """The name of the process for a test: by module and ComfyUI; tests that share a server share a process."""
    module = nodeid.partition("::")[0]
    group = "server" if any(name in module for name in SERVER_MODULES) else module
    return f"{group} {tiers.leg_of(nodeid)}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _process_of(nodeid)

    config.option.loadscopereorder = False  # run tests in the order of collection
    return ByModule(config, log)


@pytest.fixture(autouse=True, scope="module")
def _frozen_modules() -> list[int]:
    """Number of imported modules at the last `gc.freeze` in a test file; see `_freeze_modules`."""
    return [0]


@pytest.fixture(autouse=True)
def _freeze_modules(_frozen_modules: list[int]) -> None:
    """Exclude the objects of imported modules from garbage collection: at the first test of a file, and after imports.

    Loading or dropping a component starts a collection, which scanned all of them each time: a third of the time of
    tests that run models.
    """
    if len(sys.modules) > _frozen_modules[0] + 20:
        gc.collect()
        gc.freeze()
        _frozen_modules[0] = len(sys.modules)


@pytest.fixture(autouse=True)
def process_as_before(_freeze_modules: None) -> Iterator[None]:
    """Fail a test that leaves anything patched, set, open or running."""
    modules, before = [*sys.modules], process_state.read()
    yield
    if left := process_state.left_behind(before, modules):
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def _profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Numbered folders, one for each test: `tmp_path_factory.mktemp` would list all existing ones each time."""
    parent = tmp_path_factory.mktemp("profiles")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _isolate_caches(
    process_as_before: None,
    _profiles: Iterator[Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep no model, profile or compiled code of a test for the next test or for the user."""
    if stores := sys.modules.get("comfyui_onediff_guard.pipelines.weights.components"):
        stores._STORES.clear()  # a store that a reference cycle keeps alive must not be used again
    monkeypatch.setenv("ONEDIFF_GUARD_PROFILES", str(next(_profiles)))
    monkeypatch.setenv("ONEDIFF_GUARD_SELFTEST", str(tmp_path_factory.getbasetemp() / "no self-test was run"))
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "0")


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """figure(line, value): record a measured value for docs/reliability.md."""

    def record(line: str, value: object) -> None:
        record_property(f"{reliability.PREFIX}{line}", str(value))

    return record


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that is both the repository and the package."""
    return ROOT


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Run code in a new interpreter outside the repository; return its stdout, or fail with its stderr."""
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
def model_folder() -> Callable[..., Path]:
    """model_folder(variant, overflow) → a folder that all tests share, see shared_models.model_folder."""
    return shared_models.model_folder
