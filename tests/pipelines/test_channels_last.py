"""Convolutions with channels last: the same pictures within rounding, and bit-equal ones when it is off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import small_runs
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions, compiled
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement, laid_out, lay_out, of_layout
from comfyui_onediff_guard.precision.activation_estimate import counting, on_meta
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from comfyui_onediff_guard.precision.policy import Component
from comfyui_onediff_guard.precision.shallow_copy import with_forward
from small_runs import error, opened, sampled
from torch import nn
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

LAST = CompileOptions(channels_last=True)


@pytest.fixture(autouse=True)
def nothing_loaded() -> None:
    stores._STORES.clear()


def ran(handle: PipelineHandle, model: str) -> tuple[torch.Tensor, Any, Any]:
    """Pictures, and the reports of sampling and decoding."""
    latents, sampling = sampled(handle, model, steps=1)
    pictures, decoding = decode(handle, latents)
    return pictures, sampling, decoding


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_runs.SIZES, "svd", (128, 128, 2))  # at 64 × 64, norms over one value are rounding errors


@pytest.mark.parametrize(
    ("model", "precision", "limit"),
    [("svd", "fp32", 1e-5), ("svd", "fp16", 5e-3), ("cogview3", "fp32", 1e-5), ("cogview3", "bf16", 5e-2)],
)
def test_channels_last_pictures_are_near_and_bit_equal_when_off(model: str, precision: str, limit: float) -> None:
    handle = opened(model, precision=precision)
    last = replace(handle, compile_options=LAST)
    before, with_last = ran(handle, model), ran(last, model)
    parts = [handle.store.module(name, dtype, place=False) for name, dtype in handle.store.loaded().items()]
    assert all(laid_out(part, channels_last=True) for part in parts) and any(map(of_layout, parts))
    after = ran(handle, model)
    assert all(laid_out(part, channels_last=False) for part in parts)
    assert torch.equal(before[0], after[0]), "bit-equal when it is off"
    assert error(with_last[0], before[0]) < limit
    for report, component in zip(with_last[1:], (handle.family.denoiser, "vae"), strict=True):
        wanted = len(of_layout(handle.store.module(component, handle.store.loaded()[component], place=False)))
        assert f"channels last: {wanted} of its 2D convolutions" in report.notes
    assert not any("channels last" in note for report in (*before[1:], *after[1:]) for note in report.notes)


def test_failing_channels_last_step_is_rerun() -> None:
    handle = replace(opened("svd", precision="fp16"), policy=GuardPolicy(scope=Scope.STEP))
    broken = handle.store.module("unet", "fp16").get_submodule("mid_block")
    failing: Any = lambda _, __, made: made * torch.nan if made.dtype == torch.float16 else made  # noqa: E731
    hook = broken.register_forward_hook(failing)
    expected, plain = sampled(handle, "svd", steps=1)
    found, report = sampled(replace(handle, compile_options=LAST), "svd", steps=1)
    hook.remove()
    assert plain.reruns and report.reruns == plain.reruns
    assert found.isfinite().all() and error(found, expected) < 5e-3


def test_blocks_are_compiled_once_for_each_layout() -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 3, padding=1)) for _ in range(2))
    network, x = with_forward(nn.ModuleDict({"blocks": blocks}), lambda x: x), torch.randn(1, 32, 8, 8)
    expected = [block(x) for block in blocks]
    torch._dynamo.reset()
    copies = {
        how: compiled(network, ("blocks",), BackendChoice("inductor", ""), how) for how in (CompileOptions(), LAST)
    }
    graphs = []
    for how in (CompileOptions(), LAST, CompileOptions(), LAST):
        before = counters["stats"]["unique_graphs"]
        lay_out(blocks, channels_last=how.channels_last)
        for found, right in zip((block(x) for block in copies[how]["blocks"]), expected, strict=True):
            torch.testing.assert_close(found, right)
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [1, 1, 0, 0], "one for both blocks, and none for a layout that was compiled before"


def test_channels_last_is_not_used_with_backend_that_has_own_layout() -> None:
    handle = replace(opened("svd"), compile_options=LAST)
    stage = replace(handle, backend=BackendChoice("oneflow", "")).stage(Component.DENOISER)
    assert laid_out(stage.module, channels_last=False)
    assert "channels last: not used, oneflow chooses the layout itself" in stage.report.notes


def test_layout_of_comfyui_is_default_of_pipelines() -> None:
    placement = PlainPlacement()
    placement.channels_last = True
    assert opened("svd", placement=placement).compile_options == LAST


def test_only_convolutions_that_gain_get_channels_last() -> None:
    kept = nn.Conv2d(8, 8, 3)
    pointwise, patches, volume = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 2, stride=2), nn.Conv3d(8, 8, 3)
    module = nn.Sequential(kept, pointwise, patches, volume, nn.Linear(8, 8))
    assert of_layout(module) == [kept]
    before, parameter, values = volume.weight.stride(), kept.weight, kept.weight.detach().clone()
    lay_out(module, channels_last=True)
    assert laid_out(module, channels_last=True) and not laid_out(module, channels_last=False)
    assert kept.weight.is_contiguous(memory_format=torch.channels_last)
    assert kept.weight is parameter and torch.equal(kept.weight, values) and volume.weight.stride() == before
    lay_out(module, channels_last=False)
    assert laid_out(module, channels_last=False)


def test_copies_into_other_layout_are_counted_as_memory() -> None:
    """A convolution copies its input into the layout of its weights. Up to PyTorch 2.13, a group norm on a GPU copies
    channels-last input."""
    x = torch.empty(1, 32, 8, 8)

    def peak(*layers: nn.Module) -> int:
        network, given = on_meta(nn.Sequential(*layers)), x.to("meta")
        with counting() as alive:
            network(given)
        return alive.most

    one = nn.Conv2d(32, 32, 3, padding=1)
    plain = peak(one, nn.GroupNorm(4, 32))
    lay_out(one, channels_last=True)
    assert peak(one) == 2 * x.nbytes
    copies = TorchVersion(torch.__version__) < "2.14"
    assert peak(one, nn.GroupNorm(4, 32)) == plain + copies * x.nbytes
