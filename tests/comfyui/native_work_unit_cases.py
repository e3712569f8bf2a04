"""The guarded MODEL where ComfyUI computes guidance halves at the same time, each on a device of its own: run in
ComfyUI's interpreter, judged in test_native_work_units.py.

Only the devices are simulated: "cpu" and "cpu:1" are two to ComfyUI, and one to PyTorch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import CPU, LAYOUTS, Layout, in_fp32, make_model, sample
from native_probe_cases import facts, probed

OTHER = torch.device("cpu", 1)
STEPS = 4
RUNS = 3
GUIDED = {name: replace(LAYOUTS[name], cfg=4.0) for name in ("sd15", "flux")}  # Flux hides what overflows: it clips
SD15, FLUX = GUIDED["sd15"], GUIDED["flux"]
WORK_UNITS = "multigpu"
KINDS = import_module("comfy.patcher_extension").WrappersMP


def split(patcher: Any, make: Callable[[], Any]) -> Any:
    """By ComfyUI's own node. make: the same model anew, as a loader makes it."""
    management = import_module("comfy.model_management")
    devices, management.get_all_torch_devices = management.get_all_torch_devices, lambda **_: [CPU, OTHER]
    try:
        management.current_loaded_models.clear()  # the node stumbles over one that is gone
        patcher.cached_patcher_init = (make, ())
        return import_module("comfy_extras.nodes_multigpu").MultiGPUCFGSplitNode.execute(patcher, 2).args[0]
    finally:
        management.get_all_torch_devices = devices


def on_two(layout: Layout, **model: Any) -> Any:
    make = partial(make_model, layout, **model)
    return split(make(), make)


def guarded(patcher: Any, **policy: Any) -> Any:
    return node("model", patcher, **policy)


def wrapped(patcher: Any, wrapper: Callable[..., Any], kind: str = KINDS.DIFFUSION_MODEL) -> Any:
    clone = patcher.clone()
    clone.add_wrapper_with_key(kind, "test", wrapper)
    return clone


def reports() -> list[str]:
    return [text for text in said if "rerun" in text.splitlines()[0] and not text.startswith("call ")]


def case_overflowing() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, layout in GUIDED.items():
        both = on_two(layout, hot=True)
        results[f"{name}, fp32"] = sample(in_fp32(both, layout), layout, steps=STEPS)
        results[f"{name}, plain"] = sample(both, layout, steps=STEPS)
        for order, patcher in {
            "after": guarded(both),
            "before": split(guarded(make_model(layout, hot=True)), partial(make_model, layout, hot=True)),
        }.items():
            threads: set[str] = set()
            looked_at = wrapped(patcher, partial(_look, threads))
            said.clear()
            made = [sample(looked_at, layout, steps=STEPS) for _ in range(RUNS)]
            results[f"{name}, {order}, guarded"] = torch.stack(made)
            results[f"{name}, {order}, said"] = reports()
            results[f"{name}, {order}, calls said"] = [text for text in said if text.startswith("call ")]
            results[f"{name}, {order}, threads"] = len(threads)
    return results


def _look(threads: set[str], executor: Any, *args: Any, **kwargs: Any) -> Any:
    threads.add(threading.current_thread().name)
    assert threading.current_thread() is not threading.main_thread()
    return executor(*args, **kwargs)


def case_healthy() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, layout in GUIDED.items():
        both = on_two(layout)
        results[f"{name}, plain"] = sample(both, layout, steps=STEPS)
        said.clear()
        results[f"{name}, guarded"] = sample(guarded(both), layout, steps=STEPS)
        results[f"{name}, said"] = reports()
    return results


