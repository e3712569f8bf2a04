"""NaN Guard (native) and its probe with both guidance halves at the same time, each on its own device.

Only the devices are simulated: "cpu" and "cpu:1" are two devices to ComfyUI, and one to PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import as_comfyui_code, difference, error_of, guarded, module, texts, wrapped
from native_models import CPU, LAYOUTS, RECENT, Layout, in_fp32, make_model, sample
from probe import facts, probed

MANAGEMENT = import_module("comfy.model_management")
AVAILABLE = hasattr(MANAGEMENT, "get_all_torch_devices")
pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this ComfyUI computes guidance halves on one GPU (before 0.23)")
OTHER = torch.device("cpu", 1)
STEPS = 4
RUNS = 3
GUIDED = {name: replace(LAYOUTS[name], cfg=4.0) for name in ("sd15", "flux", *RECENT)}  # Flux clips overflows
SD15, FLUX = GUIDED["sd15"], GUIDED["flux"]
WORK_UNITS = "multigpu"


def split(patcher: Any, make: Callable[[], Any]) -> Any:
    """Split with ComfyUI's own node. make: makes the same model again, as a loader does."""
    with patch.object(MANAGEMENT, "get_all_torch_devices", lambda **_: [CPU, OTHER]):
        MANAGEMENT.current_loaded_models.clear()  # the node fails on a deleted model
        patcher.cached_patcher_init = (make, ())
        return import_module("comfy_extras.nodes_multigpu").MultiGPUCFGSplitNode.execute(patcher, 2).args[0]


def on_two(layout: Layout, **model: Any) -> Any:
    make = partial(make_model, layout, **model)
    return split(make(), make)


def exact_on_two(patcher: Any) -> Any:
    """Return the fp32 reference. It is split only for SeedVR2, where computing halves together changes the result."""
    make = partial(in_fp32, patcher)
    return split(make(), make) if patcher.model.layout.config == "SeedVR2" else make()


