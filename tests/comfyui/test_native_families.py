"""NaN Guard (native) on every family of ComfyUI's own that people ask for, small, in every state of its weights."""

from __future__ import annotations

import math

import native
import native_table
import pytest
from native import FAMILIES

HIDES = ("flux", "flux2", "hunyuan_video", "hunyuan_video_15", "lumina2", "z_image")  # it clips what overflows in fp16
CLIPS_IN_FP32_TOO = ("ace",)
FP16 = ("fp16", "fp32 computed in fp16", "fp8 computed in fp16")
BF16 = ("bf16", "fp16 computed in bf16")
BESIDE = ("LoRA", "lowvram and LoRA", "EasyCache", "torch.compile", "fp16 intermediates")
COMPILED = ("sd15", "flux", "qwen_image", "wan")  # the others would take minutes


@pytest.fixture(scope="module", params=native.CARDS.values(), ids=native.CARDS)
def ran(request: pytest.FixtureRequest, leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    """Figures by "families/family, state", and what this ComfyUI is."""
    return native.run("native_family_cases", tmp_path_factory.mktemp("native_families"), *request.param, leg=leg)


@pytest.fixture(scope="module")
def beside(leg: native.Leg, tmp_path_factory: pytest.TempPathFactory) -> native.Ran:
    """The same of models in fp16, with what people put beside the guard."""
    return native.run("native_beside_cases", tmp_path_factory.mktemp("native_beside"), leg=leg)


def figures(ran: native.Ran, family: str, state: str) -> native_table.Figures:
    if family not in ran["about/families"]:
        pytest.skip(f"ComfyUI {ran['about/version']} has no {family}")
    if state.startswith("fp16 intermediates") and not ran["about/fp16 intermediates"]:
        pytest.skip(f"ComfyUI {ran['about/version']} has no --fp16-intermediates")
    found = ran[f"families/{family}, {state}"]
    assert not found["error"], found["error"]
    return found


@pytest.mark.parametrize("state", [*FP16, *BF16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_run_is_the_same_to_the_bit(ran: native.Ran, family: str, state: str) -> None:
    found = figures(ran, family, state)
    assert found["same"] and found["reruns"] == 0
    assert found["plain"] > 0  # it did run in half precision


@pytest.mark.parametrize("family", FAMILIES)
def test_an_inserted_guard_comes_to_the_same(ran: native.Ran, family: str) -> None:
    if family not in ran["about/families"]:
        pytest.skip(f"ComfyUI {ran['about/version']} has no {family}")
    healthy, overflowing = ran[f"inserted/{family}"], ran[f"inserted/{family}, overflowing"]
    assert healthy["same"] and overflowing["same"] and not healthy["said"]


@pytest.mark.parametrize("state", FP16)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_overflows_is_broken_without_and_right_with_it(ran: native.Ran, family: str, state: str) -> None:
    found = figures(ran, family, f"{state}, overflowing")
    lumina = family in ("lumina2", "z_image")
    if family in CLIPS_IN_FP32_TOO:
        assert found["plain"] <= 2e-2
    elif family in HIDES and (not lumina or ran["about/Lumina2 clips"]):
        assert found["plain"] > 2e-2  # finite, and wrong
    else:
        assert math.isnan(found["plain"])
    assert found["guarded"] <= (1e-5 if "card/left" in ran else 0)  # the CPU's kernels round by where a tensor begins
    assert found["reruns"] == found["calls"] > 0


def cases_beside() -> list[tuple[str, str]]:
    cases = [(family, state) for family in FAMILIES for state in BESIDE]
    return [(family, state) for family, state in cases if state != "torch.compile" or family in COMPILED]


@pytest.mark.parametrize(("family", "state"), cases_beside())
def test_a_healthy_run_beside_others_is_the_same_to_the_bit(beside: native.Ran, family: str, state: str) -> None:
    found = figures(beside, family, state)
    assert found["same"] and found["reruns"] == 0


@pytest.mark.parametrize(("family", "state"), cases_beside())
def test_a_run_that_overflows_beside_others_is_right_with_it(beside: native.Ran, family: str, state: str) -> None:
    found = figures(beside, family, f"{state}, overflowing")
    assert found["plain"] > 2e-2 or math.isnan(found["plain"]) or family in CLIPS_IN_FP32_TOO
    assert found["guarded"] <= 1e-5
    assert found["reruns"] >= found["calls"] > 0  # EasyCache skips some, and each step fails at first


@pytest.mark.parametrize(
    ("family", "broken"), {"ltx2": [True, True], "ltx2_sound": [False, True], "minimax_h3": [True, True]}.items()
)
def test_every_stream_is_looked_at(ran: native.Ran, family: str, broken: list[bool]) -> None:
    """One has an overflow in its sound alone, and is right above."""
    if family not in ran["about/families"]:
        pytest.skip(f"ComfyUI {ran['about/version']} has no {family}")
    assert ran[f"streams/{family}"] == broken


def test_the_table_has_them_all(ran: native.Ran, beside: native.Ran) -> None:
    if "card/left" in ran:
        pytest.skip("the table is the CPU's")
    families = ran["about/families"]
    assert set(families) <= set(FAMILIES)
    states = [*FP16, *BF16, *(f"{state}, overflowing" for state in FP16)]
    further = [state + suffix for state in BESIDE for suffix in ("", ", overflowing")]
    found = {
        name.removeprefix("families/"): value for name, value in (ran | beside).items() if name.startswith("families/")
    }
    assert found.keys() >= {f"{family}, {state}" for family in families for state in states}
    native_table.write(ran["about/version"], families, [*states, *further], found)
