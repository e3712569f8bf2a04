"""NaN Guard (native) with a precision of its own, and every layer wide, on every family of ComfyUI's own."""

from __future__ import annotations

import math
from typing import Any

import native
import native_table
import pytest
from native import FAMILIES

WEIGHTS = ("fp16", "bf16 in fp32")
HEALTHY, HOT = "healthy", ("hot in the stream", "hot inside")
FEW = ("sd15", "flux", "qwen_image", "wan")
WIDE = "every layer wide; "
DYNAMIC = ("dynamic", "dynamic, little room", "dynamic, no room")
BESIDE = (
    *("LoRA", "LoRA on fp16 as it goes", "LoRA on bf16 in fp32 as it goes", "fp8", "packed weights"),
    *("EasyCache", "blocks replaced", "ControlNet", "torch.compile before", "torch.compile after"),
    *("bf16 that fp16 does not hold", "streams", "streams, with LoRA"),
    *(way + lora for way in DYNAMIC for lora in ("", ", with LoRA")),
)
FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8", "int8, rotated", "nvfp4", "mxfp8", "convrot_w4a4", "asym_w4a8_int8")
HAVE_NO = {"wan": ("ControlNet",), "flux": ("bf16 that fp16 does not hold",)}


@pytest.fixture(scope="module")
def ran(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_wide_cases", tmp_path_factory.mktemp("native_wide"), leg=leg)


@pytest.fixture(scope="module")
def beside(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    return native.run("native_wide_beside_cases", tmp_path_factory.mktemp("native_wide_beside"), leg=leg)


def figures(ran: native.Ran, case: str, family: str, state: str = "") -> dict[str, Any]:
    if family not in ran["about/families"]:
        pytest.skip(f"ComfyUI {ran['about/version']} has no {family}")
    found = ran[f"{case}/{family}, {state}" if state else f"{case}/{family}"]
    assert not found.get("error"), found["error"]
    return found


def says(text: str, *parts: str) -> bool:
    """Of the run's report."""
    return "0 reruns." in text and all(part in text for part in parts)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("heat", [HEALTHY, *HOT])
@pytest.mark.parametrize("family", FAMILIES)
def test_wide_layers_are_right_without_a_rerun(ran: native.Ran, family: str, heat: str, weights: str) -> None:
    found = figures(ran, "families", family, f"{weights}, {heat}")
    assert says(found["said"], "asked for fp16", WIDE), found["said"]
    assert 0 < found["wide"] <= found["bf16"] / 4
    if (weights, heat) == ("fp16", HEALTHY):
        assert found["wide"] <= found["plain"]


@pytest.mark.parametrize("heat", HOT)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_is_broken_as_comfyui_computes_it(ran: native.Ran, family: str, heat: str) -> None:
    plain = figures(ran, "families", family, f"fp16, {heat}")["plain"]
    assert math.isnan(plain) or plain > 2e-2


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("heat", [HEALTHY, *HOT])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_that_went_in_stays_as_it_is(ran: native.Ran, family: str, heat: str, weights: str) -> None:
    assert figures(ran, "families", family, f"{weights}, {heat}")["as before"]


@pytest.mark.parametrize("family", FAMILIES)
def test_scope_learned_reruns_once_and_is_wide_from_then_on(ran: native.Ran, family: str) -> None:
    found = figures(ran, "learned", family)
    told, report = found["first said"]
    assert told.startswith("call 1: non-finite in fp16")
    assert WIDE in report and "2 steps, 1 rerun." in report
    (report,) = found["second said"]
    assert says(report, WIDE)
    (report,) = found["after a restart said"]
    assert says(report, WIDE) and "from a profile: " in report
    assert max(found[run] for run in ("first", "second", "after a restart")) <= 5e-3


@pytest.mark.parametrize("run", ["LoRA again", "LoRA as it goes", "in part", "again"])
def test_what_was_learned_is_known_to_the_next_guard_of_the_same_model(ran: native.Ran, run: str) -> None:
    said = ran[f"learned_of_others/{run}"]
    assert says(said, WIDE) and "from a profile: " in said


@pytest.mark.parametrize("run", ["first", "LoRA"])
def test_what_another_model_learned_is_not_known(ran: native.Ran, run: str) -> None:
    said = ran[f"learned_of_others/{run}"]
    assert "2 steps, 1 rerun." in said and "profile" not in said


def test_a_healthy_model_beside_one_that_overflows_keeps_its_bits(ran: native.Ran) -> None:
    assert ran["learned_of_others/healthy kept its bits"]
    assert "profile" not in ran["learned_of_others/healthy"]


@pytest.mark.parametrize("weights", [*WEIGHTS, "bf16"])
@pytest.mark.parametrize("family", FEW)
def test_auto_is_wide_where_the_card_has_no_bf16(ran: native.Ran, family: str, weights: str) -> None:
    found = ran[f"precisions/{family}, {weights}, auto, sm75"]
    assert says(found["said"], "no native bf16 → fp16, every layer wide")
    assert 0 < found["distance"] <= 5e-3


@pytest.mark.parametrize("card", ["sm80", "sm90", "cpu"])
@pytest.mark.parametrize("weights", [*WEIGHTS, "bf16"])
@pytest.mark.parametrize("family", FEW)
def test_auto_is_what_comfyui_chose_where_the_card_has_bf16(
    ran: native.Ran, family: str, weights: str, card: str
) -> None:
    found = ran[f"precisions/{family}, {weights}, auto, {card}"]
    assert found["same bits"] and says(found["said"], "ComfyUI chose") and WIDE not in found["said"]


def test_auto_is_fp32_where_comfyui_was_told_to(ran: native.Ran) -> None:
    for option in ("fp32_unet", "force_fp32"):
        found = ran[f"options/{option}"]
        assert found["same bits"] and says(found["said"], "ComfyUI was started with fp32")


@pytest.mark.parametrize("family", FEW)
def test_every_other_precision_is_what_it_says(ran: native.Ran, family: str) -> None:
    found = {
        (weights, precision): ran[f"precisions/{family}, {weights}, {precision}, cpu"]
        for weights in (*WEIGHTS, "bf16")
        for precision in ("inherit", "bf16", "fp16 (plain)", "fp32")
    }
    as_it_is = {("fp16", "fp16 (plain)"), ("bf16", "bf16"), ("bf16 in fp32", "fp32")}
    as_it_is |= {(weights, "inherit") for weights in (*WEIGHTS, "bf16")}
    assert {asked for asked, made in found.items() if made["same bits"]} == as_it_is
    for (weights, precision), made in found.items():
        if precision == "fp16 (plain)" and weights != "fp16":
            assert made["said"].startswith("BadInput: ComfyUI computes") and "--fp16-unet" in made["said"]
        else:
            assert says(made["said"])
        if precision == "fp32":
            assert made["distance"] <= 1e-5
        if precision == "bf16":
            assert 1e-3 <= made["distance"] <= 3e-2
    assert "has no bf16, not even emulated" in ran["no_bf16/said"]


@pytest.mark.parametrize("family", FEW)
def test_plain_fp16_is_left_as_broken_as_it_is(ran: native.Ran, family: str) -> None:
    found = ran[f"plain/{family}"]
    assert found["same bits"] and "2 steps, 0 reruns, 2 NOT FINITE" in found["said"]


@pytest.mark.parametrize("family", ["flux", "wan"])
def test_what_cannot_be_wide_is_as_comfyui_computes_it(ran: native.Ran, family: str) -> None:
    found = ran[f"scripted/{family}"]
    assert found["same bits"] and says(found["said"], "as ComfyUI computes it, since not every layer can be wide: ")
    assert WIDE not in found["said"]


def test_what_cannot_be_wide_is_not_learned(ran: native.Ran) -> None:
    assert not ran["not_learned/error"], ran["not_learned/error"]
    for run in ("first", "second"):
        assert ran[f"not_learned/{run}"] <= 5e-3
        assert "since not every layer can be wide: " in ran[f"not_learned/{run} said"][-1]


def states() -> list[tuple[str, str]]:
    found = [(family, state) for family in FEW for state in BESIDE if state not in HAVE_NO.get(family, ())]
    formats = [(family, name) for family in FEW for name in FORMATS]
    return found + [(f, f"quantised to {name}") for f, name in formats if f == "wan" or name in FORMATS[::2][:2]]


@pytest.mark.parametrize(("family", "state"), states())
def test_wide_layers_beside_others(beside: native.Ran, family: str, state: str) -> None:
    if f"beside/{family}, {state}" not in beside and state.startswith(("quantised", "dynamic")):
        pytest.skip(f"ComfyUI {beside['about/version']} has no such weights: {state}")
    found = figures(beside, "beside", family, state)
    assert says(found["said"], WIDE), found["said"]
    assert 0 < found["distance"] <= 1e-2


@pytest.mark.parametrize("family", FEW)
def test_of_two_guards_the_last_one_counts(beside: native.Ran, family: str) -> None:
    found = beside[f"two_guards/{family}"]
    assert found["wide"] and found["inherit"] and says(found["said"], WIDE)


def test_what_a_streamed_model_taught_is_known_to_the_next_guard(beside: native.Ran) -> None:
    ways = {name: told for name, told in beside.items() if name.startswith("learned/")}
    assert ways
    for first, second in ways.values():
        assert "2 steps, 1 rerun." in first or "from a profile: " in first  # of the same weights, streamed before
        assert says(second, WIDE, "from a profile: ")
    assert any("2 steps, 1 rerun." in first for first, _ in ways.values())


@pytest.mark.parametrize("order", ["before", "after", "learned"])
@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_each_half_is_wide(beside: native.Ran, family: str, order: str) -> None:
    if f"work_units/{family}, {order}" not in beside:
        pytest.skip("this ComfyUI computes guidance halves on one GPU: it is older than 0.23")
    found = beside[f"work_units/{family}, {order}"]
    assert says(found["said"], WIDE, "2 steps, 0 reruns."), found["said"]
    assert 0 < found["distance"] <= 1e-2


def test_the_table_has_them_all(ran: native.Ran) -> None:
    families = ran["about/families"]
    assert set(families) <= set(FAMILIES)
    found = {name.removeprefix("families/"): value for name, value in ran.items() if name.startswith("families/")}
    states = [f"{weights}, {heat}" for weights in WEIGHTS for heat in (HEALTHY, *HOT)]
    assert found.keys() == {f"{family}, {state}" for family in families for state in states}
    native_table.write_wide(ran["about/version"], families, states, found)
