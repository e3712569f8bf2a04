"""Half-precision accumulation: which switches are set on which architecture, for how long, and who decides."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import permutations, product
from typing import Any

import pytest
import torch
from at_once import at_once
from comfyui_onediff_guard.precision.accumulation import (
    SWITCHES,
    Accumulation,
    Decision,
    Mode,
    Switch,
    accumulation,
    allowed,
    decide,
    preview,
)
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, Architecture, named

AUTO, FAST, FP16 = Accumulation
ATTENTION = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION"
SCORES = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_SCORE_ACCUMULATION_MAX_M"
FMHA = "ONEFLOW_KERNEL_FMHA_ENABLE_TRT_FLASH_ATTN_IMPL"
NEXFORT_ATTENTION, NEXFORT_MATMUL = (f"NEXFORT_ENABLE_{name}_FP16_REDUCTION" for name in ("FUSE_ATTENTION", "MATMUL"))
REDUCTION, FP16_SUMS = (
    f"torch.backends.cuda.matmul.{name}"
    for name in ("allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
)
MATH_SDP = "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp"
VARIABLES = (ATTENTION, SCORES, FMHA, NEXFORT_ATTENTION, NEXFORT_MATMUL)
ALL = (*VARIABLES, REDUCTION, FP16_SUMS, MATH_SDP)

UNTOUCHED = (None, None, None, None, None, True, False, False)  # PyTorch's defaults
STATE = {
    Mode.OFF: ("0", None, "0", "0", "0", False, False, False),
    Mode.FAST: ("1", "0", "0", "0", "1", True, False, False),
    Mode.ON: ("1", None, "1", "1", "1", True, False, False),
}
SM70, SM75, SM80, SM86 = (ARCHITECTURES[name] for name in ("sm70", "sm75", "sm80", "sm86"))
AT_RISK = ("sm75", "sm80", "sm86", "sm89")
UNTRIED = ("sm60", "sm61", "sm72", "sm87", "sm90", "sm120", "sm130", "gfx90a", "gfx1100", "gfx9999", "mps", "cpu")


def state() -> tuple[object, ...]:
    """The value of every switch, read without the code under test."""
    cuda = torch.backends.cuda
    return (
        *map(os.environ.get, VARIABLES),
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_accumulation,
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
    )


def set_flags(reduction: bool, fp16_sums: bool, math_sdp: bool) -> None:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduction
    torch.backends.cuda.matmul.allow_fp16_accumulation = fp16_sums
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(math_sdp)


@pytest.fixture(autouse=True)
def reset_switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_flags(True, False, False)
    yield
    monkeypatch.undo()
    set_flags(True, False, False)


def switch(switches: tuple[Switch, ...], name: str) -> Switch:
    return next(switch for switch in switches if switch.name == name)


@pytest.mark.parametrize(
    ("name", "requested", "mode"),
    [
        *((name, AUTO, Mode.OFF) for name in (*AT_RISK, *UNTRIED)),
        *(("sm70", requested, Mode.ON) for requested in (AUTO, FP16)),
        *((name, FAST, Mode.FAST) for name in ("sm70", "sm80", "sm90", "cpu")),
        ("sm80", FP16, Mode.OFF),
    ],
)
def test_all_switches_are_set_reported_and_restored(name: str, requested: Accumulation, mode: Mode) -> None:
    assert SWITCHES == ALL
    why = decide(named(name), requested).reason
    with accumulation(named(name), requested) as switches:
        assert state() == STATE[mode]
        for switch_, value, before in zip(switches, state(), UNTOUCHED, strict=True):
            by = ("default", "unchanged") if value == before else ("onediff-guard", why)
            assert switch_ == Switch(switch_.name, "unset" if value is None else str(value), *by)
    assert tuple(switch_.name for switch_ in switches) == ALL and state() == UNTOUCHED


ONEDIFF = "https://github.com/siliconflow/onediff"


@pytest.mark.parametrize(
    ("name", "requested", "decision"),
    [
        ("sm70", AUTO, (Mode.ON, "half-precision accumulation is reported correct on sm70 (Volta)", "issues/958")),
        ("sm80", AUTO, (Mode.OFF, "half-precision accumulation gives NaN or black frames on sm80 (Ampere)",
                        "issues/958")),
        ("sm90", AUTO, (Mode.OFF, "half-precision accumulation has never been confirmed safe on sm90 (Hopper)",
                        "issues/958")),
        ("sm80", FAST, (Mode.FAST, "'fast', as you chose: half-precision accumulation, scores in fp32, reported "
                        "correct on sm89", "pull/454")),
    ],
)  # fmt: skip
def test_decision_has_reason_and_source(name: str, requested: Accumulation, decision: Any) -> None:
    mode, reason, source = decision
    assert decide(named(name), requested) == Decision(mode, reason, f"{ONEDIFF}/{source}", named(name))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", list(product((True, False), repeat=3)), ids=str)
def test_flags_are_restored_after_an_error(before: Any, error: type[BaseException]) -> None:
    set_flags(*before)
    for architecture in (SM70, SM80):
        with suppress(error), accumulation(architecture):
            assert architecture is SM70 or state() == STATE[Mode.OFF]
            raise error
        assert state() == (None,) * 5 + before


SAFEST = (Mode.OFF, Mode.FAST, Mode.ON)
RUNS = {Mode.OFF: (SM80, AUTO), Mode.FAST: (SM80, FAST), Mode.ON: (SM70, AUTO)}


def interleavings(runs: int) -> list[tuple[int, ...]]:
    """Every order in which threads can begin and end: (0, 1, 0, 1) means 0 begins, 1 begins, 0 ends, 1 ends."""
    return sorted(set(permutations([*range(runs), *range(runs)])))


@pytest.mark.parametrize("modes", [*product(SAFEST, repeat=2), SAFEST], ids=lambda m: "-".join(x.name for x in m))
def test_safest_mode_applies_while_threads_overlap_in_any_order(modes: tuple[Mode, ...]) -> None:
    pools = [ThreadPoolExecutor(1) for _ in modes]
    try:
        for order in interleavings(len(modes)):
            runs: dict[int, Any] = {}
            for who in order:
                if who in runs:
                    pools[who].submit(runs.pop(who).__exit__, None, None, None).result(30)
                else:
                    runs[who] = accumulation(*RUNS[modes[who]])
                    pools[who].submit(runs[who].__enter__).result(30)
                holding = [modes[i] for i in runs]
                assert state() == (STATE[min(holding, key=SAFEST.index)] if holding else UNTOUCHED), order
    finally:
        for pool in pools:
            pool.shutdown()


def test_sm80_threads_see_only_safe_settings_beside_sm70_threads() -> None:
    def work(architecture: Architecture) -> list[tuple[object, ...]]:
        seen = []
        for _ in range(50):
            with accumulation(architecture):
                seen.append(state())
        return seen

    found = at_once(*(partial(work, row) for row in (SM70, SM80, SM70, SM80)))
    assert {*found[1], *found[3]} == {STATE[Mode.OFF]} and state() == UNTOUCHED


RESPECTED, SHARED = "set before this run, respected", "shared with another GPU in this process; "


def test_run_beside_less_safe_card_reports_that_cards_value() -> None:
    with accumulation(SM80), accumulation(SM70) as switches:
        found = switch(switches, ATTENTION)
    assert (found.value, found.reason) == ("0", SHARED + decide(SM80).reason)


@pytest.mark.parametrize("read", [accumulation, lambda *args: nullcontext(preview(*args))], ids=["run", "preview"])
@pytest.mark.parametrize(
    ("card", "others", "value", "reason"),
    [
        (SM70, (SM70, SM86), "0", SHARED + decide(SM86).reason),
        (SM70, (SM70, SM70), "1", decide(SM70).reason),
        (SM80, (SM86, SM75), "0", decide(SM80).reason),  # its own card already requires 0
    ],
)
def test_another_gpu_in_process_sets_the_safer_value(read: Any, card: Any, others: Any, value: str, reason: str):
    with read(card, AUTO, others) as switches:
        found = switch(switches, ATTENTION)
    assert (found.value, found.reason) == (value, reason)


@pytest.mark.parametrize("name", [ATTENTION, FMHA, NEXFORT_ATTENTION, NEXFORT_MATMUL])
@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", "0", "no", "off", "N", "False", ""])
def test_user_environment_value_wins_and_is_reported(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    means_true = value.lower() in {"1", "true", "yes", "on", "y"}
    for card, request in product((SM70, SM80), Accumulation):
        with accumulation(card, request) as switches:
            assert os.environ[name] == value
            found = switch(switches, name)
            assert (found.value, found.set_by) == (value, "user")
            questioned = means_true and (name in (FMHA, NEXFORT_ATTENTION) if request is FAST else card is SM80)
            question = f", although {decide(card, request).reason}" if questioned else ""
            assert found.reason == RESPECTED + question
            others = {found.set_by for found in switches if found.name != name}
            assert "user" not in others and "onediff-guard" in others
        assert os.environ[name] == value


@pytest.mark.parametrize(
    ("name", "value", "questioned"),
    [
        (ATTENTION, "maybe", (AUTO,)),
        (FMHA, "maybe", (AUTO, FAST)),
        (SCORES, "-1", (FAST,)),
        (SCORES, "256", (FAST,)),
        (SCORES, "many", (FAST,)),
        (SCORES, "0", ()),
        (SCORES, "", ()),
    ],
)
def test_invalid_values_and_score_limits_are_kept_and_questioned(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, questioned: tuple[Accumulation, ...]
) -> None:
    monkeypatch.setenv(name, value)
    for requested in (AUTO, FAST):
        question = f", although {decide(SM80, requested).reason}" if requested in questioned else ""
        with accumulation(SM80, requested) as switches:
            assert switch(switches, name) == Switch(name, value, "user", RESPECTED + question)
        assert os.environ[name] == value


OTHERS_HAD = "; ComfyUI or another pack had set it to True, which is restored after the run"


@pytest.mark.parametrize("name", [MATH_SDP, FP16_SUMS])
def test_flags_set_by_comfyui_are_off_during_a_run_and_restored(name: str) -> None:
    """ComfyUI sets the first at import (comfy/model_management.py) and the second with --fast."""
    set_flags(True, name == FP16_SUMS, name == MATH_SDP)
    with accumulation(SM80) as switches:
        assert state() == STATE[Mode.OFF]
        found = switch(switches, name)
        assert (found.value, found.set_by) == ("False", "onediff-guard")
        assert found.reason == decide(SM80).reason + OTHERS_HAD
        assert {found.set_by for found in switches} == {"onediff-guard", "default"}
        assert preview(SM80) == switches
    assert state() == (*UNTOUCHED[:-2], name == FP16_SUMS, name == MATH_SDP)
    with accumulation(SM80, FAST) as switches:
        assert switch(switches, name) == Switch(name, "True", "others", "unchanged"), "FAST leaves it on"


def test_reduction_disabled_by_others_stays_off_on_volta() -> None:
    set_flags(False, False, False)
    with accumulation(SM70) as switches:
        assert state()[-3:] == (False, False, False)
        assert switch(switches, REDUCTION) == Switch(REDUCTION, "False", "others", "unchanged")
    assert state()[-3:] == (False, False, False)


class OldMatmul:
    allow_fp16_reduced_precision_reduction = True


def test_flags_missing_in_older_pytorch_are_not_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", OldMatmul())
    monkeypatch.delattr(torch.backends.cuda, "fp16_bf16_reduction_math_sdp_allowed")
    monkeypatch.delattr(torch.backends.cuda, "allow_fp16_bf16_reduction_math_sdp")
    with accumulation(SM80) as switches:
        assert [found.name for found in switches] == [*VARIABLES, REDUCTION]
        assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction is False
    assert vars(torch.backends.cuda.matmul) == {"allow_fp16_reduced_precision_reduction": True}, "none was invented"
    assert [found.name for found in preview(SM80)] == [*VARIABLES, REDUCTION]


@pytest.mark.parametrize("card", [SM70, SM80], ids=str)
@pytest.mark.parametrize("running", [(SM70, AUTO), (SM80, AUTO), (SM80, FAST)], ids=str)
def test_preview_sets_nothing_and_equals_the_run(monkeypatch, card: Architecture, running: Any) -> None:
    monkeypatch.setenv(FMHA, "1")
    before = state()
    foreseen = preview(card)
    assert state() == before
    with accumulation(*running):
        during = state()
        assert preview(card) == foreseen, "a switch that a run holds is not taken for the user's"
        assert state() == during
    with accumulation(card) as switches:
        assert foreseen == switches


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, f"{REDUCTION[27:]}_split_k"), reason="PyTorch before 2.10")
@pytest.mark.parametrize("row", [SM70, SM80])
def test_split_k_disabled_by_others_stays_disabled(row):
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)  # type: ignore
    with accumulation(row):
        assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)
    assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)


@pytest.mark.parametrize(
    ("value", "is_allowed"), [(None, True), ("1", True), ("True", True), ("on", True), ("0", False), ("maybe", False)]
)
def test_variable_unset_or_true_allows(monkeypatch: pytest.MonkeyPatch, value: str | None, is_allowed: bool) -> None:
    monkeypatch.delenv("SOME_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_SWITCH", value)
    assert allowed("SOME_SWITCH") == is_allowed
