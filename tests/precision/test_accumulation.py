"""Half-precision accumulation: what is set on which architecture, for how long, and whose word counts."""

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
    """Every switch as it stands, read without the code under test."""
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
def nobody_set_anything(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    set_flags(True, False, False)
    yield
    monkeypatch.undo()
    set_flags(True, False, False)


def switch(switches: tuple[Switch, ...], name: str) -> Switch:
    return next(switch for switch in switches if switch.name == name)


@pytest.mark.parametrize(
    ("name", "asked", "mode"),
    [
        *((name, AUTO, Mode.OFF) for name in (*AT_RISK, *UNTRIED)),
        *(("sm70", asked, Mode.ON) for asked in (AUTO, FP16)),
        *((name, FAST, Mode.FAST) for name in ("sm70", "sm80", "sm90", "cpu")),
        ("sm80", FP16, Mode.OFF),
    ],
)
def test_every_switch_is_set_listed_as_it_stands_and_put_back(name: str, asked: Accumulation, mode: Mode) -> None:
    assert SWITCHES == ALL
    why = decide(named(name), asked).reason
    with accumulation(named(name), asked) as switches:
        assert state() == STATE[mode]
        for switch_, value, before in zip(switches, state(), UNTOUCHED, strict=True):
            by = ("default", "left as it is") if value == before else ("onediff-guard", why)
            assert switch_ == Switch(switch_.name, "unset" if value is None else str(value), *by)
    assert tuple(switch_.name for switch_ in switches) == ALL and state() == UNTOUCHED


ONEDIFF = "https://github.com/siliconflow/onediff"


@pytest.mark.parametrize(
    ("name", "asked", "decision"),
    [
        ("sm70", AUTO, (Mode.ON, "half-precision accumulation is reported right on sm70 (Volta)", "issues/958")),
        ("sm80", AUTO, (Mode.OFF, "half-precision accumulation comes out NaN or black on sm80 (Ampere)", "issues/958")),
        ("sm90", AUTO, (Mode.OFF, "half-precision accumulation has never been confirmed safe on sm90 (Hopper)",
                        "issues/958")),
        ("sm80", FAST, (Mode.FAST, "'fast', as you chose: half-precision accumulation, scores in fp32, reported right "
                        "on sm89", "pull/454")),
    ],
)  # fmt: skip
def test_the_decision_has_a_reason_and_a_source(name: str, asked: Accumulation, decision: Any) -> None:
    mode, reason, source = decision
    assert decide(named(name), asked) == Decision(mode, reason, f"{ONEDIFF}/{source}", named(name))


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("before", list(product((True, False), repeat=3)), ids=str)
def test_flags_go_back_to_what_they_were_after_an_error_too(before: Any, error: type[BaseException]) -> None:
    set_flags(*before)
    for architecture in (SM70, SM80):
        with suppress(error), accumulation(architecture):
            assert architecture is SM70 or state() == STATE[Mode.OFF]
            raise error
        assert state() == (None,) * 5 + before


SAFEST = (Mode.OFF, Mode.FAST, Mode.ON)
RUNS = {Mode.OFF: (SM80, AUTO), Mode.FAST: (SM80, FAST), Mode.ON: (SM70, AUTO)}


def interleavings(runs: int) -> list[tuple[int, ...]]:
    """Every order in which threads may begin and end: (0, 1, 0, 1) is 0 begins, 1 begins, 0 ends, 1 ends."""
    return sorted(set(permutations([*range(runs), *range(runs)])))


@pytest.mark.parametrize("modes", [*product(SAFEST, repeat=2), SAFEST], ids=lambda m: "-".join(x.name for x in m))
def test_the_safest_holds_while_threads_overlap_in_any_order(modes: tuple[Mode, ...]) -> None:
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


def test_threads_that_come_and_go_never_see_what_is_unsafe_for_them() -> None:
    def work(architecture: Architecture) -> list[tuple[object, ...]]:
        seen = []
        for _ in range(50):
            with accumulation(architecture):
                seen.append(state())
        return seen

    found = at_once(*(partial(work, row) for row in (SM70, SM80, SM70, SM80)))
    assert {*found[1], *found[3]} == {STATE[Mode.OFF]} and state() == UNTOUCHED


RESPECTED, SHARED = "set before this run, respected", "shared with another GPU in this process; "


def test_a_run_beside_a_less_safe_card_says_whose_value_it_got() -> None:
    with accumulation(SM80), accumulation(SM70) as switches:
        found = switch(switches, ATTENTION)
    assert (found.value, found.reason) == ("0", SHARED + decide(SM80).reason)


@pytest.mark.parametrize("look", [accumulation, lambda *args: nullcontext(preview(*args))], ids=["run", "preview"])
@pytest.mark.parametrize(
    ("card", "others", "value", "reason"),
    [
        (SM70, (SM70, SM86), "0", SHARED + decide(SM86).reason),
        (SM70, (SM70, SM70), "1", decide(SM70).reason),
        (SM80, (SM86, SM75), "0", decide(SM80).reason),  # its own card is reason enough
    ],
)
def test_another_gpu_in_the_process_makes_the_value_safe(look: Any, card: Any, others: Any, value: str, reason: str):
    with look(card, AUTO, others) as switches:
        found = switch(switches, ATTENTION)
    assert (found.value, found.reason) == (value, reason)


@pytest.mark.parametrize("name", [ATTENTION, FMHA, NEXFORT_ATTENTION, NEXFORT_MATMUL])
@pytest.mark.parametrize("value", ["1", "true", "YES", "on", "y", "0", "no", "off", "N", "False", ""])
def test_a_value_that_the_user_exported_wins_and_is_reported(monkeypatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    means_true = value.lower() in {"1", "true", "yes", "on", "y"}
    for card, request in product((SM70, SM80), Accumulation):
        with accumulation(card, request) as switches:
            assert os.environ[name] == value
            found = switch(switches, name)
            assert (found.value, found.set_by) == (value, "user")
            doubted = means_true and (name in (FMHA, NEXFORT_ATTENTION) if request is FAST else card is SM80)
            doubt = f", although {decide(card, request).reason}" if doubted else ""
            assert found.reason == RESPECTED + doubt
            others = {found.set_by for found in switches if found.name != name}
            assert "user" not in others and "onediff-guard" in others
        assert os.environ[name] == value


@pytest.mark.parametrize(
    ("name", "value", "doubted"),
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
def test_nonsense_and_the_limit_for_scores_are_left_alone_and_doubted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, doubted: tuple[Accumulation, ...]
) -> None:
    monkeypatch.setenv(name, value)
    for asked in (AUTO, FAST):
        doubt = f", although {decide(SM80, asked).reason}" if asked in doubted else ""
        with accumulation(SM80, asked) as switches:
            assert switch(switches, name) == Switch(name, value, "user", RESPECTED + doubt)
        assert os.environ[name] == value


OTHERS_HAD = "; ComfyUI or another pack had it True, as it is again after the run"


@pytest.mark.parametrize("name", [MATH_SDP, FP16_SUMS])
def test_what_comfyui_switched_on_is_nobodys_and_made_safe_while_a_run_needs_it(name: str) -> None:
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
        assert switch(switches, name) == Switch(name, "True", "others", "left as it is"), "the loader's word"


def test_a_reduction_that_somebody_switched_off_stays_off_on_volta() -> None:
    set_flags(False, False, False)
    with accumulation(SM70) as switches:
        assert state()[-3:] == (False, False, False)
        assert switch(switches, REDUCTION) == Switch(REDUCTION, "False", "others", "left as it is")
    assert state()[-3:] == (False, False, False)


class OldMatmul:
    allow_fp16_reduced_precision_reduction = True


def test_a_pytorch_older_than_a_flag_is_left_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_preview_sets_nothing_and_says_what_a_run_would(monkeypatch, card: Architecture, running: Any) -> None:
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
def test_split_k_stays_forbidden_where_somebody_forbade_it(row):
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)  # type: ignore
    with accumulation(row):
        assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)
    assert torch._C._get_cublas_allow_fp16_reduced_precision_reduction() == (False, False)


@pytest.mark.parametrize(
    ("value", "is_allowed"), [(None, True), ("1", True), ("True", True), ("on", True), ("0", False), ("maybe", False)]
)
def test_what_a_variable_allows(monkeypatch: pytest.MonkeyPatch, value: str | None, is_allowed: bool) -> None:
    monkeypatch.delenv("SOME_SWITCH", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_SWITCH", value)
    assert allowed("SOME_SWITCH") == is_allowed
