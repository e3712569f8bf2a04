"""Runs in several threads of one process: each comes to what it comes to alone. That the process is what it was, is
looked at after every test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from at_once import HANG_SECONDS, at_once
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.errors import RunFailedError
from comfyui_onediff_guard.headless.hosts.local import run_local
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR, TRITON
from comfyui_onediff_guard.pipelines.compile.feature import while_compiling
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.folder import family_of
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora, load
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Component, Precision
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE
from tiers import drawn
from trained_lora import train_lora


@pytest.fixture(scope="module")
def lora(model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Lora:
    return train_lora(tmp_path_factory.mktemp("loras"), model_folder("2b"))


def opened(folder: Path, precision: str = "fp32", offload: str = "none", kernel: str = "") -> PipelineHandle:
    options: dict[str, Any] = {"backend": "eager", "offload": offload, "placement": PlainPlacement()}
    handle = load(folder, family_of(folder), precision=Precision(precision), **options)
    return replace(handle, compile_options=CompileOptions(attention=kernel)) if kernel else handle


def frames(handle: PipelineHandle, prompt: str = "a red kite", steps: int = 2) -> torch.Tensor:
    (positive, negative), _ = encode_prompts(handle, [prompt, "grey"])
    sizes = SampleSettings(32, 32, steps=steps, seed=3, frames=5, guidance_scale=6.0)
    latents, _ = sample(handle, positive, negative, sizes)
    return decode(handle, latents)[0]


def loading_anew(handle: PipelineHandle) -> torch.Tensor:
    """All is read, and learned, again."""
    with handle.store.turn():
        handle.store.prompts.clear()
        handle.store.learned.clear()
        for name in tuple(handle.store.loaded()):
            handle.store.drop(name)
        handle.store._unweighted.clear()
    return frames(handle)


def repeated(times: int, run: Callable[[], torch.Tensor], expected: torch.Tensor) -> Callable[[], list[bool]]:
    return lambda: [torch.equal(run(), expected) for _ in range(times)]


def alone(make: Callable[[], PipelineHandle]) -> torch.Tensor:
    stores._STORES.clear()
    with torch.inference_mode():
        return frames(make())


@pytest.fixture
def slow_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules stay half made for longer than a step takes: without turns, something is seen of it."""
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


