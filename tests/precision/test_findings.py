"""From measured peaks to where a call failed, and to what follows: tables, no tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from blocky import STREAM, build
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.cogview3plus import COGVIEW3PLUS
from comfyui_onediff_guard.precision import overrides as findings
from comfyui_onediff_guard.precision.overrides import (
    ModuleStructure,
    OverflowDiagnosis,
    Peak,
    PrecisionOverrides,
    diagnose_from_half_run,
    escalate_overrides,
    parts_in_words,
)
from small_denoisers import build as build_denoiser

STREAMS = ModuleStructure.of(build(3), ["blocks"], STREAM)
PLAIN = ModuleStructure.of(build(3), ["blocks"])
HEALTHY = {
    "embed": Peak(3, 50),
    "blocks.0.norm": Peak(50, 3),
    "blocks.0.inner": Peak(3, 40),
    "blocks.0.write": Peak(1, 9e4),  # goes to the stream
    "blocks.1.norm": Peak(100, 3),
    "last_norm": Peak(200, 3),
    "out": Peak(3, 3),
}


def find(*args, **kwargs) -> Any:
    return findings.diagnose_from_fp32_peaks(*args, **kwargs)


@pytest.fixture(scope="module")
def model():
    """diffusers' own, small."""
    return build_denoiser("CogVideoX-2B")[0]


def test_a_modules_parts_by_name():
    assert PLAIN.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert STREAMS.blocks == ("embed", *PLAIN.blocks), "where the stream starts"
    assert STREAMS.repeated == PLAIN.repeated == PLAIN.blocks
    assert STREAMS.writers == {"embed", *(f"blocks.{i}.write" for i in range(3))}
    assert STREAMS.norms == {"last_norm", *(f"blocks.{i}.norm" for i in range(3))}
    assert ModuleStructure.of(build(1), ["embed", "blocks"]).blocks == ("embed", "blocks.0"), "a part that is no list"


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("blocks.1", "blocks.1"),
        ("embed.proj", "embed"),
        ("blocks.1.ff.net.0", "blocks.1"),
        ("blocks.10.ff", "blocks.10.ff"),  # not one of blocks.1
        ("out", "out"),
        ("blocks", None),
        ("", None),
    ],
)
def test_where_a_module_lives(name, home):
    assert STREAMS.home(name) == home


def test_nothing_is_found_where_nothing_left_the_range():
    assert find(HEALTHY, STREAMS, "fp16") is None
    assert find({"blocks.0.inner": Peak(65504, 65504)}, STREAMS, "fp16") is None, "the last value that fits"


