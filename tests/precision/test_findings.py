"""From measured peaks to where a call failed, and to what follows: tables, no tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from blocky import build
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.precision.overrides import (
    NOTHING,
    ModuleStructure,
    OverflowDiagnosis,
    Peak,
    PrecisionOverrides,
    diagnose_from_fp32_peaks,
    diagnose_from_half_run,
    escalate_overrides,
    parts_in_words,
)
from small_denoisers import build as build_denoiser

BLOCKS = ModuleStructure.of(build(3), ["blocks"])
NATIVE = ModuleStructure(all_layers_scaled=True)
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
IN_FP32, ALL_LAYERS_SCALED = PrecisionOverrides(whole_run_fp32=True), PrecisionOverrides(all_layers_scaled=True)


def find(peaks: dict[str, Peak], structure: ModuleStructure = BLOCKS, dtype: str = "fp16", **more: Any) -> Any:
    return diagnose_from_fp32_peaks(peaks, structure, dtype, **more)


def in_fp32(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(fp32_fallback_blocks=names, **more)


def inside(*names: str, **more: Any) -> OverflowDiagnosis:
    return OverflowDiagnosis("", fallback_blocks=names, **more)


@pytest.fixture(scope="module")
def cogvideox() -> ModuleStructure:
    """That of diffusers' own, small."""
    return ModuleStructure.of(build_denoiser("CogVideoX-2B")[0], COGVIDEOX.blocks)


def test_a_modules_parts_by_name(cogvideox):
    assert BLOCKS.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert ModuleStructure.of(build(1), ["embed", "blocks"]).blocks == ("embed", "blocks.0"), "a part that is no list"
    assert cogvideox.groups == ("patch_embed", "time_embedding", "norm_out"), "fallback blocks outside of the blocks"
    assert parts_in_words(("a", "b")) == "'a', 'b'" and parts_in_words(tuple("abcd")) == "4 parts"


HOMES = {"blocks.1": "blocks.1", "embed": "embed", "blocks.1.ff.net.0": "blocks.1", "out": "out"}
HOMES |= {"blocks.10.ff": "blocks.10.ff", "blocks": None, "": None}  # the first is not one of blocks.1


@pytest.mark.parametrize(("name", "home"), HOMES.items())
def test_where_a_module_lives(name, home):
    assert BLOCKS.home(name) == home


# --- from peaks in fp32 to a diagnosis --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peaks", "more"),
    [
        (HEALTHY, {}),
        ({"blocks.0.inner": Peak(65504, 65504), "blocks.0": Peak(65504, 65504)}, {}),  # the last value that fits
        ({"blocks.0": Peak(1e5, 1)}, {}),  # what it is given is another's output
        ({"blocks.1.inner": Peak(3, 7e4)}, {"parts": ("blocks.1",)}),  # a fallback block already
        ({"time.linear_1": Peak(3, 7e4)}, {"parts": ("time",)}),  # in one
        ({"blocks.1.inner": Peak(3, 1e38), "blocks.1": Peak(1e38, 1e38)}, {"dtype": "bf16"}),
    ],
)
def test_nothing_is_found_where_nothing_left_the_range(peaks, more):
    assert find(peaks, **more) is None


OUTSIDE_RANGE = [  # what is otherwise than healthy → module, peak, fallback blocks, whether nothing helps
    ({"blocks.1.inner": Peak(3, 65505)}, "blocks.1.inner", 65505, ("blocks.1",), False),
    ({"blocks.1.inner": Peak(7e4, 1)}, "blocks.1.inner", 7e4, ("blocks.1",), False),
    ({"blocks.1.inner": Peak(3, math.inf)}, "blocks.1.inner", math.inf, ("blocks.1",), False),
    ({"blocks.1.norm": Peak(7e4, 1)}, "blocks.1.norm", 7e4, ("blocks.1",), False),
    ({"blocks.1.norm": Peak(7e4, 1), "blocks.0.inner": Peak(1, 8e4)}, "blocks.0.inner", 8e4, ("blocks.0", "blocks.1"),
     False),
    # a layer outside of the blocks, or a block, whose output does not fit: what comes after it cannot take it
    ({"out": Peak(1, 7e4)}, "out", 7e4, (), True),
    ({"out": Peak(7e4, 1)}, "out", 7e4, (), True),  # what goes in is infinite already
    ({"blocks.0": Peak(1, 7e4), "blocks.1.norm": Peak(7e4, 1)}, "blocks.0", 7e4, ("blocks.1",), True),
    ({"blocks.0.inner": Peak(1, 9e4), "blocks.1": Peak(1, 7e4)}, "blocks.0.inner", 9e4, ("blocks.0",), True),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "module", "peak", "fallback_blocks", "hopeless"), OUTSIDE_RANGE)
