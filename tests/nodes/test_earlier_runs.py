"""What a network keeps of earlier runs, without ComfyUI."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host.refining import forget_earlier_runs


class Prefix:
    """As Qwen-Image 2.1 keeps keys and values."""

    __slots__ = ("layers", "network", "seen")

    def __init__(self, network: torch.nn.Module, kept: torch.Tensor):
        self.layers, self.network, self.seen = {0: (kept, kept)}, network, 1


class Network(torch.nn.Module):
    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(torch.nan))
        self.register_buffer("table", torch.tensor(torch.inf))
        self.mask = torch.tensor([0.0, -torch.inf])
        self.part = torch.nn.Module()
        self.part.entries = [{"kv": [(torch.ones(1), kept)], "length": 3}]
        self.part.visual = (None, kept)
        self.part.latest = kept
        self.prefix = Prefix(self, kept)
        self.listed = [self.part]

    @property
    def kept(self) -> list[Any]:
        return [self.part.entries, self.part.visual, self.part.latest, self.prefix.layers]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_emptied_and_nothing_else(value: float) -> None:
    network = Network(torch.tensor([1.0, value]))
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert network.kept == [[], None, None, {}]
    assert network.prefix.seen == 1 and network.prefix.network is network and network.listed == [network.part]
    assert network.weight.isnan() and network.get_buffer("table").isinf() and network.mask.isneginf().any()


def test_what_is_finite_is_left_to_the_networks_own_method() -> None:
    network = Network(torch.ones(2))
    before = [*network.kept]
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert all(now is then for now, then in zip(network.kept, before, strict=True))
    network.clear_kv_cache = network.part.entries.clear
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert network.kept[0] == [] and network.kept[3]


def test_a_method_that_has_changed_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    network = Network(torch.ones(2))
    network.clear_kv_cache = lambda which: None
    forget_earlier_runs(SimpleNamespace(diffusion_model=network))
    assert "Off: forgetting what a model keeps of earlier runs" in caplog.text