@pytest.mark.parametrize(
    ("changed", "module", "peak", "stream", "islands"),
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
def test_what_left_the_range(changed, module, peak, stream, islands):
    found = find(HEALTHY | changed, STREAMS, "fp16")
    assert (found.module, found.peak, found.stream, found.islands) == (module, peak, stream, islands)
    assert not found.hopeless and len(found.reason) < 200


def test_a_wide_stream_has_float32s_range():
    peaks = {"blocks.1.norm": Peak(5e5, 1)}
    assert find(peaks, STREAMS, "fp16", wide=True) is None
    found = find(peaks, STREAMS, "fp16")
    assert found.stream == 5e5 and found.reason.endswith("reaches 5e+05, beyond fp16's 65504")
    assert find({"blocks.1.norm": Peak(math.inf, 1)}, STREAMS, "fp16", wide=True).stream == math.inf


def test_what_is_an_island_already_is_not_found_again():
    peaks = {"blocks.1.inner": Peak(3, 7e4)}
    assert find(peaks, STREAMS, "fp16", islands=("blocks.1",)) is None
    more = peaks | {"blocks.2.inner": Peak(8e4, 1)}
    assert find(more, STREAMS, "fp16", islands=("blocks.1",)).islands == ("blocks.2",)
    assert find({"time.linear_1": Peak(3, 7e4)}, STREAMS, "fp16", islands=("time",)) is None, "nor what is in one"


def test_bf16_has_bf16s_range():
    assert find({"blocks.1.inner": Peak(3, 1e38), "blocks.1.norm": Peak(1e38, 1)}, STREAMS, "bf16") is None
    found = find({"blocks.1.inner": Peak(3, math.inf)}, STREAMS, "bf16")
    assert found.islands == ("blocks.1",) and "bf16's 3.3895e+38" in found.reason


def test_a_layer_outside_of_the_blocks_whose_output_does_not_fit_cannot_be_helped():
    for anatomy in (STREAMS, PLAIN):
        assert find({"out": Peak(1, 7e4)}, anatomy, "fp16").hopeless
        assert find({"out": Peak(7e4, 1)}, anatomy, "fp16").hopeless, "what goes in is infinite already"


def test_parts_outside_of_the_blocks_that_can_be_islands(model):
    anatomy = ModuleStructure.of(model, COGVIDEOX.blocks, COGVIDEOX.stream)
    assert anatomy.groups == ("time_embedding", "norm_out")
    assert ModuleStructure.of(model, ["transformer_blocks"]).groups == ("patch_embed", "time_embedding", "norm_out")


FITS = {"time_embedding": Peak(1, 50), "time_embedding.linear_1": Peak(1, 1e5), "time_embedding.act": Peak(1e5, 1e5),
        "time_embedding.linear_2": Peak(1e5, 50)}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "islands", "hopeless"),
    [
        ({}, ("time_embedding",), False),
        ({"time_embedding": Peak(1, 7e4)}, (), True),  # what comes after it cannot take it
        ({"time_embedding": Peak(7e4, 50)}, (), True),
        ({"proj_out": Peak(1, 7e4)}, ("time_embedding",), True),
        ({"transformer_blocks.0.ff.net.2": Peak(1e5, 1)}, ("time_embedding", "transformer_blocks.0"), False),
    ],
)
def test_an_island_outside_of_the_blocks_is_the_smallest_part_that_fits(model, changed, islands, hopeless):
    anatomy = ModuleStructure.of(model, COGVIDEOX.blocks, COGVIDEOX.stream)
    found = find(FITS | changed, anatomy, "fp16")
    assert (found.islands, found.hopeless) == (islands, hopeless)
    assert found.module == "time_embedding.linear_1"
    outside = "'time_embedding.linear_1' reaches 1e+05, beyond fp16's 65504: outside of the blocks, apart from"
    assert found.reason.startswith(outside)


def lessons(anatomy, dtype, known, name):
    """What is learned while the same layer goes on failing in the half-precision call."""
    while not known.whole_run_fp32:
        finding = diagnose_from_half_run(name, {}, anatomy, dtype, known.islands)
        known, _ = escalate_overrides(known, finding, anatomy, dtype)
        yield known


def test_where_a_layer_as_an_island_does_not_help_the_part_around_it_is_one(model):
    anatomy = ModuleStructure.of(model, COGVIDEOX.blocks, COGVIDEOX.stream)
    known = PrecisionOverrides(islands=("transformer_blocks.0",))
    found = list(lessons(anatomy, "bf16", known, "time_embedding.linear_1"))
    assert [each.islands for each in found[:2]] == [
        ("transformer_blocks.0", "time_embedding.linear_1"),
        ("transformer_blocks.0", "time_embedding"),  # which the layer is a part of
    ]
    assert found[2:] == [PrecisionOverrides(islands=found[1].islands, whole_run_fp32=True)], "nothing is around it"


def test_in_fp16_what_fails_again_when_it_is_wide_becomes_an_island(model):
    anatomy = ModuleStructure.of(model, COGVIDEOX.blocks, COGVIDEOX.stream)
    assert list(lessons(anatomy, "fp16", PrecisionOverrides(wide=True), "transformer_blocks.0.ff")) == [
        PrecisionOverrides(wide=True, wide_parts=("transformer_blocks.0",)),
        PrecisionOverrides(wide=True, islands=("transformer_blocks.0",)),
        PrecisionOverrides(everything=True),
        PrecisionOverrides(everything=True, whole_run_fp32=True),
    ]
    assert list(lessons(anatomy, "fp16", PrecisionOverrides(), "time_embedding.linear_1")) == [
        PrecisionOverrides(wide_parts=("time_embedding.linear_1",)),
        PrecisionOverrides(islands=("time_embedding.linear_1",)),
        PrecisionOverrides(islands=("time_embedding",)),  # which was no better where a part of it ran in fp32
        PrecisionOverrides(everything=True),
        PrecisionOverrides(everything=True, whole_run_fp32=True),
    ]


