"""Recording peaks and failures of a module while it computes."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from blocky import Gain, hooks
from comfyui_onediff_guard.precision.layer_peaks import first_broken, largest, leaf_peaks, leaves, non_finite
from torch import nn


def gains(*factors):
    return nn.Sequential(*map(Gain, factors))


def test_peaks_of_layer_inputs_and_outputs():
    module = gains(-10.0, 100.0)
    peaks = leaf_peaks(module, lambda: [module(torch.tensor([x])) for x in (1.0, -3.0, 2.0)])
    assert (peaks["0"].input, peaks["0"].output) == (3.0, 30.0)
    assert (peaks["1"].input, peaks["1"].output) == (30.0, 3000.0)
    assert hooks(module) == 0


def test_leaves_of_a_separately_compiled_block():
    """ComfyUI and KJNodes compile block by block. The truth value of such a block raises."""
    module = gains(2.0, 3.0)
    module[0] = torch.compile(module[0], backend="eager")
    assert [*leaves(module)] == ["0._orig_mod", "1"]


def test_activation_in_several_places_has_no_peak():
    """As in ComfyUI's TAEHV, whose encoder and decoder share one."""
    shared = nn.ReLU()
    module = nn.Sequential(shared, Gain(1e6), shared)
    assert [*leaf_peaks(module, lambda: module(torch.ones(1)))] == ["1"]


def test_overflow_is_recorded_as_inf_or_nan():
    module = gains(1e30, 1e30, 0.0)
    peaks = leaf_peaks(module, lambda: module(torch.ones(1)))
    assert peaks["1"].output == math.inf
    assert math.isnan(peaks["2"].output)
    assert first_broken(module, lambda: module(torch.ones(1))) == "1"
    assert first_broken(module, lambda: module(torch.zeros(1))) is None


class Squaring(nn.Module):
    """Overflows in its own forward and passes that to a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x):
        return self.layer(x * x)


def test_first_broken_skips_modules_given_broken_inputs():
    module = nn.Sequential(nn.Identity(), Squaring(), nn.Identity())
    assert first_broken(module, lambda: module(torch.full((1,), 1e30))) == "1"
    assert first_broken(module, lambda: module(torch.full((1,), 10.0)), limit=100.0) == "1"
    assert first_broken(module, lambda: module(torch.full((1,), 9.0)), limit=100.0) is None
    assert first_broken(module, lambda: module(torch.full((1,), math.nan))) == "0", "broken input: the first module"
    squaring = module[1]
    assert first_broken(squaring, lambda: squaring(torch.full((1,), 1e30))) == "", "the module itself"


class Keywords(nn.Module):
    def forward(self, *, x):
        return x + 1


def test_keyword_arguments_are_recorded():
    module = nn.ModuleDict({"a": Keywords()})
    assert leaf_peaks(module, lambda: module["a"](x=torch.tensor([-7.0])))["a"].input == 7.0


def test_layers_are_listed_in_execution_order_with_extra_blocks():
    module = nn.ModuleDict({"late": nn.Identity(), "early": nn.Sequential(nn.Identity())})
    peaks = leaf_peaks(module, lambda: module["late"](module["early"](torch.ones(1))), also=("early",))
    assert list(peaks) == ["early.0", "early", "late"]


def test_calls_of_other_threads_are_not_recorded():
    module = gains(2.0)

    def call():
        module(torch.ones(1))
        other = threading.Thread(target=lambda: module(torch.full((1,), 1e9)))
        other.start()
        other.join()

    assert leaf_peaks(module, call)["0"].output == 2.0


def test_largest_of_nested_tensors():
    assert largest([torch.tensor([1.0, -7.0]), (torch.tensor(3), {"a": torch.ones(2).half()})]) == 7.0
    assert largest([torch.tensor(3), "text", torch.empty(0)]) == 0.0
    assert largest(torch.tensor([2.0, -448.0]).to(torch.float8_e4m3fn)) == 448.0, (
        "like the output of an embedding stored in fp8"
    )


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32]
)
def test_nonfinite_values_are_counted_in_every_weight_dtype(dtype):
    assert non_finite(torch.tensor([1.0, math.nan, 2.0, math.nan]).to(dtype)) == 2