def test_what_left_the_range(changed, module, peak, fallback_blocks, hopeless):
    found = find(HEALTHY | changed)
    assert (found.module, found.peak, found.fallback_blocks) == (module, peak, fallback_blocks)
    assert found.hopeless == hopeless and len(found.reason) < 200


def test_the_reason_names_the_range_and_a_fallback_block_is_not_found_again():
    assert find({"blocks.1.norm": Peak(5e5, 1)}).reason == "'blocks.1.norm' reaches 5e+05, beyond fp16's 65504"
    assert find({"blocks.1": Peak(1, 7e4)}).reason.startswith("'blocks.1' puts out 7e+04, beyond fp16's 65504")
    found = find({"blocks.1.inner": Peak(3, math.inf)}, dtype="bf16")
    assert found.fallback_blocks == ("blocks.1",) and "bf16's 3.3895e+38" in found.reason
    more = {"blocks.1.inner": Peak(3, 7e4), "blocks.2.inner": Peak(8e4, 1)}
    assert find(more, parts=("blocks.1",)).fallback_blocks == ("blocks.2",)


FITS = {"time_embedding": Peak(1, 50), "time_embedding.linear_1": Peak(1, 1e5), "time_embedding.act": Peak(1e5, 1e5),
        "time_embedding.linear_2": Peak(1e5, 50)}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "fallback_blocks", "hopeless"),
    [
        ({}, ("time_embedding",), False),
        ({"time_embedding": Peak(1, 7e4)}, (), True),  # what comes after it cannot take it
        ({"time_embedding": Peak(7e4, 50)}, (), True),
        ({"proj_out": Peak(1, 7e4)}, ("time_embedding",), True),
        ({"transformer_blocks.0.ff.net.2": Peak(1e5, 1)}, ("time_embedding", "transformer_blocks.0"), False),
    ],
)
def test_a_fallback_block_outside_of_the_blocks_is_the_smallest_part_that_fits(
    cogvideox, changed, fallback_blocks, hopeless
):
    found = find(FITS | changed, cogvideox)
    assert (found.fallback_blocks, found.hopeless) == (fallback_blocks, hopeless)
    assert (found.module, found.peak) == ("time_embedding.linear_1", 1e5)


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("blocks.1.attn", "blocks.1", "inside attention"),
        ("blocks.1.inner", "blocks.1", "inside 'blocks.1.inner'"),
        ("out", "out", "inside 'out'"),
    ],
)
def test_what_only_the_half_call_shows(name, part, words):
    found = diagnose_from_half_run(name, {"out": Peak(1, 2)}, BLOCKS, "fp16")
    assert (found.module, found.fallback_blocks, found.hopeless) == (name, (part,), False)
    assert words in found.reason and found.peak == (2 if name == "out" else None)


def test_what_only_the_half_call_shows_and_no_fallback_block_helps():
    assert diagnose_from_half_run("", {}, BLOCKS, "fp16").hopeless, "the module's own forward"
    again = diagnose_from_half_run("blocks.1.inner", {}, BLOCKS, "bf16", fallback_blocks=("blocks.1",))
    assert again.hopeless, "it is one already"
    nothing = diagnose_from_half_run(None, {}, BLOCKS, "bf16")
    assert not nothing.hopeless and not nothing.fallback_blocks and "did not fail" in nothing.reason


# --- from a diagnosis to what follows ---------------------------------------------------------------------------------