def test_a_stage_loads_while_another_ones_store_is_held(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (opened(model_folder(size)).stage(Component.VAE_DECODE, None) for size in ("2b", "5b"))
    loading = first.handle.store.module

    def beside_the_second(*args: Any, **kwargs: Any) -> torch.nn.Module:
        other.submit(lambda: second.module).result(HANG_SECONDS)
        return loading(*args, **kwargs)

    monkeypatch.setattr(first.handle.store, "module", beside_the_second)
    with ThreadPoolExecutor(1) as other:
        assert first.module is not second.module


def test_two_threads_that_load_and_run_are_right_each_time(
    model_folder: Callable[..., Path], slow_loading: None, figure: Callable[[str, object], None]
) -> None:
    times = drawn(all_=100, fewer=4)
    makers = [lambda: opened(model_folder("2b"), "bf16"), lambda: opened(model_folder("5b"), "fp16")]
    expected = [alone(make) for make in makers]
    handles = [make() for make in makers]
    jobs = [
        repeated(times, lambda handle=handle: loading_anew(handle), right)
        for handle, right in zip(handles, expected, strict=True)
    ]
    right = at_once(*jobs)
    failures = sum(not each for thread in right for each in thread)
    figure("two threads that load and run at the same time: runs that were not right", f"{failures} of {2 * times}")
    assert right == [[True] * times] * 2


@pytest.mark.parametrize("offload", ["none", "model"])
def test_one_store_in_two_precisions(model_folder: Callable[..., Path], offload: str) -> None:
    times = drawn(all_=20, fewer=2)
    makers = [
        lambda precision=precision: opened(model_folder("2b"), precision, offload) for precision in ("fp32", "bf16")
    ]
    expected = [alone(make) for make in makers]
    stores._STORES.clear()
    handles = [make() for make in makers]
    assert handles[0].store is handles[1].store
    jobs = [
        repeated(times, lambda handle=handle: frames(handle), right)
        for handle, right in zip(handles, expected, strict=True)
    ]
    assert at_once(*jobs) == [[True] * times] * 2


def test_two_kernels_of_attention_and_a_lora(model_folder: Callable[..., Path], lora: Lora) -> None:
    times = drawn(all_=20, fewer=2)
    makers = [
        lambda: opened(model_folder("2b"), kernel="math"),
        lambda: opened(model_folder("5b"), kernel="flash"),
        lambda: add_lora(opened(model_folder("2b", "inside")), lora),
    ]
    expected = [alone(make) for make in makers]
    handles = [make() for make in makers]
    jobs = [
        repeated(times, lambda handle=handle: loading_anew(handle), right)
        for handle, right in zip(handles, expected, strict=True)
    ]
    assert at_once(*jobs) == [[True] * times] * 3


def test_who_samples_is_not_disturbed_by_who_loads(model_folder: Callable[..., Path], slow_loading: None) -> None:
    steps = drawn(all_=200, fewer=20)
    sampler, loader = opened(model_folder("5b"), "fp32"), opened(model_folder("2b"), "fp16")
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


def test_a_load_that_fails_leaves_the_default_dtype_as_it_was(
    model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such layer")

    handle = opened(model_folder("2b"), "fp16")
    monkeypatch.setattr(diffusers.CogVideoXTransformer3DModel, "from_config", broken)
    with pytest.raises(ValueError, match="no such layer"):
        handle.store.module("transformer", "fp16")
    assert torch.get_default_dtype() == torch.float32


def test_a_run_that_times_out_stops_no_other(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Patient:
        """Reports progress until the other run has ended."""

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
            with pytest.raises(RunFailedError, match="not done after"):
                run(until_stopped=True, timeout=0.1)
        finally:
            ended.set()

    patient, _ = at_once(lambda: run(until_stopped=False, timeout=None), timed_out)
    assert patient.outputs == {}


def compiling(folder: Path, compiled: Path) -> PipelineHandle:
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    handle = load(folder, COGVIDEOX, precision=Precision("fp32"), **options, compiled=compiled)
    return replace(handle, backend=BackendChoice("inductor", "asked for"))


@pytest.fixture
def nothing_exported(process_as_before: None) -> Generator[None]:
    """Compiled code is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LIMIT_VARIABLE, "2")
        for variable in (INDUCTOR, TRITON):
            patch.delenv(variable, raising=False)
        yield


def test_two_runs_that_compile_have_inductors_folders_in_turn(
    model_folder: Callable[..., Path], tmp_path: Path, nothing_exported: None
) -> None:
    first, second = (compiling(model_folder(name), tmp_path) for name in ("2b", "5b"))
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
    assert folders[1] == "waiting for another run that compiles"
    assert len({*folders}) == 3
    assert INDUCTOR not in os.environ and TRITON not in os.environ
    assert notes == [], "neither took the other's folder for one that the user exported"


def test_a_run_that_waits_to_compile_can_be_interrupted(
    model_folder: Callable[..., Path], tmp_path: Path, nothing_exported: None
) -> None:
    handle = compiling(model_folder("2b"), tmp_path)
    report = handle.report(handle.plan(Component.DENOISER))

    def interrupted(line: str) -> None:
        raise host.Interrupted(line)

    def other() -> None:
        with while_compiling(handle, report, interrupted):
            raise AssertionError("both are inside")

    waiting = pytest.raises(host.Interrupted, match="waiting for another run")
    with while_compiling(handle, report, lambda _: None), waiting:
        at_once(other)
