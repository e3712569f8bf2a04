"""What a network keeps of earlier runs, without ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import compat
from comfyui_onediff_guard.comfyui_host.refining import forget_earlier_runs


class Network(torch.nn.Module):
    """With what a node has put on it, which is no business of ours, whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.entries, self.put_there = [torch.tensor(torch.nan)], {"embedding": torch.tensor(torch.nan)}


def test_what_a_network_forgets_is_its_own_business() -> None:
    network = Network()
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert len(network.entries) == 1
    network.clear_kv_cache = network.entries.clear
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert network.entries == [] and network.put_there["embedding"].isnan()


def broken(*_: Any) -> None:
    raise ValueError("no cache here")


@pytest.mark.parametrize("method", [lambda _which: None, broken])
def test_a_method_that_has_changed_or_raises_ends_no_run(caplog: pytest.LogCaptureFixture, method: Any) -> None:
    compat.tell_once.cache_clear()
    network = Network()
    network.clear_kv_cache = method
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert "Off: forgetting what a model keeps of earlier runs" in caplog.text