def case_one_half_fails() -> dict[str, Any]:
    """The second device's call of one step: the other half's stay in half precision."""
    healthy = on_two(SD15)
    results: dict[str, Any] = {"fp32": sample(in_fp32(healthy, SD15), SD15, steps=STEPS)}
    calls: list[torch.dtype] = []

    def fault(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        made = executor(x, *args, **kwargs)
        if args[-1]["multigpu_thread_device"] != OTHER:
            return made
        calls.append(x.dtype)
        return made * torch.inf if len(calls) == 2 else made

    said.clear()
    results["guarded"] = sample(guarded(wrapped(healthy, fault)), SD15, steps=STEPS)
    return results | {"said": reports(), "dtypes": [str(dtype) for dtype in calls]}


def case_one_begins_as_the_other_ends() -> dict[str, Any]:
    """What one half clipped, while the other's call begins: Flux, where that is all there is to see."""
    both = on_two(FLUX, hot=True)
    results: dict[str, Any] = {"fp32": sample(in_fp32(both, FLUX), FLUX, steps=1)}
    clipped, begun = threading.Event(), threading.Event()

    def outside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if args[5]["multigpu_thread_device"] == OTHER:
            assert clipped.wait(60)
        return executor(*args, **kwargs)

    def inside(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if args[-1]["multigpu_thread_device"] == OTHER:
            begun.set()
        made = executor(*args, **kwargs)
        if args[-1]["multigpu_thread_device"] == CPU:
            clipped.set()
            assert begun.wait(60)
        return made

    patcher = wrapped(guarded(wrapped(both, outside, KINDS.APPLY_MODEL)), inside)
    said.clear()
    return results | {"guarded": sample(patcher, FLUX, steps=1), "said": reports()}


def case_scopes() -> dict[str, Any]:
    """How far a rerun reaches, on each device by itself."""
    results: dict[str, Any] = {}
    for scope in ("step", "learned", "run"):
        both = on_two(SD15, hot=True)
        results[f"{scope}, fp32"] = sample(in_fp32(both, SD15), SD15, steps=STEPS)
        said.clear()
        patcher = guarded(wrapped(both, begun_together()), scope=scope)
        results[f"{scope}, guarded"] = sample(patcher, SD15, steps=STEPS)
        results[f"{scope}, said"] = reports()
    return results


def begun_together() -> Callable[..., Any]:
    """Both first calls begin before one of them ends: else the other would know already what that one learned."""
    met, seen = threading.Barrier(2), set[int]()

    def meet(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if (thread := threading.get_ident()) not in seen:
            seen.add(thread)
            met.wait(60)
        return executor(*args, **kwargs)

    return meet


def case_stopped() -> dict[str, Any]:
    """By an error and by an interrupt in one thread, while the other one computes, and by the policy."""
    results: dict[str, Any] = {}
    interrupt = import_module("comfy.model_management").InterruptProcessingException
    both = on_two(SD15, hot=True)
    results["fp32"] = sample(in_fp32(both, SD15), SD15, steps=STEPS)
    for name, error in {"error": ValueError("of the test"), "interrupt": interrupt()}.items():
        for when in ("attempt", "rerun"):
            patcher = guarded(
                wrapped(both, partial(_raise, error, torch.float16 if when == "attempt" else torch.float32))
            )
            said.clear()
            try:
                sample(patcher, SD15, steps=STEPS)
            except BaseException as raised:  # noqa: BLE001 - ComfyUI's interrupt is one
                results[f"{name} in the {when}, raised"] = type(raised).__name__
            results[f"{name} in the {when}, left"] = left(both)
            said.clear()
            results[f"{name} in the {when}, next"] = sample(guarded(both), SD15, steps=STEPS)
            results[f"{name} in the {when}, next said"] = reports()
    results["policy"] = error_of(lambda: sample(guarded(both, on_failure="stop"), SD15, steps=STEPS))
    results["policy, left"] = left(both)
    return results


def _raise(error: BaseException, dtype: torch.dtype, executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if args[-1]["multigpu_thread_device"] == OTHER and x.dtype is dtype:
        raise error
    return executor(x, *args, **kwargs)


def left(patcher: Any) -> list[str]:
    """What is still held or hooked, in any thread."""
    pack = "custom_nodes_pack"
    fp32_settings = sys.modules[f"{pack}.precision.fp32_settings"]
    settings = {name: getattr(fp32_settings, name) for name in ("EAGER_ONLY", "TF32", "FP32_ATTENTION")}
    settings["_WHOLE_PRODUCTS"] = sys.modules[f"{pack}.comfyui_host.layers"]._WHOLE_PRODUCTS
    found = [name for name, setting in settings.items() if setting.is_held]
    found += ["switches"] * len(sys.modules[f"{pack}.precision.accumulation"]._HOLDERS.current)
    models = [patcher.model, *(clone.model for clone in patcher.get_additional_models_with_key(WORK_UNITS))]
    found += ["hooks" for model in models for layer in model.modules() if layer._forward_hooks]
    return found + [thread.name for thread in threading.enumerate() if "_worker_loop" in thread.name]


def case_probe() -> dict[str, Any]:
    """What both halves reach, as where one device computes them."""
    return {
        "one device": facts(probed(make_model(SD15, hot=True), SD15)),
        "two devices": facts(probed(on_two(SD15, hot=True), SD15)),
    }


def case_easycache() -> dict[str, Any]:
    """What one half remembers while the other's attempt is made again: the first to come waits for the other one."""
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

    patcher = guarded(wrapped(on_two(FLUX, hot=True), outside, KINDS.APPLY_MODEL))
    patcher = cache.execute(wrapped(patcher, inside), 1e-9, 0.0, 1.0, False).args[0]
    said.clear()
    return {"made": sample(patcher, FLUX, steps=STEPS), "kept": kept, "said": reports()}


if not hasattr(import_module("comfy.model_management"), "get_all_torch_devices"):  # ComfyUI before 0.23
    for case in [name for name in globals() if name.startswith("case_")]:
        del globals()[case]