def check_reports(reruns: int, runs: int = 1, steps: int = STEPS) -> None:
    """Check the reports of the latest runs."""
    endings = " fine.", "recomputed in fp32."
    reports = [text for text in texts if text.splitlines()[0].endswith(endings) and not text.startswith("call ")]
    how = f"{reruns} of {2 * steps} calls recomputed in fp32"
    expected = f"{steps} step{'s' * (steps > 1)}, {how if reruns else 'all fine' if steps > 1 else 'fine'}."
    assert len(reports) == runs and all(expected in text for text in reports), reports


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", GUIDED)
def test_each_half_is_recomputed_in_every_run(family: str, order: str) -> None:
    layout = GUIDED[family]
    make = partial(make_model, layout, hot=True)
    both = split(make(), make)
    exact = sample(exact_on_two(both), steps=STEPS)
    assert not difference(sample(both, steps=STEPS), exact) <= 0.1  # NaN, or finite but wrong
    threads: set[str] = set()

    @as_comfyui_code
    def record_thread(executor: Any, *args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        assert threading.current_thread() is not threading.main_thread()
        return executor(*args, **kwargs)

    patcher = wrapped(guarded(both) if order == "after" else split(guarded(make()), make), record_thread, "apply_model")
    for _ in range(RUNS):
        assert difference(sample(patcher, steps=STEPS), exact) <= layout.rounds
    check_reports(2 * STEPS, RUNS)
    calls = [text for text in texts if text.startswith("call ")]
    named = [f"call {n + 1}" for n in range(2 * STEPS)] * RUNS
    assert sorted(text.partition(":")[0] for text in calls) == sorted(named)
    assert not any("did not fail" in text for text in calls)  # each half found the layer in its own network
    assert len(threads) == 2 * RUNS


def test_fault_in_one_half_recomputes_one_call() -> None:
    """One call on the second device fails: the calls of the other half stay in half precision."""
    healthy, calls = on_two(SD15), list[torch.dtype]()
    exact = sample(in_fp32(healthy), steps=STEPS)

    @as_comfyui_code
    def fault(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = executor(x, *args, **kwargs)
        if args[-1]["multigpu_thread_device"] != OTHER:
            return made
        calls.append(x.dtype)
        return made * torch.inf if len(calls) == 2 else made

    made = sample(guarded(wrapped(healthy, fault)), steps=STEPS)
    assert 0 < difference(made, exact) <= 2e-2
    check_reports(1)
    assert calls.count(torch.float32) == 1


def test_clipping_in_one_half_is_detected_while_other_half_starts() -> None:
    """The other half's call starts while one half clips. Flux only clips, so nothing else shows the overflow."""
    both = on_two(FLUX, hot=True)
    exact = sample(in_fp32(both), steps=1)
    clipped, started = threading.Event(), threading.Event()

    def outside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if args[5]["multigpu_thread_device"] == OTHER:
            assert clipped.wait(60)
        return executor(*args, **kwargs)

    def inside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if args[-1]["multigpu_thread_device"] == OTHER:
            started.set()
        made = executor(*args, **kwargs)
        if args[-1]["multigpu_thread_device"] == CPU:
            clipped.set()
            assert started.wait(60)
        return made

    patcher = wrapped(guarded(wrapped(both, outside, "apply_model")), inside)
    assert difference(sample(patcher, steps=1), exact) <= 1e-5
    check_reports(2, steps=1)


@pytest.mark.parametrize(("scope", "reruns", "bound"), [("step", 8, 1e-5), ("learned", 2, 1e-2), ("run", 2, 1e-5)])
def test_each_half_reruns_by_its_own_scope(scope: str, reruns: int, bound: float) -> None:
    both = on_two(SD15, hot=True)
    exact = sample(in_fp32(both), steps=STEPS)
    patcher = guarded(wrapped(both, started_together()), scope=scope)
    assert difference(sample(patcher, steps=STEPS), exact) <= bound
    check_reports(reruns)


def started_together() -> Callable[..., Any]:
    """Start both first calls before one ends: otherwise the second call would use what the first one learned."""
    met, seen = threading.Barrier(2), set[int]()

    @as_comfyui_code
    def wait_for_both(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if (thread := threading.get_ident()) not in seen:
            seen.add(thread)
            met.wait(60)
        return executor(*args, **kwargs)

    return wait_for_both


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["attempt", "rerun"])
@pytest.mark.parametrize("error", [ValueError("of the test"), MANAGEMENT.InterruptProcessingException()], ids=str)
def test_error_in_one_half_leaves_no_state_behind(error: BaseException, dtype: torch.dtype) -> None:
    """One thread raises an error while the other one computes."""
    both = on_two(SD15, hot=True)
    exact = sample(in_fp32(both), steps=STEPS)

    def fail(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args[-1]["multigpu_thread_device"] == OTHER and x.dtype is dtype:
            raise error
        return executor(x, *args, **kwargs)

    run = partial(sample, guarded(wrapped(both, fail)), steps=STEPS)
    if dtype is torch.float16 and isinstance(error, ValueError):  # the error is not raised in fp32
        assert difference(run(), exact) <= 1e-5
    else:
        with pytest.raises(type(error)):
            run()
    texts.clear()
    assert leftovers(both) == []
    assert difference(sample(guarded(both), steps=STEPS), exact) <= 1e-5
    check_reports(2 * STEPS)


def test_stop_policy_ends_run_from_worker_thread() -> None:
    both = on_two(SD15, hot=True)
    error = error_of(lambda: sample(guarded(both, on_failure="stop"), steps=STEPS))
    assert error.startswith("GuardStopped: denoiser, call 1: the output in fp16 is NaN or infinite")
    assert leftovers(both) == []


def leftovers(patcher: Any) -> list[str]:
    """Return settings, hooks and threads that are left."""
    held = {name: getattr(module("precision.upcast"), name) for name in ("EAGER_ONLY", "TF32", "FP32_ATTENTION")}
    held["_WHOLE_PRODUCTS"] = module("comfyui_host.rerun_layers")._WHOLE_PRODUCTS
    found = [name for name, setting in held.items() if setting.is_held]
    found += ["switches"] * len(module("precision.accumulation")._HOLDERS.current)
    models = [patcher.model, *(clone.model for clone in patcher.get_additional_models_with_key(WORK_UNITS))]
    found += ["hooks" for model in models for layer in model.modules() if layer._forward_hooks]
    return found + [thread.name for thread in threading.enumerate() if "_worker_loop" in thread.name]


def test_probe_measures_both_halves() -> None:
    one, two = (facts(probed(patcher)) for patcher in (make_model(SD15, hot=True), on_two(SD15, hot=True)))
    assert [entry["name"] for entry in two["worst"]] == [entry["name"] for entry in one["worst"]]
    for ours, theirs in zip(two["worst"], one["worst"], strict=True):
        assert ours["reach"] == pytest.approx(theirs["reach"], rel=1e-4)
    assert two["measured_steps"] == one["measured_steps"]


def test_easycache_keeps_state_of_other_half() -> None:
    """One half is recomputed while the other one has ended: the first half waits for the other."""
    cache = import_module("comfy_extras.nodes_easycache").EasyCacheNode
    kept: list[int] = []
    done = {step: threading.Event() for step in range(STEPS)}
    steps = {CPU: 0, OTHER: 0}

    def outside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        options = args[5]  # after x, t, c_concat, c_crossattn, control
        device = options["multigpu_thread_device"]
        if device == CPU:
            kept.append(len(options["easycache"].uuid_cache_diffs))
        made = executor(*args, **kwargs)
        if device == OTHER:
            done[steps[OTHER]].set()
        steps[device] += 1
        return made

    def inside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if args[-1]["multigpu_thread_device"] == CPU:
            done[steps[CPU]].wait(20)
        return executor(*args, **kwargs)

    patcher = guarded(wrapped(on_two(FLUX, hot=True), outside, "apply_model"))
    sample(cache.execute(wrapped(patcher, inside), 1e-9, 0.0, 1.0, False).args[0], steps=STEPS)
    assert kept == [0, 2, 2, 2]
    check_reports(2 * STEPS)
