"""Watching a module while it computes."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from comfyui_onediff_guard.precision.observe import BlockOutputs, first_non_finite, largest, leaf_peaks
from torch import nn


class Gain(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Denoiser(nn.Module):
    def __init__(self, *factors):
        super().__init__()
        self.blocks = nn.ModuleList(map(Gain, factors))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def hooks(module):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())


def test_peaks_of_what_went_in_and_came_out_of_each_layer():
    module = Denoiser(-10.0, 100.0)
    peaks = leaf_peaks(module, lambda: [module(torch.tensor([x])) for x in (1.0, -3.0)])
    assert (peaks["blocks.0"].input, peaks["blocks.0"].output) == (3.0, 30.0)
    assert (peaks["blocks.1"].input, peaks["blocks.1"].output) == (30.0, 3000.0)
    assert hooks(module) == 0


def test_overflow_shows_as_it_is():
    module = Denoiser(1e30, 1e30, 0.0)
    peaks = leaf_peaks(module, lambda: module(torch.ones(1)))
    assert peaks["blocks.1"].output == math.inf
    assert math.isnan(peaks["blocks.2"].output)
    assert first_non_finite(module, lambda: module(torch.ones(1))) == "blocks.1"
    assert first_non_finite(module, lambda: module(torch.zeros(1))) == "Denoiser", "none: the module itself"


def test_hooks_go_when_the_call_raises():
    module = Denoiser(1.0)
    for watch in (leaf_peaks, first_non_finite):
        with pytest.raises(TypeError):
            watch(module, lambda: module("no tensor"))
        assert hooks(module) == 0


def test_another_threads_calls_are_not_seen():
    module = Denoiser(2.0)

    def call():
        module(torch.ones(1))
        other = threading.Thread(target=lambda: module(torch.full((1,), 1e9)))
        other.start()
        other.join()

    assert leaf_peaks(module, call)["blocks.0"].output == 2.0


def test_block_outputs_are_seen_and_the_module_is_not_touched():
    module, outputs = Denoiser(-10.0, 0.5), BlockOutputs()
    watched = outputs.watched(module, "blocks")
    assert outputs.take() is None
    assert watched(torch.ones(3)).tolist() == [-5.0] * 3
    assert outputs.take() == 10.0, "the largest of all blocks, not the last"
    assert outputs.take() is None, "taken"
    assert type(module.blocks[0]) is Gain


def test_the_largest_of_a_nest_of_tensors():
    assert largest([torch.tensor([1.0, -7.0]), (torch.tensor(3), {"a": torch.ones(2).half()})]) == 7.0
    assert largest([torch.tensor(3), "text", torch.empty(0)]) == 0.0
