"""From measured peaks to where a call failed, and to what follows: tables, no tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from blocky import STREAM, build
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS
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

STREAMS = ModuleStructure.of(build(3), ["blocks"], STREAM)
PLAIN = ModuleStructure.of(build(3), ["blocks"])
NATIVE = ModuleStructure(all_layers_scaled=True)
HEALTHY = {
    "embed": Peak(3, 50),
    "blocks.0.norm": Peak(50, 3),
    "blocks.0.inner": Peak(3, 40),
    "blocks.0.write": Peak(1, 9e4),  # goes to the stream
    "blocks.1.norm": Peak(100, 3),
    "last_norm": Peak(200, 3),
    "out": Peak(3, 3),
}
IN_FP32, ALL_LAYERS_SCALED = PrecisionOverrides(whole_run_fp32=True), PrecisionOverrides(all_layers_scaled=True)


def find(peaks: dict[str, Peak], structure: ModuleStructure = STREAMS, dtype: str = "fp16", **more: Any) -> Any:
    return diagnose_from_fp32_peaks(peaks, structure, dtype, **more)


def in_fp32(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(fp32_fallback_blocks=names, **more)


def parts(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(scaled_blocks=names, **more)


def inside(*names: str, **more: Any) -> OverflowDiagnosis:
    return OverflowDiagnosis("", fallback_blocks=names, **more)


@pytest.fixture(scope="module")
def cogvideox() -> ModuleStructure:
    """That of diffusers' own, small."""
    return ModuleStructure.of(build_denoiser("CogVideoX-2B")[0], COGVIDEOX.blocks, COGVIDEOX.stream)


def test_a_modules_parts_by_name(cogvideox):
    assert PLAIN.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert STREAMS.blocks == ("embed", *PLAIN.blocks), "where the stream starts"
    assert STREAMS.repeated == PLAIN.repeated == PLAIN.blocks
    assert STREAMS.writers == {"embed", *(f"blocks.{i}.write" for i in range(3))}
    assert STREAMS.norms == {"last_norm", *(f"blocks.{i}.norm" for i in range(3))}
    assert ModuleStructure.of(build(1), ["embed", "blocks"]).blocks == ("embed", "blocks.0"), "a part that is no list"
    assert cogvideox.groups == ("time_embedding", "norm_out"), "which can be fallback blocks outside of the blocks"
    without = ModuleStructure.of(build_denoiser("CogVideoX-2B")[0], ["transformer_blocks"])
    assert without.groups == ("patch_embed", "time_embedding", "norm_out")
    assert parts_in_words(("a", "b")) == "'a', 'b'" and parts_in_words(tuple("abcd")) == "4 parts"


HOMES = {"blocks.1": "blocks.1", "embed.proj": "embed", "blocks.1.ff.net.0": "blocks.1", "out": "out"}
HOMES |= {"blocks.10.ff": "blocks.10.ff", "blocks": None, "": None}  # the first is not one of blocks.1


@pytest.mark.parametrize(("name", "home"), HOMES.items())
def test_where_a_module_lives(name, home):
    assert STREAMS.home(name) == home


# --- from peaks in fp32 to a diagnosis --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peaks", "more"),
    [
        (HEALTHY, {}),
        ({"blocks.0.inner": Peak(65504, 65504)}, {}),  # the last value that fits
        (
            {"blocks.1.norm": Peak(5e5, 1)},
            {"fp32_residual_stream": True},
        ),  # an fp32 residual stream has float32's range
        ({"blocks.1.inner": Peak(3, 7e4)}, {"parts": ("blocks.1",)}),  # a fallback block already
        ({"time.linear_1": Peak(3, 7e4)}, {"parts": ("time",)}),  # in one
        ({"blocks.1.inner": Peak(3, 1e38), "blocks.1.norm": Peak(1e38, 1)}, {"dtype": "bf16"}),
    ],
)
def test_nothing_is_found_where_nothing_left_the_range(peaks, more):
    assert find(peaks, **more) is None


