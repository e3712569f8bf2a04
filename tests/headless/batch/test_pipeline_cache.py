"""The cache key by which jobs are sorted, and what a worker keeps by it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch.pipeline_cache import CacheKey, PipelineCache, cache_key_of
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.workflow.graph import from_api
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle


def graph(**changes: Any) -> Any:
    inputs = {
        "1": {"model": "m", "precision": "bf16", "backend": "auto"},
        "2": {"pipeline": ["1", 0], "width": 64, "height": 64, "frames": 9, "steps": 20, "seed": 1, "scheduler": "x"},
        "3": {"text": "a boat", "clip": ["1", 0], "sampler_name": "euler", "ckpt_name": "c", "length": 8},
    }
    for name, value in changes.items():
        next(node for node in inputs.values() if name in node)[name] = value
    return from_api({number: {"class_type": f"N{number}", "inputs": node} for number, node in inputs.items()})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seed": 2, "steps": 3, "text": "a cat", "sampler_name": "dpm"}, ()),
        ({"model": "other"}, ("model",)),
        ({"ckpt_name": "other"}, ("model",)),
        ({"precision": "fp16"}, ("plan",)),
        ({"width": 128}, ("shape",)),
        ({"frames": 17, "model": "other"}, ("model", "shape")),
    ],
)
def test_the_key_is_of_what_is_loaded_and_compiled(changes: dict[str, Any], differs: tuple[str, ...]) -> None:
    before, after = cache_key_of(graph()), cache_key_of(graph(**changes))
    assert (
        tuple(name for name in ("model", "plan", "shape") if getattr(before, name) != getattr(after, name)) == differs
    )


def test_the_last_models_are_kept_and_one_whose_plan_changes_is_not() -> None:
    cache, loaded = PipelineCache(2), dict[str, weakref.ref[Any]]()

    def run(model: str, plan: str = "p") -> set[str]:
        """What is still in memory before a job of this kind loads anything."""
        key = CacheKey(model, plan, "")
        cache.evict_for(key)
        left = {name for name, handle in loaded.items() if handle() is not None}
        handle = object.__new__(PipelineHandle)
        object.__setattr__(handle, "store", object())
        loaded[model] = weakref.ref(handle)
        cache.put(key, RunResult({}, {"1": (handle, 1)}, [], 1.0))
        return left

    assert [run("a"), run("b"), run("a"), run("c")] == [set(), {"a"}, {"a", "b"}, {"a"}]
    assert run("a", "another") == {"c"}
    cache.clear()
    assert run("b") == set()