NEXT = "from here on"
ALL_PROTECTED, REST = f"overflow protection {NEXT}", "the rest of the run in fp32"
HOPELESS, NOT_FOUND = OverflowDiagnosis("", hopeless=True), OverflowDiagnosis("nothing was found")
FOUND, BOTH = (inside(), inside("blocks.1"), HOPELESS), (inside("blocks.1"), HOPELESS)
STEPS = [  # structure, dtype, what is known, what is found → what is known then, and what is said of it
    # in fp16 every layer is scaled at once, and no part runs in fp32 then
    *((BLOCKS, "fp16", known, found, ALL_LAYERS_SCALED, ALL_PROTECTED)
      for known in (NOTHING, in_fp32("blocks.0")) for found in BOTH),
    (BLOCKS, "fp16", NOTHING, NOT_FOUND, NOTHING, ""),
    # where every layer is scaled, no part can be protected more
    *((BLOCKS, "fp16", ALL_LAYERS_SCALED, found, replace(ALL_LAYERS_SCALED, whole_run_fp32=True), REST)
      for found in BOTH),
    (BLOCKS, "fp16", ALL_LAYERS_SCALED, NOT_FOUND, ALL_LAYERS_SCALED, ""),
    # bf16 has fp32's range
    (BLOCKS, "bf16", NOTHING, inside("blocks.1"), in_fp32("blocks.1"), f"'blocks.1' in fp32 {NEXT}"),
    (BLOCKS, "bf16", in_fp32("blocks.1"), inside("blocks.0"), in_fp32("blocks.1", "blocks.0"),
     f"'blocks.0' in fp32 {NEXT}"),
    (BLOCKS, "bf16", NOTHING, HOPELESS, IN_FP32, REST),
    (BLOCKS, "bf16", NOTHING, NOT_FOUND, NOTHING, ""),
    # where fallback blocks are of no use, a failure is enough, wherever it is
    *((NATIVE, "fp16", NOTHING, found, ALL_LAYERS_SCALED, ALL_PROTECTED) for found in FOUND),
    *((NATIVE, "fp16", ALL_LAYERS_SCALED, found, replace(ALL_LAYERS_SCALED, whole_run_fp32=True), REST)
      for found in FOUND),
    *((NATIVE, "bf16", NOTHING, found, IN_FP32, REST) for found in FOUND),
    # what quantising or fp16 accumulation did is put right by leaving that off, and nothing more
    *((structure, dtype, NOTHING, inside("blocks.1", **{what: value}), PrecisionOverrides(**then), said)
      for structure in (BLOCKS, NATIVE) for dtype in ("fp16", "bf16")
      for what, value, then, said in (
          ("quantised", "blocks.1.inner", {"unquantised": ("blocks.1.inner",)}, f"'blocks.1.inner' unquantised {NEXT}"),
          ("fp16_accumulation", True, {"fp16_error": 1.0}, f"no fp16 accumulation {NEXT}"))),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "dtype", "known", "found", "then", "said"), STEPS)
def test_what_follows_from_a_diagnosis(structure, dtype, known, found, then, said):
    assert escalate_overrides(known, found, structure, dtype) == (then, said)


@pytest.mark.parametrize(
    ("dtype", "known", "name", "lessons"),
    [
        ("bf16", in_fp32("transformer_blocks.0"), "time_embedding.linear_1", [
            in_fp32("transformer_blocks.0", "time_embedding.linear_1"),
            in_fp32("transformer_blocks.0", "time_embedding"),  # which the layer is a part of
            in_fp32("transformer_blocks.0", "time_embedding", whole_run_fp32=True),  # nothing is around it
        ]),
        ("bf16", NOTHING, "transformer_blocks.0.ff", [
            in_fp32("transformer_blocks.0"), in_fp32("transformer_blocks.0", whole_run_fp32=True),
        ]),
        *(("fp16", NOTHING, name, [ALL_LAYERS_SCALED, replace(ALL_LAYERS_SCALED, whole_run_fp32=True)])
          for name in ("transformer_blocks.0.ff", "time_embedding.linear_1")),
    ],
)  # fmt: skip
def test_what_is_learned_while_the_same_layer_goes_on_failing(cogvideox, dtype, known, name, lessons):
    found = []
    while not known.whole_run_fp32:
        diagnosis = diagnose_from_half_run(name, {}, cogvideox, dtype, known.fp32_fallback_blocks)
        known, _ = escalate_overrides(known, diagnosis, cogvideox, dtype)
        found.append(known)
    assert found == lessons
