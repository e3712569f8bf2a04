"""The dtype check after loading: what it mends, what it names, and what it leaves alone."""

from __future__ import annotations

import copy

import pytest
import torch
from comfyui_onediff_guard.precision.loaded_weights import DamagedByCast, make_consistent
from comfyui_onediff_guard.precision.shallow_copy import KeptInFp32
from host_reads import HostReads
from torch import nn


class Norm(nn.Module):
    """Takes an input in its weight's dtype and no other."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if x.dtype != self.weight.dtype:
            raise RuntimeError("expected scalar type Float but found Half")
        return x * self.weight


class Encoder(nn.Module):
    _keep_in_fp32_modules = ["wo"]

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(4, 4)
        self.wo = nn.Linear(4, 4)
        self.norm = Norm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.bare_norm = nn.LayerNorm(4, elementwise_affine=False)

    def as_loaded(self, dtype=torch.float16):
        self.to(dtype)
        self.wo.float()
        return self


class Strict(Encoder):
    _keep_in_fp32_modules, _keep_in_fp32_modules_strict = None, ["wo"]


class TellsApart(Encoder):
    _keep_in_fp32_modules_strict = None


class Plain(Encoder):
    _keep_in_fp32_modules = None


def dtypes(module):
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


def test_a_consistent_component_is_left_alone():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        module = Plain().to(dtype)
        before = dtypes(module)
        assert make_consistent(module, dtype) == []
        assert dtypes(module) == before
        assert type(module.norm) is Norm, "nothing is fp32 here, so its norms never see fp32"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(Encoder, torch.float16), (Encoder, torch.bfloat16), (Strict, torch.float16), (Strict, torch.bfloat16)],
)
def test_what_belongs_in_fp32_is_put_back(kind, dtype):
    found = make_consistent(module := kind().to(dtype), dtype)
    assert module.wo.weight.dtype == module.wo.bias.dtype == torch.float32
    assert module.wi.weight.dtype == dtype
    assert found[0] == f"'wo.weight' and 1 more put back in fp32, where {kind.__name__} keeps wo"


def test_in_bf16_only_the_strict_ones_are_kept_where_a_class_tells_them_apart():
    assert make_consistent(module := TellsApart().to(torch.bfloat16), torch.bfloat16) == []
    assert module.wo.weight.dtype == torch.bfloat16


def test_what_a_cast_destroyed_is_refused():
    module = Encoder()
    with torch.no_grad():
        module.wo.weight[0, :2] = torch.tensor([66246.0, -1e6])
    with pytest.raises(DamagedByCast, match=r"'wo\.weight' belongs in fp32.*2 of its values are not finite"):
        make_consistent(module.half(), torch.float16)


def test_a_norm_that_refuses_fp32_computes_in_fp32_and_hands_on_its_own_dtype():
    module = Encoder().as_loaded()
    x = torch.full((2, 4), 1e5)
    with pytest.raises(RuntimeError, match="Float but found Half"):
        module.norm(x)
    found = make_consistent(module, torch.float16)
    assert isinstance(module.norm, KeptInFp32)
    assert module.norm(x[:, :4] / 2).dtype == torch.float16
    assert torch.equal(module.norm(x / 2), (x / 2).half())
    assert any(line.startswith("'norm'") and "(Norm) refuses inputs of another dtype" in line for line in found)
    assert make_consistent(module, torch.float16) == [], "mended once"


class FusedNorm(Norm):
    """Refuses mixed dtypes on a device alone, as a fused kernel for CUDA does."""

    def forward(self, x):
        return super().forward(x) if x.is_meta else x


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_norm_is_asked_on_the_device_where_it_will_compute(device):
    module = Encoder().as_loaded()
    module.norm.__class__ = FusedNorm
    with HostReads() as moved:
        make_consistent(module, torch.float16, torch.device(device))
    assert isinstance(module.norm, KeptInFp32) == (device == "meta"), "nothing is refused here"
    assert not moved.copies and not module.norm.weight.is_meta, "an empty copy was asked"


def test_norms_of_one_class_are_asked_once():
    asked = []

    class AskedNorm(Norm):
        def forward(self, x):
            asked.append(x.dtype)
            return super().forward(x)

    module = Encoder().as_loaded()
    module.more = torch.nn.ModuleList(copy.deepcopy(module.norm) for _ in range(3))
    for norm in (module.norm, *module.more):
        norm.__class__ = AskedNorm
    make_consistent(module, torch.float16)
    assert asked == [torch.float16, torch.float32]
    assert all(isinstance(norm, KeptInFp32) for norm in (module.norm, *module.more))


def test_parameters_in_another_dtype_are_named():
    module = Plain().half()
    module.wi.float()
    assert make_consistent(module, torch.float16) == ["'wi.weight' and 1 more: in fp32, not in fp16 as the rest"]
    assert module.wi.weight.dtype == torch.float32
