"""Overflow diagnosis: from measured peaks to the failed module and the next overrides. Tables, no tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from blocky import build
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import (
    NOTHING,
    OverflowDiagnosis,
    Peak,
    PrecisionOverrides,
    diagnose_from_fp32_peaks,
    diagnose_from_half_run,
    escalate_overrides,
    parts_in_words,
)

BLOCKS = block_names(build(3), ["blocks"])
HEALTHY = {
    "embed": Peak(3, 50),
    "blocks.0.norm": Peak(50, 3),
    "blocks.0.inner": Peak(3, 40),
    "blocks.0": Peak(50, 100),
    "blocks.1.norm": Peak(100, 3),
    "blocks.1": Peak(100, 200),
    "last_norm": Peak(200, 3),
    "out": Peak(3, 3),
}
SCALED, REST = PrecisionOverrides(all_layers_scaled=True), "the rest of the run in fp32"


def test_block_names_and_their_text():
    assert BLOCKS == ("blocks.0", "blocks.1", "blocks.2")
    assert block_names(build(1), ["embed", "blocks"]) == ("embed", "blocks.0"), "a part that is not a list"
    assert parts_in_words(("a", "b")) == "'a', 'b'" and parts_in_words(tuple("abcd")) == "4 parts"


@pytest.mark.parametrize(
    ("peaks", "dtype"),
    [
        (HEALTHY, "fp16"),
        ({"blocks.0.inner": Peak(65504, 65504), "blocks.0": Peak(65504, 65504)}, "fp16"),  # the last value that fits
        ({"blocks.0": Peak(1e5, 1)}, "fp16"),  # its input is another module's output
        ({"blocks.1.inner": Peak(3, 1e38), "blocks.1": Peak(1e38, 1e38)}, "bf16"),
    ],
)
def test_values_in_range_give_no_diagnosis(peaks, dtype):
    assert diagnose_from_fp32_peaks(peaks, BLOCKS, dtype) is None


OUTSIDE_RANGE = [  # changed peaks → module, peak, reason
    ({"blocks.1.inner": Peak(3, 65505)}, "blocks.1.inner", 65505, "'blocks.1.inner' reaches 6.55e+04, beyond fp16's"),
    ({"blocks.1.inner": Peak(7e4, 1)}, "blocks.1.inner", 7e4, "'blocks.1.inner' reaches"),
    ({"blocks.1.inner": Peak(3, math.inf)}, "blocks.1.inner", math.inf, "'blocks.1.inner' reaches inf"),
    ({"blocks.1.inner": Peak(math.nan, 1)}, "blocks.1.inner", math.nan, "'blocks.1.inner' reaches nan"),
    ({"blocks.1.norm": Peak(5e5, 1)}, "blocks.1.norm", 5e5, "'blocks.1.norm' reaches 5e+05, beyond fp16's 65504"),
    ({"blocks.1.norm": Peak(7e4, 1), "blocks.0.inner": Peak(1, 8e4)}, "blocks.0.inner", 8e4, "'blocks.0.inner'"),
    ({"out": Peak(1, 7e4)}, "out", 7e4, "'out' reaches"),
    # a block output out of range is the reason, whichever module was first
    ({"blocks.0": Peak(1, 7e4), "blocks.1.norm": Peak(7e4, 1)}, "blocks.0", 7e4, "'blocks.0' outputs 7e+04, beyond"),
    ({"blocks.0.inner": Peak(1, 9e4), "blocks.1": Peak(1, 7e4)}, "blocks.0.inner", 9e4, "'blocks.1' outputs"),
]


@pytest.mark.parametrize(("changed", "module", "peak", "reason"), OUTSIDE_RANGE)
def test_diagnosis_names_module_peak_and_reason(changed, module, peak, reason):
    found = diagnose_from_fp32_peaks(HEALTHY | changed, BLOCKS, "fp16")
    assert found and found.module == module and (found.peak == peak or math.isnan(peak)) and found.located
    assert found.reason.startswith(reason) and len(found.reason) < 200


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks.1.attn", "inside attention"),
        ("blocks.1.inner", "inside 'blocks.1.inner'"),
        ("out", "inside 'out'"),
        ("", "outside of all layers"),
    ],
)
def test_diagnosis_from_half_run_names_the_module(name, words):
    found = diagnose_from_half_run(name, {"out": Peak(1, 2)}, "fp16")
    assert found.module == name and found.located
    assert words in found.reason and found.peak == (2 if name == "out" else None)


NEXT = "from here on"
FOUND = OverflowDiagnosis("", "blocks.1")
NOT_FOUND = diagnose_from_half_run(None, {}, "bf16")
STEPS = [  # overrides before, diagnosis → overrides after, action in words
    (NOTHING, FOUND, SCALED, f"overflow protection {NEXT}"),
    (SCALED, FOUND, replace(SCALED, whole_run_fp32=True), REST),
    (NOTHING, NOT_FOUND, NOTHING, ""),
    (SCALED, NOT_FOUND, SCALED, ""),
    # a failure of quantising or fp16 accumulation only switches that off
    *((NOTHING, replace(FOUND, **{what: value}), PrecisionOverrides(**then), said)
      for what, value, then, said in (
          ("quantised", "blocks.1.inner", {"unquantised": ("blocks.1.inner",)}, f"'blocks.1.inner' unquantised {NEXT}"),
          ("fp16_accumulation", True, {"fp16_error": 1.0}, f"no fp16 accumulation {NEXT}"))),
]  # fmt: skip


@pytest.mark.parametrize(("known", "found", "then", "said"), STEPS)
def test_overrides_escalate_after_a_diagnosis(known, found, then, said):
    assert "did not fail" in NOT_FOUND.reason
    assert escalate_overrides(known, found) == (then, said)
