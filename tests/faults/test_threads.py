"""Runs in several threads of one process: each gives the same result as alone. A fixture compares the process state
after every test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import shared_models
import torch
import torch._dynamo
from at_once import HANG_SECONDS, at_once
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.errors import RunFailedError
from comfyui_onediff_guard.headless.hosts.local import run_local
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR, TRITON
from comfyui_onediff_guard.pipelines.compile.compiled_blocks import while_compiling
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE
from small_runs import opened
from tiers import by_tier
from trained_lora import train_lora


def frames(handle: PipelineHandle, steps: int = 2) -> torch.Tensor:
    (positive, negative), _ = encode_prompts(handle, ["a red kite", "grey"])
    sizes = SampleSettings(32, 32, steps=steps, seed=3, frames=5, guidance_scale=6.0)
    latents, _ = sample(handle, positive, negative, sizes)
    return decode(handle, latents)[0]


def reload_and_run(handle: PipelineHandle) -> torch.Tensor:
    """Load and learn everything again, then run."""
    with handle.store.turn():
        handle.store.prompts.clear()
        handle.store.learned.clear()
        for name in tuple(handle.store.loaded()):
            handle.store.drop(name)
        handle.store._unweighted.clear()
    return frames(handle)


@pytest.fixture
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading slower than a step: without the gate, other threads would see half-built modules."""
    from diffusers.configuration_utils import ConfigMixin
    from transformers import modeling_utils

    made, local_dtype = ConfigMixin.from_config.__func__, modeling_utils.local_torch_dtype

    def from_config(cls: type, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.03)
        return made(cls, *args, **kwargs)

    @contextmanager
    def local_torch_dtype(*args: Any, **kwargs: Any) -> Generator[None]:
        with local_dtype(*args, **kwargs):
            time.sleep(0.03)
            yield

    monkeypatch.setattr(ConfigMixin, "from_config", classmethod(from_config))
    monkeypatch.setattr(modeling_utils, "local_torch_dtype", local_torch_dtype)


def test_stage_loads_while_another_store_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (opened(model).stage(Component.VAE_DECODE, None) for model in ("2b", "5b"))
    loading = first.handle.store.module

    def beside_the_second(*args: Any, **kwargs: Any) -> torch.nn.Module:
        other.submit(lambda: second.module).result(HANG_SECONDS)
        return loading(*args, **kwargs)

    monkeypatch.setattr(first.handle.store, "module", beside_the_second)
    with ThreadPoolExecutor(1) as other:
        assert first.module is not second.module


def with_kernel(model: str, kernel: str) -> PipelineHandle:
    return replace(opened(model), compile_options=CompileOptions(attention=kernel))


