"""Precision by architecture, model and component: the whole table and the facts behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import precision_page as page
import pytest
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.accumulation import Accumulation
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, Architecture, by_capability, by_gfx, named
from comfyui_onediff_guard.precision.policy import (
    Component,
    Plan,
    PlanImpossible,
    Precision,
    Variant,
    as_stored,
    choose,
)

TEXT, IMAGE, VAE_IN, DENOISER, VAE_OUT = Component
AUTO, BF16, FP16, PLAIN, FP32, FP8, INT8 = Precision

# Written by hand from the authors' and vendors' documents. `safe` is fp16 with overflow protection.
# No bf16 below sm80, on RDNA 2 and on Apple GPUs; fp16 brings nothing on sm61 and CPUs.
GOLDEN = """
                      sm61 sm70 sm75 sm80 sm86 sm89 sm90 sm120 sm130 gfx90a gfx1030 gfx1100 gfx9999 mps  cpu
CogVideoX-2B          fp32 safe safe safe safe safe safe safe  safe  safe   safe    safe    safe    safe fp32
CogVideoX-5B          fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
CogVideoX-5B-I2V      fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
CogVideoX-1.5-5B      fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
CogVideoX-1.5-5B-I2V  fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
CogView3-Plus-3B      fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
CogView4-6B           fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
SVD                   fp32 fp16 fp16 fp16 fp16 fp16 fp16 fp16  fp16  fp16   fp16    fp16    fp16    fp16 fp32
SVD-XT                fp32 fp16 fp16 fp16 fp16 fp16 fp16 fp16  fp16  fp16   fp16    fp16    fp16    fp16 fp32
SVD-XT 1.1            fp32 fp16 fp16 fp16 fp16 fp16 fp16 fp16  fp16  fp16   fp16    fp16    fp16    fp16 fp32
Wan2.1-T2V-1.3B       fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
Wan2.1-T2V-14B        fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
Wan2.2-TI2V-5B        fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
Wan2.2-T2V-A14B       fp32 safe safe bf16 bf16 bf16 bf16 bf16  bf16  bf16   safe    bf16    safe    safe bf16
"""
CARDS, *ROWS = (line.rsplit(maxsplit=15)[-16:] for line in GOLDEN.strip().splitlines())

UNLISTED = (by_capability(13, 0), by_capability(5, 2), by_gfx("gfx9999"))
OLD_MAC = replace(ARCHITECTURES["mps"], label="Apple GPU before macOS 14", bf16="none")
DEVICES = (*ARCHITECTURES.values(), *UNLISTED, OLD_MAC)
SM75, SM80 = ARCHITECTURES["sm75"], ARCHITECTURES["sm80"]
TWO_B = VARIANTS["CogVideoX-2B"]


def every_plan(device: Architecture) -> Iterator[tuple[Variant, Precision, Accumulation, Plan]]:
    """Every possible request on a device, without bf16, fp8 and int8 where the device lacks them."""
    for variant, request, switch in product(VARIANTS.values(), Precision, Accumulation):
        quantises = not request.quantises or request.value in device.quantises
        if quantises and (request is not BF16 or device.bf16 != "none"):
            for component in variant.components:
                yield variant, request, switch, choose(device, variant, component, request, switch)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_auto_matches_the_documented_table(row: list[str]) -> None:
    variant = VARIANTS[row[0]]
    found = {}
    for card in CARDS:
        plan = choose(named(card), variant, DENOISER, AUTO)
        found[card] = "safe" if plan.overflow_protection else plan.dtype
    assert found == dict(zip(CARDS, row[1:], strict=True))


def test_documented_table_lists_every_model() -> None:
    assert [row[0] for row in ROWS] == list(VARIANTS)


EXPECTED = {BF16: "bf16", FP16: "fp16", PLAIN: "fp16", FP32: "fp32", FP8: "bf16", INT8: "bf16"}


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_every_plan_of_a_device_is_consistent(device: Architecture) -> None:
    assert device.native_bf16 or not device.quantises, "layers that are not quantised run in bf16"
    for variant, request, switch, plan in every_plan(device):
        denoiser = choose(device, variant, DENOISER, request, switch)
        assert (plan.dtype, plan.reason) == (denoiser.dtype, denoiser.reason), "all run like the denoiser"
        assert plan.dtype == EXPECTED.get(request, plan.dtype), "the requested dtype is used"
        assert plan.half == (plan.dtype in ("fp16", "bf16"))

        assert plan.guarded == (plan.dtype != "fp32" and request is not PLAIN)
        can_be = plan.component in (TEXT, VAE_IN) or (plan.component is DENOISER and variant.protected)
        assert plan.overflow_protection == (can_be and plan.dtype == "fp16" and request is not PLAIN)
        assert plan.guarded or not plan.overflow_protection, (
            "it does not prevent overflow inside a block: the guard is required"
        )
        if plan.dtype == "fp16" and request is not PLAIN and plan.component is DENOISER and variant.leaves_fp16:
            assert plan.overflow_protection and plan.guarded, "plain fp16 only by its own name"

        is_denoiser, fast = plan.component is DENOISER, switch is Accumulation.FAST
        assert plan.quantised == (request.value if request.quantises and is_denoiser else "")
        assert bool(plan.quantised_reason) == request.quantises
        assert plan.numerics == (request.value if plan.quantised else plan.dtype)
        assert plan.unquantised.numerics == plan.dtype
        on = "on, with attention scores in fp32" if fast else "on" if device.name == "sm70" else "off"
        assert plan.accumulation == on

        assert plan.source == variant.source and plan.overflow_protection_reason
        assert plan.accumulation_source.endswith("/siliconflow/onediff/pull/454" if fast else "/onediff/issues/958")
        assert plan.reason.startswith(f"{plan.dtype}, since ") or request is not AUTO
        assert plan.reason.startswith(f"{request.value}, as you chose") or request is AUTO
        assert plan.guard_reason.startswith("on" if plan.guarded else ("off", "not needed"))
        assert ("'fast'" if fast else str(device)) in plan.accumulation_reason
        if request is not AUTO:  # a costly request names its cost
            safe = request is FP16 and plan.dtype == "fp16"
            assert ("is slow on" in plan.reason) == (safe and not device.fast_fp16 and not device.fp16_wrong)
            assert ("gives wrong results on" in plan.reason) == (safe and device.fp16_wrong)
            assert ("overflows plain fp16" in plan.reason) == (safe and variant.leaves_fp16)
            assert ("only emulates" in plan.reason) == (request is BF16 and device.bf16 == "emulated")
            nearer = request is BF16 and device.native_bf16 and variant.trained_in == "fp16"
            assert ("'auto' is closer to fp32" in plan.reason) == nearer
            assert ("for comparison" in plan.reason) == (request is PLAIN)


@pytest.mark.parametrize("accumulation", Accumulation)
@pytest.mark.parametrize("request_", [FP16, PLAIN, BF16, FP32, INT8])
def test_fp16_sums_are_only_for_a_denoiser_in_fp16_on_request(request_, accumulation):
    for component in TWO_B.components:
        plan = choose(ARCHITECTURES["sm89"], TWO_B, component, request_, accumulation)
        wanted = (component, request_, accumulation) == (DENOISER, FP16, Accumulation.FP16)
        assert plan.fp16_sums == wanted, component
        asked_in_vain = component is DENOISER and accumulation is Accumulation.FP16 and not wanted
        assert plan.fp16_sums_reason.startswith("off: ") == asked_in_vain
    others = ("sm90", "cpu") if request_ is INT8 else ("sm90", "cpu", "gfx11")
    plans = [choose(ARCHITECTURES[name], TWO_B, DENOISER, request_, accumulation) for name in others]
    assert not any(plan.fp16_sums for plan in plans), "no speedup on these devices"


@pytest.mark.parametrize(
    ("device", "model", "reason"),
    [
        ("sm80", "CogVideoX-5B", "bf16, since CogVideoX-5B was trained in bf16, which sm80 (Ampere) computes natively"),
        ("sm75", "CogVideoX-5B", "fp16, since sm75 (Turing) has no native bf16"),
        ("sm61", "CogVideoX-5B", "fp32, since sm61 (Pascal) has neither native bf16 nor fast fp16"),
        ("sm80", "CogVideoX-2B", "fp16, since CogVideoX-2B was trained in fp16"),
        ("cpu", "CogVideoX-2B", "fp32, since CogVideoX-2B was trained in fp16, which is slow on CPU"),
        ("sm80", "SVD-XT", "fp16, since SVD-XT is published in fp16"),
    ],
)
def test_reason_for_auto_names_the_deciding_fact(device: str, model: str, reason: str) -> None:
    assert choose(named(device), VARIANTS[model], DENOISER, AUTO).reason == reason


QUANTISES = {"sm75": "", "sm80": "int8", "sm86": "int8", "sm89": "fp8 int8", "sm90": "fp8 int8", "sm120": "fp8 int8",
             "sm130": "fp8 int8", "gfx94": "", "gfx1100": "", "mps": "", "xpu": "", "cpu": "int8"}  # fmt: skip


@pytest.mark.parametrize(("device", "kinds"), QUANTISES.items())
def test_fp8_and_int8_are_rejected_on_cards_without_them(device, kinds):
    row = named(device)
    assert row.quantises == tuple(kinds.split())
    for request, needs in ((FP8, "8.9 or newer"), (INT8, "8.0 or newer")):
        if request.value not in kinds.split():
            with pytest.raises(
                PlanImpossible, match=f"^{request.value} needs .*{needs}.*; this is .*. Choose precision"
            ):
                choose(row, TWO_B, DENOISER, request)


def test_bf16_is_rejected_where_missing_with_alternatives() -> None:
    for variant in VARIANTS.values():
        for component in variant.components:
            with pytest.raises(
                PlanImpossible, match=r"before macOS 14\) has no bf16.* Choose .*'auto', 'fp16' or 'fp32'"
            ):
                choose(OLD_MAC, variant, component, BF16)
            assert choose(OLD_MAC, variant, component, AUTO).dtype != "bf16"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=lambda v: v.name)
def test_missing_component_is_rejected_with_the_existing_ones(variant: Variant) -> None:
    lacking = set(Component) - set(variant.components)
    for component, request in product(lacking, Precision):
        with pytest.raises(PlanImpossible) as refused:
            choose(SM80, variant, component, request)
        said, has = str(refused.value).split(" It has: ")
        assert said == f"{variant.name} has no {component.words}."
        assert has == ", ".join(part.words for part in variant.components) + "."
    words = ["text encoder", "image encoder", "VAE encoder", "denoiser", "VAE decoder"]
    assert [part.words for part in Component] == words


def test_cogvideox_2b_stored_in_bf16_is_treated_as_bf16_fine_tune() -> None:
    tuned = as_stored(TWO_B, "BF16")
    native, emulating = (choose(device, tuned, DENOISER, AUTO) for device in (SM80, SM75))
    assert native.dtype == "bf16"
    assert "these weights are stored in bf16" in native.reason
    assert (emulating.dtype, emulating.overflow_protection, emulating.guarded) == ("fp16", True, True)
    assert (tuned.name, tuned.components, tuned.source) == (TWO_B.name, TWO_B.components, TWO_B.source)


def test_svd_stored_in_bf16_needs_no_overflow_protection() -> None:
    tuned = as_stored(VARIANTS["SVD"], "BF16")
    assert choose(SM80, tuned, DENOISER, AUTO).dtype == "bf16"
    plan = choose(SM75, tuned, DENOISER, AUTO)
    assert (plan.dtype, plan.overflow_protection, plan.guarded) == ("fp16", False, True)
    assert "needed" in plan.guard_reason
    encoder = choose(SM75, tuned, VAE_IN, AUTO)
    assert (encoder.dtype, encoder.overflow_protection) == ("fp16", True), "it needs none"
    assert choose(SM80, tuned, VAE_IN, AUTO).dtype == "bf16"


@pytest.mark.parametrize("name", ["CogVideoX-2B", "CogVideoX-5B", "SVD"])
@pytest.mark.parametrize("stored", ["F16", "F32", "BF16"])
def test_stored_dtype_matters_only_for_fp16_models_stored_in_bf16(name: str, stored: str) -> None:
    """People convert bf16 models to fp16: the activations do not change."""
    known, trained_in_fp16 = VARIANTS[name], VARIANTS[name].trained_in == "fp16"
    assert (as_stored(known, stored) == known) == (stored != "BF16" or not trained_in_fp16)


def test_new_model_or_architecture_needs_one_table_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Variant("Toy-1B", "bf16", True, True, (TEXT, DENOISER, VAE_OUT), "https://example.org/toy")
    monkeypatch.setitem(VARIANTS, "Toy-1B", toy)
    rubin = replace(ARCHITECTURES["sm121"], name="sm140", label="Rubin")
    monkeypatch.setitem(ARCHITECTURES, "sm140", rubin)
    monkeypatch.setitem(ARCHITECTURES, "gfx15", replace(ARCHITECTURES["gfx12"], name="gfx15", label="Wave"))
    assert named("sm140") == named("14.0") == by_capability(14, 0) == rubin
    assert by_capability(14, 5).label == "not in the table, treated as sm140"
    assert str(by_gfx("gfx1500:xnack-")) == "gfx1500 (Wave)"
    assert choose(rubin, toy, DENOISER, AUTO).reason.startswith(
        "bf16, since Toy-1B was trained in bf16, which sm140 (Rubin) computes"
    )
    assert choose(SM75, toy, DENOISER, AUTO).overflow_protection
    text = page.render()
    assert "| [Toy-1B] | bf16 | yes | yes | text encoder, denoiser, VAE decoder |" in text
    assert "[CogView4-6B], [Toy-1B] |" in text, "in the column of models with the same plan"
    assert "[Toy-1B]: https://example.org/toy\n" in text
    assert "| Rubin | `sm140` | native | yes | yes | yes | yes | untried |" in text
    assert "Rubin (`sm140`), Wave (`gfx15`)" in text, "in the row of devices with the same plan"
