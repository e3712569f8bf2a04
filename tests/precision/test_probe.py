"""The probe: its measurements on a small module and its recommendations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from blocky import Gain, build, hooks, overflow_inside, overflow_stream
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision import scaled_products
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.arch import named
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING, Peak, PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.probe import Probe, Probed, ProbeResult, judge, recommend
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from torch import nn


def probed_calls(module, blocks, *inputs):
    probe = Probe(module, blocks)
    for x in inputs:
        probe.watch(lambda x=x: run_in_fp32(module, x))
        probe.end_step()
    assert hooks(module) == 0
    return probe.probed


MAX = 65504.0


def test_peaks_cover_all_calls_of_a_step():
    module = nn.Sequential(nn.Sequential(Gain(2.0)), nn.Sequential(nn.Dropout(), Gain(-1e6))).eval()
    probe = Probe(module, block_names(module, ["0", "1"]))
    for step in [(torch.full((3,), 1.0), torch.full((1,), -4.0)), (torch.full((2,), MAX),)]:
        for x in step:
            probe.watch(lambda x=x: module(x))
        probe.end_step()
    first, second = probe.probed.steps
    assert list(first) == ["0.0", "0", "1.1", "1"], "in the order they end, without the dropout"
    assert first["0.0"] == first["0"] == Peak(4.0, 8.0)
    assert first["1"] == Peak(8.0, pytest.approx(8e6))
    assert probe.probed.reach("1", first["1"]) == pytest.approx(8e6), "for a block, its output"
    assert second["0"] == Peak(MAX, 2 * MAX) and probe.probed.worst()[0].step == 1


# --- recommendations --------------------------------------------------------------------------------------------------

X = torch.linspace(-3, 3, 48).reshape(1, 6, 8)


def broken_by(*faults):
    module = build()
    if "stream" in faults:
        overflow_stream(module, 1)
    if "inside" in faults:
        overflow_inside(module, 2)
    if "infinite" in faults:
        module.embed.bias.data.fill_(math.inf)
    return module


def measured(module):
    return probed_calls(module, block_names(module, ["blocks"]), X)


EVERY = PrecisionOverrides(all_layers_scaled=True), "fp16 with overflow protection"
HOPELESS = PrecisionOverrides(whole_run_fp32=True), "fp16 is not enough"


@pytest.mark.parametrize(
    ("faults", "learned", "plan", "says", "native", "other"),
    [
        ((), NOTHING, "fp16 plain", "fp16 ends at 65504", "fp16 plain", "fp16 plain"),
        (("stream",), *EVERY, "the layers after it cannot take it", "bf16", EVERY[1]),
        (("inside",), *EVERY, "'blocks.2.inner' reaches", "bf16", EVERY[1]),
        (("stream", "inside"), *EVERY, "the layers after it cannot take it", "bf16", EVERY[1]),
        (("infinite",), *HOPELESS, "", "fp32 is not enough", "fp32 is not enough"),
    ],
)  # fmt: skip
def test_verdict_and_recommendation_for_each_overflow(faults, learned, plan, says, native, other):
    """native, other: recommendation for a plan in fp16, on a card with and without native bf16."""
    module = broken_by(*faults)
    probed = measured(module)
    verdict = judge(probed, "fp16")
    assert (verdict.learned, verdict.plan) == (learned, plan) and says in verdict.reason
    assert judge(probed, "bf16").plan == ("bf16" if verdict.fits else "bf16 is not enough")
    assert [recommend(probed, "fp16", native_bf16=has).plan for has in (True, False)] == [native, other]
    if verdict.fits:
        attempt = build_half_precision_forward(module, verdict.learned, verdict.dtype)
        expected = copy.deepcopy(module).float()(X)[0]
        assert (attempt.run(X.half())[0].float() - expected).abs().max() < 0.1
    assert bool(torch.isfinite(module(X.half())[0]).all()) is not bool(faults), "plain fp16 fails"


@pytest.mark.parametrize("native_bf16", [False, True])
def test_planned_dtype_is_recommended_if_it_fits(native_bf16):
    probed = measured(build())
    for dtype in ("fp16", "bf16", "fp32"):
        assert recommend(probed, dtype, native_bf16=native_bf16).dtype == dtype


@pytest.mark.parametrize(
    ("peaks", "plan"),
    [
        ({"blocks.0.inner": Peak(1, 3e38), "blocks.0": Peak(1, 3e38)}, "bf16"),
        ({"blocks.0.inner": Peak(1, 3.4e38), "blocks.0": Peak(1, 1)}, "bf16 is not enough"),
        ({"blocks.0.inner": Peak(1, 3.4e38), "blocks.0": Peak(1, 3.4e38)}, "bf16 is not enough"),
    ],
)
def test_bf16_does_not_cover_the_end_of_fp32_range(peaks: dict[str, Peak], plan: str) -> None:
    assert judge(Probed(("blocks.0",), (peaks,)), "bf16").plan == plan


def test_single_overflowing_layer_gets_all_layers_scaled():
    module = nn.Linear(1, 1)
    module.weight.data.fill_(2.0**-17)  # exact in every dtype
    verdict = judge(probed_calls(module, (), torch.full((1, 1), 1e5)), "fp16")
    assert verdict.learned == PrecisionOverrides(all_layers_scaled=True) and "reaches 1e+05" in verdict.reason


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(64, 64), (6, 64)), (nn.Conv2d(64, 64, 3, padding=1, padding_mode="circular"), (2, 64, 5, 5))],
)
@pytest.mark.parametrize(("ratio", "apart"), [(1.0, False), (100.0, False), (1e9, True)])
def test_inputs_too_far_apart_for_scaling_are_named(monkeypatch, layer, shape, ratio, apart, stored):
    layer, x = (
        copy.deepcopy(layer).requires_grad_(False),
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
    )
    x[:, 7] *= ratio
    layer.weight[:, 7] /= ratio
    module = nn.Sequential(layer.to(DTYPES[stored]), Gain(1e6), Gain(1e-6))
    probed = probed_calls(module, block_names(module, ["0"]), x)
    verdict = judge(probed, "fp16")
    assert [*probed.too_far_apart] == ["0"] * apart and verdict.fits is not apart
    assert ("the inputs of '0' vary too much in size" in verdict.reason) is apart
    assert recommend(probed, "fp16", native_bf16=False).plan == ("fp32" if apart else "fp16 with overflow protection")
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)  # as on a GPU, which falls back to fp32
    made = run_in(ScaledHalfMatmulMode(torch.float16), module, (x,), {})
    assert bool(made.isfinite().all()) is not apart


def test_worst_lists_layers_by_peak_and_only_one_block():
    module = build(6)
    overflow_stream(module, 1)
    overflow_inside(module, 3)
    probed = measured(module)
    worst = probed.worst()[:3]
    assert len({entry.name for entry in worst if entry.name in probed.blocks}) == 1
    assert "blocks.3.inner" in [entry.name for entry in worst]
    assert [entry.reach for entry in worst] == sorted((entry.reach for entry in worst), reverse=True)


def test_report_names_layers_with_inputs_too_far_apart() -> None:
    apart = {"a.b": 31.26, "c": 2.0}
    probed = Probed((), ({name: Peak(1.0, 1e6) for name in apart},), apart)
    plan = choose(named("sm75"), VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision.FP16)
    result = ProbeResult("CogVideoX-2b", named("sm75"), plan, "", probed, 9.0, judge(probed, "fp32"), "")
    assert "'a.b' 31.3 × as far off, 'c' 2 × as far off" in result.text()
    assert result.reason.startswith("fp16 is not enough: the inputs of 'a.b' vary too much in size")
