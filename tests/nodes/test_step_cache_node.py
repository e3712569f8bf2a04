"""The Step Cache node: returns a new handle, at error 0 one without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from comfyui_onediff_guard.nodes.step_cache import StepCache
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.precision.error_estimate import CachePolicy


@dataclass(frozen=True)
class Pipeline:
    step_cache: CachePolicy | None = None


def test_step_cache_node_returns_new_handle() -> None:
    given: Any = Pipeline()
    (made,) = StepCache().apply(given, 0.05, 3)
    assert made.step_cache == CachePolicy(0.05, 3) and given.step_cache is None
    assert StepCache().apply(made, 0.0, 4)[0].step_cache is None, "off at error 0"
    assert PipelineHandle.__dataclass_fields__["step_cache"].default is None, "and without the node"


@pytest.mark.parametrize("name", ["error", "check_every"])
def test_defaults_of_node_equal_those_of_cache_policy(name: str) -> None:
    assert StepCache.INPUT_TYPES()["required"][name][1]["default"] == getattr(CachePolicy(), name)