@pytest.mark.parametrize(
    ("changed", "module", "peak", "stream", "fallback_blocks"),
    [
        ({"blocks.1.inner": Peak(3, 65505)}, "blocks.1.inner", 65505, None, ("blocks.1",)),
        ({"blocks.1.inner": Peak(7e4, 1)}, "blocks.1.inner", 7e4, None, ("blocks.1",)),
        ({"blocks.1.inner": Peak(3, math.inf)}, "blocks.1.inner", math.inf, None, ("blocks.1",)),
        ({"blocks.1.write": Peak(7e4, 1)}, "blocks.1.write", 7e4, None, ("blocks.1",)),
        ({"blocks.1.norm": Peak(7e4, 1)}, "blocks.1.norm", 7e4, 7e4, ()),
        ({"blocks.1.norm": Peak(1, 7e4)}, "blocks.1.norm", 7e4, None, ("blocks.1",)),
        ({"blocks.1.norm": Peak(7e4, 1), "last_norm": Peak(9e4, 1)}, "blocks.1.norm", 7e4, 9e4, ()),
        ({"blocks.1.norm": Peak(7e4, 1), "blocks.0.inner": Peak(1, 8e4)}, "blocks.0.inner", 8e4, 7e4, ("blocks.0",)),
        ({"embed": Peak(7e4, 1)}, "embed", 7e4, None, ("embed",)),
        ({"blocks.0.inner": Peak(1, 7e4), "blocks.1.inner": Peak(1, 8e4)}, "blocks.0.inner", 7e4, None,
         ("blocks.0", "blocks.1")),
    ],
)  # fmt: skip
def test_what_left_the_range(changed, module, peak, stream, fallback_blocks):
    found = find(HEALTHY | changed)
    assert (found.module, found.peak, found.stream, found.fallback_blocks) == (module, peak, stream, fallback_blocks)
    assert not found.hopeless and len(found.reason) < 200


def test_the_reason_names_the_range_and_a_fallback_block_is_not_found_again():
    found = find({"blocks.1.norm": Peak(5e5, 1)})
    assert found.stream == 5e5 and found.reason.endswith("reaches 5e+05, beyond fp16's 65504")
    assert find({"blocks.1.norm": Peak(math.inf, 1)}, fp32_residual_stream=True).stream == math.inf
    found = find({"blocks.1.inner": Peak(3, math.inf)}, dtype="bf16")
    assert found.fallback_blocks == ("blocks.1",) and "bf16's 3.3895e+38" in found.reason
    more = {"blocks.1.inner": Peak(3, 7e4), "blocks.2.inner": Peak(8e4, 1)}
    assert find(more, parts=("blocks.1",)).fallback_blocks == ("blocks.2",)


@pytest.mark.parametrize("structure", [STREAMS, PLAIN])
@pytest.mark.parametrize("peak", [Peak(1, 7e4), Peak(7e4, 1)])  # the second: what goes in is infinite already
def test_a_layer_outside_of_the_blocks_whose_output_does_not_fit_cannot_be_helped(structure, peak):
    assert find({"out": peak}, structure).hopeless


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
    assert (found.fallback_blocks, found.hopeless, found.module) == (
        fallback_blocks,
        hopeless,
        "time_embedding.linear_1",
    )
    outside = "'time_embedding.linear_1' reaches 1e+05, beyond fp16's 65504: outside of the blocks, apart from"
    assert found.reason.startswith(outside)


def test_a_part_that_reads_the_stream_fits_where_the_stream_is_fp32():
    structure = ModuleStructure.of(build_denoiser("CogView3-Plus")[0], COGVIEW3PLUS.blocks, COGVIEW3PLUS.stream)
    peaks = {"norm_out": Peak(1e6, 3), "norm_out.act": Peak(1, 9e4), "norm_out.linear": Peak(9e4, 2)}
    found = find(peaks | {"norm_out.norm": Peak(1e6, 3)}, structure)
    assert (found.fallback_blocks, found.stream, found.hopeless) == (("norm_out",), 1e6, False)