CASES: dict[str, tuple[Callable[[PipelineHandle], torch.Tensor], tuple[Callable[[Path], PipelineHandle], ...]]] = {
    "two loading": (reload_and_run, (lambda _: opened("2b", "none", "bf16"), lambda _: opened("5b", "none", "fp16"))),
    "one store in two precisions": (frames, (lambda _: opened("2b"), lambda _: opened("2b", "none", "bf16"))),
    "an offloaded store": (frames, (lambda _: opened("2b", "model"), lambda _: opened("2b", "model", "bf16"))),
    "two attention kernels and a LoRA": (
        reload_and_run,
        (
            lambda _: with_kernel("2b", "math"),
            lambda _: with_kernel("5b", "flash"),
            lambda folder: add_lora(
                opened("2b", overflow="inside"), train_lora(folder, shared_models.model_folder("2b"))
            ),
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_threads_that_load_and_run_get_bit_equal_results(
    tmp_path: Path, slow_loading: None, figure: Callable[[str, object], None], case: str
) -> None:
    run, makers = CASES[case]
    times = by_tier(all_=100 if case == "two loading" else 20, fewer=4 if case == "two loading" else 2)
    expected = []
    for make in makers:
        stores._STORES.clear()
        with torch.inference_mode():
            expected.append(frames(make(tmp_path)))
    stores._STORES.clear()
    handles = [make(tmp_path) for make in makers]
    assert len({id(handle.store) for handle in handles}) == (len(handles) if run is reload_and_run else 1)

    def repeated(handle: PipelineHandle, right: torch.Tensor) -> list[bool]:
        return [torch.equal(run(handle), right) for _ in range(times)]

    right = at_once(*(partial(repeated, *each) for each in zip(handles, expected, strict=True)))
    failures = sum(not each for thread in right for each in thread)
    figure(f"threads, {case}: runs with a wrong result", f"{failures} of {len(handles) * times}")
    assert right == [[True] * times] * len(handles)


def test_sampling_is_not_disturbed_by_loading_in_another_thread(slow_loading: None) -> None:
    steps = by_tier(all_=200, fewer=20)
    sampler, loader = opened("5b"), opened("2b", "none", "fp16")
    with torch.inference_mode():
        expected = frames(sampler, steps=steps)
    done, loads = threading.Event(), []

    def load_often() -> None:
        while not done.is_set():
            loads.append(loader.store.module("transformer", "fp16"))
            loader.store.drop("transformer")

    def sample_once() -> torch.Tensor:
        try:
            return frames(sampler, steps=steps)
        finally:
            done.set()

    found, _ = at_once(sample_once, load_often)
    assert torch.equal(found, expected)
    assert len(loads) > 1
    assert all(not p.is_meta and p.dtype == torch.float16 for module in loads for p in module.parameters())


def test_timed_out_run_does_not_stop_another(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Patient:
        """Reports progress until the other run ends."""

        RETURN_TYPES = ()
        FUNCTION = "go"
        OUTPUT_NODE = True
        INPUT_TYPES = classmethod(lambda cls: {"required": {"until_stopped": ("BOOLEAN", {})}})

        def go(self, until_stopped: bool) -> None:
            with host.Progress(10**9, None) as progress:
                for step in range(10**9):
                    begun.set()
                    if ended.wait(0.01) and not until_stopped:
                        break
                    progress.update(step, "waiting")

    def run(until_stopped: bool, timeout: float | None) -> Any:
        graph = {"1": {"class_type": "Patient", "inputs": {"until_stopped": until_stopped}}}
        folders: dict[str, Any] = {"models": [tmp_path], "input_dir": tmp_path, "output_dir": tmp_path}
        return run_local(graph, **folders, classes={"Patient": Patient}, timeout=timeout)

    def timed_out() -> None:
        begun.wait(HANG_SECONDS)
        try:
            with pytest.raises(RunFailedError, match="did not finish within"):
                run(until_stopped=True, timeout=0.1)
        finally:
            ended.set()

    patient, _ = at_once(lambda: run(until_stopped=False, timeout=None), timed_out)
    assert patient.outputs == {}


def compiling(model: str, compiled: Path) -> PipelineHandle:
    return replace(opened(model, compiled=compiled), backend=BackendChoice("inductor", "as you chose"))


@pytest.fixture
def compile_cache_enabled(process_as_before: None) -> Generator[None]:
    """The compile cache is on, and no variable names inductor's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIMIT_VARIABLE, "2")
        for variable in (INDUCTOR, TRITON):
            patch.delenv(variable, raising=False)
        yield


def test_compiling_runs_use_inductor_folders_one_at_a_time(tmp_path: Path, compile_cache_enabled: None) -> None:
    first, second = (compiling(name, tmp_path) for name in ("2b", "5b"))
    waits, notes, folders = threading.Event(), [], []

    def run(handle: PipelineHandle, begun: Sequence[threading.Event], tell: Callable[[str], None]) -> None:
        report = handle.report(handle.plan(Component.DENOISER))
        with while_compiling(handle, report, tell):
            for event in begun:
                event.set()
            mine = os.environ[INDUCTOR]
            folders.append(mine)
            assert handle is second or waits.wait(HANG_SECONDS)
            assert os.environ[INDUCTOR] == mine
        notes.extend(note for note in report.notes if "compiled code" in note)

    inside = threading.Event()

    def after_the_first() -> None:
        inside.wait(HANG_SECONDS)
        run(second, (), lambda line: (waits.set(), folders.append(line)) if not waits.is_set() else None)

    at_once(lambda: run(first, (inside,), lambda _: None), after_the_first)
    assert folders[1] == "waiting until another run has compiled"
    assert len({*folders}) == 3
    assert INDUCTOR not in os.environ and TRITON not in os.environ
    assert notes == [], "no run takes the other's folder for the user's"


def test_run_waiting_to_compile_can_be_interrupted(tmp_path: Path, compile_cache_enabled: None) -> None:
    handle = compiling("2b", tmp_path)
    report = handle.report(handle.plan(Component.DENOISER))

    def interrupted(line: str) -> None:
        raise host.Interrupted(line)

    def other() -> None:
        with while_compiling(handle, report, interrupted):
            raise AssertionError("both runs compile")

    waiting = pytest.raises(host.Interrupted, match="waiting until another run")
    with while_compiling(handle, report, lambda _: None), waiting:
        at_once(other)