def test_of_a_wide_part_that_fails_again_all_becomes_an_island(model):
    """Of a part and what is in it, only the part would be followed."""
    anatomy = ModuleStructure.of(model, COGVIDEOX.blocks, COGVIDEOX.stream)
    inside = OverflowDiagnosis("", islands=("time_embedding.linear_2",))
    learned, action = escalate_overrides(
        PrecisionOverrides(wide_parts=("proj_out", "time_embedding")), inside, anatomy, "fp16"
    )
    assert learned == PrecisionOverrides(wide_parts=("proj_out",), islands=("time_embedding",))
    assert action == "'time_embedding' in fp32 from the next call on"
    around = OverflowDiagnosis("", islands=("time_embedding",))
    learned, _ = escalate_overrides(
        PrecisionOverrides(wide_parts=("time_embedding.linear_2",)), around, anatomy, "fp16"
    )
    assert learned == PrecisionOverrides(wide_parts=("time_embedding",))


def test_a_part_that_reads_the_stream_fits_where_the_stream_is_wide():
    model = build_denoiser("CogView3-Plus")[0]
    anatomy = ModuleStructure.of(model, COGVIEW3PLUS.blocks, COGVIEW3PLUS.stream)
    peaks = {"norm_out": Peak(1e6, 3), "norm_out.act": Peak(1, 9e4), "norm_out.linear": Peak(9e4, 2)}
    peaks["norm_out.norm"] = Peak(1e6, 3)
    found = find(peaks, anatomy, "fp16")
    assert (found.islands, found.stream, found.hopeless) == (("norm_out",), 1e6, False)


def test_a_block_whose_output_does_not_fit_cannot_be_helped_by_itself_where_the_stream_is_not_known():
    peaks = {"blocks.1": Peak(1, 7e4), "blocks.2.norm": Peak(7e4, 1)}
    found = find(peaks, PLAIN, "fp16")
    assert found.hopeless and found.module == "blocks.1" and "puts out 7e+04" in found.reason
    in_fp32 = "the rest of the run in fp32"
    everything, action = escalate_overrides(
        PrecisionOverrides(wide_parts=("blocks.0",), islands=("out",)), found, PLAIN, "fp16"
    )
    assert everything == PrecisionOverrides(everything=True), "what was learned of parts is of no use any more"
    assert action == "every layer wide from the next call on"
    assert escalate_overrides(everything, found, PLAIN, "fp16") == (replace(everything, whole_run_fp32=True), in_fp32)
    assert escalate_overrides(PrecisionOverrides(), found, PLAIN, "bf16") == (
        PrecisionOverrides(whole_run_fp32=True),
        in_fp32,
    ), "it has fp32's range"


@pytest.mark.parametrize(
    "finding",
    [OverflowDiagnosis(""), OverflowDiagnosis("", islands=("blocks.1",)), OverflowDiagnosis("", hopeless=True)],
)
def test_where_islands_are_of_no_use_everything_is_wide_at_once(finding):
    native = ModuleStructure(everything=True)
    everything, action = escalate_overrides(PrecisionOverrides(), finding, native, "fp16")
    assert (everything, action) == (PrecisionOverrides(everything=True), "every layer wide from the next call on")
    assert escalate_overrides(everything, finding, native, "fp16")[0].whole_run_fp32
    assert escalate_overrides(PrecisionOverrides(), finding, native, "bf16")[0] == PrecisionOverrides(
        whole_run_fp32=True
    )


