"""State that a native network keeps from earlier runs: cleared before a run, without ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import compat, native_guards
from comfyui_onediff_guard.comfyui_host.refining import forget_earlier_runs
from comfyui_onediff_guard.comfyui_host.runs import Settings, guarded_run
from comfyui_onediff_guard.precision.guard import GuardPolicy


class Network(torch.nn.Module):
    """Has its own state, and an attribute that a node has added, which must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.added_by_node = [torch.tensor(torch.nan)], {"embedding": torch.tensor(torch.nan)}


def test_state_is_cleared_only_by_method_of_network() -> None:
    network = Network()
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert len(network.entries) == 1
    network.clear_kv_cache = network.entries.clear
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert network.entries == [] and network.added_by_node["embedding"].isnan()


@pytest.mark.parametrize("method", [lambda _which: None, Mock(side_effect=ValueError("no cache here"))])
def test_changed_or_raising_method_does_not_end_run(caplog: pytest.LogCaptureFixture, method: Any) -> None:
    compat.tell_once.cache_clear()
    network = Network()
    network.clear_kv_cache = method
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert "Off: clearing a model's caches of earlier runs" in caplog.text


def test_missing_model_argument_does_not_end_run(caplog: pytest.LogCaptureFixture) -> None:
    compat.tell_once.cache_clear()
    guard = native_guards._ModelGuard(Settings(GuardPolicy()))
    with guarded_run(Settings(GuardPolicy())) as run:
        made = guard.apply(lambda x, *_, **__: x + 1, torch.ones(1), transformer_options={native_guards.KEY: run})
    assert made == 2 and "Off: clearing a model's caches of earlier runs" in caplog.text