def test_a_block_whose_output_does_not_fit_cannot_be_helped_by_itself_where_the_stream_is_not_known():
    found = find({"blocks.1": Peak(1, 7e4), "blocks.2.norm": Peak(7e4, 1)}, PLAIN)
    assert found.hopeless and found.module == "blocks.1" and "puts out 7e+04" in found.reason


@pytest.mark.parametrize(
    ("name", "part", "words"),
    [
        ("blocks.1.attn", "blocks.1", "inside attention, apart from the residual stream"),
        ("blocks.1.inner", "blocks.1", "inside 'blocks.1.inner', apart from the residual stream"),
        ("out", "out", "inside 'out'"),
    ],
)
def test_what_only_the_half_call_shows(name, part, words):
    found = diagnose_from_half_run(name, {"out": Peak(1, 2)}, STREAMS, "fp16")
    assert (found.module, found.fallback_blocks, found.hopeless) == (name, (part,), False)
    assert words in found.reason and found.peak == (2 if name == "out" else None)


def test_what_only_the_half_call_shows_and_no_fallback_block_helps():
    assert diagnose_from_half_run("", {}, STREAMS, "fp16").hopeless, "the module's own forward"
    again = diagnose_from_half_run("blocks.1.inner", {}, STREAMS, "bf16", fallback_blocks=("blocks.1",))
    assert again.hopeless, "it is one already"
    nothing = diagnose_from_half_run(None, {}, STREAMS, "bf16")
    assert not nothing.hopeless and not nothing.fallback_blocks and "did not fail" in nothing.reason


# --- from a diagnosis to what follows ---------------------------------------------------------------------------------

NEXT = "from here on"
ALL_PROTECTED, REST = f"overflow protection in every layer {NEXT}", "the rest of the run in fp32"
HOPELESS, NOT_FOUND = OverflowDiagnosis("", hopeless=True), OverflowDiagnosis("nothing was found")
KNOWN = parts("blocks.0", fp32_residual_stream=True, fp32_fallback_blocks=("blocks.1",))
STEPS = [  # structure, dtype, what is known, what is found → what is known then, and what is said of it
    (STREAMS, "fp16", NOTHING, inside("blocks.1", stream=5e5), parts("blocks.1", fp32_residual_stream=True),
     f"its residual stream protected and 'blocks.1' protected {NEXT}"),
    (STREAMS, "fp16", parts("blocks.1", fp32_residual_stream=True), inside("blocks.1", "blocks.0"), KNOWN,
     f"'blocks.0' protected and 'blocks.1' in fp32 {NEXT}"),
    (STREAMS, "fp16", KNOWN, inside("blocks.1"), KNOWN, None),
    (STREAMS, "fp16", KNOWN, inside(stream=4e5), KNOWN, None),
    (STREAMS, "fp16", KNOWN, NOT_FOUND, KNOWN, ""),
    (STREAMS, "bf16", NOTHING, inside("blocks.1"), in_fp32("blocks.1"), f"'blocks.1' in fp32 {NEXT}"),
    (STREAMS, "bf16", in_fp32("blocks.1"), inside("blocks.0"), in_fp32("blocks.1", "blocks.0"), None),
    # where every layer is scaled, no part can be protected more, and what was learned of parts is of no use
    (STREAMS, "fp16", ALL_LAYERS_SCALED, inside("blocks.1"), replace(ALL_LAYERS_SCALED, whole_run_fp32=True), None),
    (STREAMS, "fp16", ALL_LAYERS_SCALED, NOT_FOUND, ALL_LAYERS_SCALED, ""),
    (PLAIN, "fp16", parts("blocks.0", fp32_fallback_blocks=("out",)), HOPELESS, ALL_LAYERS_SCALED, ALL_PROTECTED),
    (PLAIN, "fp16", ALL_LAYERS_SCALED, HOPELESS, replace(ALL_LAYERS_SCALED, whole_run_fp32=True), REST),
    (PLAIN, "bf16", NOTHING, HOPELESS, IN_FP32, REST),  # it has fp32's range
    # where fallback blocks are of no use, every layer is scaled at once
    *((NATIVE, "fp16", NOTHING, found, ALL_LAYERS_SCALED, ALL_PROTECTED)
      for found in (inside(), inside("blocks.1"), HOPELESS)),
    *((NATIVE, "fp16", ALL_LAYERS_SCALED, found, replace(ALL_LAYERS_SCALED, whole_run_fp32=True), None)
      for found in (inside(), inside("blocks.1"), HOPELESS)),
    *((NATIVE, "bf16", NOTHING, found, IN_FP32, None) for found in (inside(), inside("blocks.1"), HOPELESS)),
    # a stream that is not finite in fp32 cannot be helped
    *((structure, "fp16", NOTHING, inside("blocks.1", stream=peak, hopeless=True), IN_FP32, None)
      for structure in (STREAMS, NATIVE) for peak in (math.inf, math.nan)),
]  # fmt: skip