def test_where_every_layer_is_wide_no_part_can_be_wider():
    everything, inside = PrecisionOverrides(everything=True), OverflowDiagnosis("", islands=("blocks.1",))
    assert escalate_overrides(everything, inside, STREAMS, "fp16")[0] == replace(everything, whole_run_fp32=True)
    assert escalate_overrides(everything, OverflowDiagnosis("nothing was found"), STREAMS, "fp16") == (everything, "")


@pytest.mark.parametrize(
    ("name", "islands", "words"),
    [
        ("blocks.1.attn", ("blocks.1",), "inside attention, apart from the residual stream"),
        ("blocks.1.inner", ("blocks.1",), "inside 'blocks.1.inner', apart from the residual stream"),
        ("out", ("out",), "inside 'out'"),
    ],
)
def test_what_only_the_half_call_shows(name, islands, words):
    found = diagnose_from_half_run(name, {"out": Peak(1, 2)}, STREAMS, "fp16")
    assert (found.module, found.islands, found.hopeless) == (name, islands, False)
    assert words in found.reason and found.peak == (2 if name == "out" else None)


def test_what_only_the_half_call_shows_and_no_island_helps():
    assert diagnose_from_half_run("", {}, STREAMS, "fp16").hopeless, "the module's own forward"
    assert diagnose_from_half_run("blocks.1.inner", {}, STREAMS, "bf16", islands=("blocks.1",)).hopeless, (
        "it is one already"
    )
    nothing = diagnose_from_half_run(None, {}, STREAMS, "bf16")
    assert not nothing.hopeless and not nothing.islands and "did not fail" in nothing.reason


def test_lessons_add_up():
    learned, action = escalate_overrides(
        PrecisionOverrides(), OverflowDiagnosis("", stream=5e5, islands=("blocks.1",)), STREAMS, "fp16"
    )
    assert learned == PrecisionOverrides(wide=True, wide_parts=("blocks.1",))
    assert action == "its residual stream in float32 and 'blocks.1' wide from the next call on"
    learned, action = escalate_overrides(
        learned, OverflowDiagnosis("", islands=("blocks.1", "blocks.0")), STREAMS, "fp16"
    )
    assert learned == PrecisionOverrides(wide=True, wide_parts=("blocks.0",), islands=("blocks.1",))
    assert action == "'blocks.0' wide and 'blocks.1' in fp32 from the next call on"
    assert escalate_overrides(learned, OverflowDiagnosis("", islands=("blocks.1",)), STREAMS, "fp16")[0] == learned, (
        "known already"
    )
    assert escalate_overrides(learned, OverflowDiagnosis("", stream=4e5), STREAMS, "fp16")[0] == learned, (
        "it is already"
    )
    assert escalate_overrides(learned, OverflowDiagnosis("nothing was found"), STREAMS, "fp16") == (learned, "")


def test_in_bf16_a_part_becomes_an_island_at_once():
    learned, action = escalate_overrides(
        PrecisionOverrides(), OverflowDiagnosis("", islands=("blocks.1",)), STREAMS, "bf16"
    )
    assert (learned, action) == (PrecisionOverrides(islands=("blocks.1",)), "'blocks.1' in fp32 from the next call on")
    assert escalate_overrides(learned, OverflowDiagnosis("", islands=("blocks.0",)), STREAMS, "bf16")[0].islands == (
        "blocks.1",
        "blocks.0",
    )


@pytest.mark.parametrize("peak", [math.inf, math.nan])
@pytest.mark.parametrize("anatomy", [STREAMS, ModuleStructure(everything=True)])
def test_a_stream_that_is_not_finite_in_fp32_cannot_be_helped(peak, anatomy):
    finding = OverflowDiagnosis("", stream=peak, islands=("blocks.1",), hopeless=True)
    assert escalate_overrides(PrecisionOverrides(), finding, anatomy, "fp16")[0] == PrecisionOverrides(
        whole_run_fp32=True
    )


def test_names_are_short():
    assert parts_in_words(("a", "b")) == "'a', 'b'"
    assert parts_in_words(tuple("abcd")) == "4 parts"
