"""What all tests share: tiers, the repository's root, and a process of its own for what must start from nothing."""

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

# Before a folder's own conftest.py imports torch, which reads it then: threads that wait for each other's cores cost
# many times more, and a forked child waits forever for those that it does not have.
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
SERVED = (
    "in_comfyui",
    "in_browser",
    "cached_reports",
    "hundred_prompts",
    "in_old_comfyui",
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
    if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):  # without this, PyTorch's attention raises in bf16
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
    if not hasattr(config, "workerinput"):  # else a process of a run whose folders stand in the environment
        for variable, what in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), (shared_models.VARIABLE, "models")):
            folder = os.environ[variable] = tempfile.mkdtemp(prefix=f"onediff-guard-{what}-")
            config.add_cleanup(partial(shutil.rmtree, folder, ignore_errors=True))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which the tier runs nothing, and no conftest.py of a folder of which it runs nothing."""
    listed = tiers.files(config.getoption("--tier"))
    if listed is None or not (collection_path.match("test_*.py") or collection_path.is_dir()):
        return None
    name = collection_path.relative_to(ROOT).as_posix() + "/" * collection_path.is_dir()
    within = any(name == each or (each.endswith("/") and name.startswith(each)) for each in listed)
    return None if within or (name.endswith("/") and any(each.startswith(name) for each in listed)) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the tier does not run."""
    tier, names = config.getoption("--tier"), [item.nodeid for item in items]
    selected = tiers.selected(tier, names)
    if tier == "slow":
        selected &= tiers.covering((item.nodeid, *tiers.axes(item)) for item in items if item.nodeid in selected)
    whole = config.args == config.getini("testpaths")
    whole = whole and not config.getoption("keyword") and not config.getoption("ignore")
    if whole and (wrong := tiers.unfitting(tier, names)):
        raise pytest.UsageError(f"tests/tiers.toml names what is no test: {', '.join(sorted(wrong))}")
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in selected])
    items[:] = [item for item in items if item.nodeid in selected]
    tests_in = Counter(_one_process(item.nodeid) for item in items)
    items.sort(  # what shares a server takes longest, and files of few tests have the longest of them
        key=lambda item: (not _one_process(item.nodeid).startswith("server"), tests_in[_one_process(item.nodeid)])
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run fails whose tests changed a model that they share."""
    if not hasattr(session.config, "workerinput") and shared_models.changed():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what tests measured of reliability, and write it down where that was asked for."""
    if hasattr(config, "workerinput"):  # a process of a run that has another one to tell of it all
        return
    if figures := reliability.found(terminalreporter.stats.get("passed", [])):
        terminalreporter.section("figures")
        for row in figures:
            terminalreporter.write_line(f"{row['what']}: {row['figure']}")
        if config.getoption("--write-figures"):
            terminalreporter.write_line(f"written: {reliability.write(figures)}")
    if changed := shared_models.changed():
        terminalreporter.section("the run fails", red=True)
        for name in changed:
            terminalreporter.write_line(f"changed by a test, though all tests share it: {name}", red=True)


def _one_process(nodeid: str) -> str:
    """What goes to one process: a module's tests in one ComfyUI, and all that share a server of it."""
    module = nodeid.partition("::")[0]
    what = "server" if any(name in module for name in SERVED) else module
    return f"{what} {tiers.leg_of(nodeid)}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _one_process(nodeid)

    config.option.loadscopereorder = False  # what is collected first runs first
    return ByModule(config, log)


@pytest.fixture(autouse=True, scope="module")
def _frozen_modules() -> list[int]:
    """How many modules were imported at the last `gc.freeze` of a test file; see `_leave_modules_out`."""
    return [0]


@pytest.fixture(autouse=True)
def _leave_modules_out(_frozen_modules: list[int]) -> None:
    """Leave what imported modules hold out of garbage collection: at the first test of a file, and after imports.

    A component that is loaded or dropped is followed by a collection, which looked at all of it each time: a third of
    the time of tests that run models.
    """
    if len(sys.modules) > _frozen_modules[0] + 20:
        gc.collect()
        gc.freeze()
        _frozen_modules[0] = len(sys.modules)


@pytest.fixture(autouse=True)
def process_as_before(_leave_modules_out: None) -> Iterator[None]:
    """A test leaves the process as it found it: nothing patched, set, open or running that was not."""
    modules, before = [*sys.modules], process_state.read()
    yield
    if left := process_state.left_behind(before, modules):
        pytest.fail("left behind:\n" + "\n".join(left), pytrace=False)


@pytest.fixture(scope="session")
def _profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for each test that asks, by its number: pytest's own are numbered by a look at all there are."""
    parent = tmp_path_factory.mktemp("profiles")
    return (parent / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def _kept_elsewhere(
    process_as_before: None,
    _profiles: Iterator[Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a test's runs load, learn and compile is not kept for the next test, nor for whoever runs the tests."""
    if stores := sys.modules.get("comfyui_onediff_guard.pipelines.weights.components"):
        stores._STORES.clear()  # one that a reference cycle keeps is not found again
    monkeypatch.setenv("ONEDIFF_GUARD_PROFILES", str(next(_profiles)))
    monkeypatch.setenv("ONEDIFF_GUARD_SELFTEST", str(tmp_path_factory.getbasetemp() / "no self-test was run"))
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
def model_folder() -> Callable[..., Path]:
    """model_folder(variant, overflow) → a folder that all tests of the run share, see shared_models.model_folder."""
    return shared_models.model_folder
