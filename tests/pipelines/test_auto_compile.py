"""Backend 'auto' compiles once eager calls have taken as long as a compile: the rule, and the sampler that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from as_comfyui import GRAPHS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.compile import auto_compile
from comfyui_onediff_guard.pipelines.compile.auto_compile import COMPILE_SECONDS, decide, record
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice
from comfyui_onediff_guard.pipelines.compile.cache import SUFFIX
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.precision.report import StepRecord

AUTO = BackendChoice("inductor", "auto: first choice", automatic=True)


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_compile, "_eager_seconds", {})


def step(seconds: float, rerun: float = 0.0) -> StepRecord:
    again: Any = SimpleNamespace(seconds=rerun) if rerun else None
    return StepRecord("denoiser", 0, None, "fp16", "finite", seconds, 1.0, rerun=again)


def ran(backend: str, *steps: StepRecord, key: str = "a model", graphs: int | None = None) -> str:
    """Record a run with a backend → the backend of the next one."""
    record(key, SimpleNamespace(backend=backend, graphs=graphs), steps)  # pyright: ignore[reportArgumentType]
    return decide(AUTO, key).name


def test_auto_is_eager_until_eager_calls_took_as_long_as_compile() -> None:
    first = decide(AUTO, "a model")
    assert (first.name, first.automatic) == (EAGER, True) and "not compiled yet: eager calls took 0 s" in first.reason
    assert ran(EAGER, step(COMPILE_SECONDS - 2), step(100.0, rerun=99.0)) == EAGER, "a rerun is not compiled"
    assert ran(EAGER, step(1.0)) == "inductor"
    assert decide(AUTO, "another model").name == EAGER
    assert f"eager calls took {COMPILE_SECONDS:g} s" in decide(AUTO, "a model").reason


def test_compiled_code_is_used_at_once() -> None:
    assert ran("inductor", step(1.0), key="warmed up", graphs=1) == "inductor"
    assert ran("inductor", step(1.0), key="warmed up", graphs=0) == "inductor"
    assert decide(AUTO, "on disk", kept=True).reason == "auto: first choice; compiled already"


@pytest.mark.parametrize("calls", [1, 4, 50])
@pytest.mark.parametrize(("eager", "compiled"), [(0.05, 0.04), (1.0, 0.8), (2.0, 1.0), (10.0, 9.9)])
def test_auto_costs_at_most_twice_the_optimum(calls: int, eager: float, compiled: float) -> None:
    """Plus one eager run, since the time of a run is known only after it."""
    total, name = 0.0, EAGER
    for runs in range(1, 500):
        compiles = name != EAGER and auto_compile._eager_seconds["a model"] < math.inf
        total += calls * (eager if name == EAGER else compiled) + (COMPILE_SECONDS if compiles else 0.0)
        name = ran(name, *[step(eager)] * calls, graphs=1 if name != EAGER else None)
        best = min(runs * calls * eager, runs * calls * compiled + COMPILE_SECONDS)
        assert total <= 2 * best + calls * eager


@pytest.fixture
def pipeline(
    model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced_alone: None
) -> Callable[[str], PipelineHandle]:
    """Loads a small CogVideoX with a backend, through its node."""
    folder = model_folder("2b")
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED", str(tmp_path / "compiled"))

    def load(backend: str) -> PipelineHandle:
        with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
            return GRAPHS["2b"].load(folder, precision="fp32", backend=backend)

    load("eager").store.compiled.clear()
    return load


def sampled(handle: PipelineHandle) -> str:
    """Sample two steps, through the node → the report."""
    return GRAPHS["2b"].sample(handle, GRAPHS["2b"].encode(handle)["result"])["result"][1]


def test_sampler_compiles_in_run_after_eager_ones(
    pipeline: Callable[[str], PipelineHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_compile, "COMPILE_SECONDS", 1e-9)
    assert "backend: eager (auto: not compiled yet" in sampled(pipeline("auto"))
    assert "backend: inductor" in sampled(pipeline("auto"))
    assert "compiled already" in sampled(pipeline("auto"))
    assert "as you chose: nothing is compiled" in sampled(pipeline("eager"))
    monkeypatch.setattr(auto_compile, "_eager_seconds", {})
    assert "backend: inductor (as you chose" in sampled(pipeline("inductor")), "in the first run"
    assert auto_compile._eager_seconds == {}, "nothing is counted where 'auto' does not decide"


def test_code_compiled_by_earlier_process_is_used_in_first_run(
    pipeline: Callable[[str], PipelineHandle], tmp_path: Path
) -> None:
    handle = pipeline("auto")
    kept = replace(handle, compiled=tmp_path / "kept")
    assert "not compiled yet" in sampled(kept)
    _, key = auto_compile.with_backend_of_run(kept, None)
    folder = tmp_path / "kept" / f"{key}{SUFFIX}"
    folder.mkdir(parents=True)
    assert auto_compile.with_backend_of_run(kept, None)[0].backend.name == "eager", "the folder is empty"
    (folder / "code.py").touch()
    assert auto_compile.with_backend_of_run(kept, None)[0].backend.name == "inductor"