@pytest.mark.parametrize(("structure", "dtype", "known", "found", "then", "said"), STEPS)
def test_what_follows_from_a_diagnosis(structure, dtype, known, found, then, said):
    learned, action = escalate_overrides(known, found, structure, dtype)
    assert learned == then and said in (None, action)


def test_of_a_scaled_block_that_fails_again_all_becomes_a_fallback_block(cogvideox):
    """Of a part and what is in it, only the part would be followed."""
    known = parts("proj_out", "time_embedding")
    learned, action = escalate_overrides(known, inside("time_embedding.linear_2"), cogvideox, "fp16")
    assert learned == parts("proj_out", fp32_fallback_blocks=("time_embedding",))
    assert action == f"'time_embedding' in fp32 {NEXT}"
    known = parts("time_embedding.linear_2")
    learned, _ = escalate_overrides(known, inside("time_embedding"), cogvideox, "fp16")
    assert learned == parts("time_embedding")


@pytest.mark.parametrize(
    ("dtype", "known", "name", "lessons"),
    [
        ("bf16", in_fp32("transformer_blocks.0"), "time_embedding.linear_1", [
            in_fp32("transformer_blocks.0", "time_embedding.linear_1"),
            in_fp32("transformer_blocks.0", "time_embedding"),  # which the layer is a part of
            in_fp32("transformer_blocks.0", "time_embedding", whole_run_fp32=True),  # nothing is around it
        ]),
        ("fp16", PrecisionOverrides(fp32_residual_stream=True), "transformer_blocks.0.ff", [
            parts("transformer_blocks.0", fp32_residual_stream=True),
            in_fp32("transformer_blocks.0", fp32_residual_stream=True),
            ALL_LAYERS_SCALED, replace(ALL_LAYERS_SCALED, whole_run_fp32=True),
        ]),
        ("fp16", NOTHING, "time_embedding.linear_1", [
            parts("time_embedding.linear_1"), in_fp32("time_embedding.linear_1"),
            in_fp32("time_embedding"),  # which was no better where a part of it ran in fp32
            ALL_LAYERS_SCALED, replace(ALL_LAYERS_SCALED, whole_run_fp32=True),
        ]),
    ],
)  # fmt: skip
def test_what_is_learned_while_the_same_layer_goes_on_failing(cogvideox, dtype, known, name, lessons):
    found = []
    while not known.whole_run_fp32:
        diagnosis = diagnose_from_half_run(name, {}, cogvideox, dtype, known.fp32_fallback_blocks)
        known, _ = escalate_overrides(known, diagnosis, cogvideox, dtype)
        found.append(known)
    assert found == lessons
