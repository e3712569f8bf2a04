"""Half-precision accumulation: what is set on which architecture, for how long, and whose word counts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import permutations, product
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("name", [*AT_RISK, *UNTRIED])
def test_off_where_reports_call_it_wrong_or_nobody_tried(name: str) -> None:
    with accumulation(named(name)) as switches:
        assert state() == STATE[Mode.OFF]
        assert switch(switches, ATTENTION).set_by == "onediff-guard"
    assert state() == UNTOUCHED


def test_on_for_volta_with_its_companions() -> None:
    with accumulation(SM70) as switches:
        assert state() == STATE[Mode.ON]
        assert switch(switches, ATTENTION) == Switch(
            ATTENTION, "1", "onediff-guard", "half-precision accumulation is reported right on sm70 (Volta)"
        )
        assert switch(switches, SCORES) == Switch(SCORES, "unset", "default", "left as it is")
        assert switch(switches, REDUCTION) == Switch(REDUCTION, "True", "default", "left as it is")
    assert state() == UNTOUCHED


@pytest.mark.parametrize("name", ["sm70", "sm80", "sm90", "cpu"])
def test_fast_is_on_everywhere_with_the_scores_in_fp32(name: str) -> None:
    with accumulation(named(name), FAST) as switches:
        assert state() == STATE[Mode.FAST]
        assert switch(switches, SCORES).value == "0"
        assert "asked for 'fast'" in switch(switches, ATTENTION).reason
    assert state() == UNTOUCHED


def test_every_switch_is_listed_as_it_stands() -> None:
    assert SWITCHES == ALL
    for architecture, request in product((SM70, SM80), Accumulation):
        with accumulation(architecture, request) as switches:
            assert [switch.name for switch in switches] == list(ALL)
            stands = ["unset" if value is None else str(value) for value in state()]
            assert [switch.value for switch in switches] == stands


def test_the_decision_has_a_reason_and_a_source() -> None:
    issue, tuning = (
        "https://github.com/siliconflow/onediff/issues/958",
        "https://github.com/siliconflow/onediff/pull/454",
    )
    assert decide(SM70) == Decision(
        Mode.ON, "half-precision accumulation is reported right on sm70 (Volta)", issue, SM70
    )
    assert decide(SM80) == Decision(
        Mode.OFF, "half-precision accumulation comes out NaN or black on sm80 (Ampere)", issue, SM80
    )
    assert decide(named("sm90")) == Decision(
        Mode.OFF, "nobody reported half-precision accumulation on sm90 (Hopper): the safe value", issue, named("sm90")
    )
    assert decide(SM80, FAST).mode is Mode.FAST
    assert decide(SM80, FAST).source == tuning


def test_the_loaders_values_that_stand_in_workflow_files_are_as_they_were() -> None:
    assert [request.value for request in Accumulation][:3] == ["auto", "fast", "fp16"]


# case 4: OneDiff's SVD, right on V100, NaN or black on A100


def launch() -> bool:
    """What a kernel of OneFlow's special builds asks when it is launched: unset counts as True."""
    return os.environ.get(ATTENTION, "true").lower() in {"1", "true", "yes", "on", "y"}


@pytest.mark.parametrize(("card", "halves"), [("sm70", True), ("sm80", False), ("sm86", False), ("sm90", False)])
def test_a_kernel_compiled_before_the_run_sees_the_switch_when_it_is_launched(card: str, halves: bool) -> None:
    compiled = torch.nn.Identity()
    seen: list[bool] = []
    compiled.register_forward_hook(lambda *_: seen.append(launch()))
    with accumulation(named(card)):
        compiled(torch.ones(1))
        thread = threading.Thread(target=compiled, args=[torch.ones(1)])
        thread.start()
        thread.join()
    compiled(torch.ones(1))
    assert seen == [halves, halves, True], "in the run, in another thread of it, and as OneFlow has it afterwards"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_all_is_put_back_after_an_error_or_an_interrupt(error: type[BaseException]) -> None:
    inside: list[tuple[object, ...]] = []

    def run() -> None:
        with accumulation(SM80):
            inside.append(state())
            raise error

    with pytest.raises(error):
        run()
    assert inside == [STATE[Mode.OFF]]
    assert state() == UNTOUCHED


@pytest.mark.parametrize("before", list(product((True, False), repeat=3)), ids=str)
def test_flags_go_back_to_what_they_were(before: tuple[bool, bool, bool]) -> None:
    set_flags(*before)
    for architecture in (SM70, SM80):
        with accumulation(architecture):
            pass
        assert state() == (None,) * 5 + before


def test_a_switch_that_changes_between_runs_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with accumulation(SM80):
        pass
    monkeypatch.setenv(ATTENTION, "1")
    with accumulation(SM80) as switches:
        assert switch(switches, ATTENTION).set_by == "user"
    assert os.environ[ATTENTION] == "1"


@pytest.mark.parametrize(
    ("outer", "inner", "inside"),
    [
        ((SM80, AUTO), (SM80, AUTO), Mode.OFF),
        ((SM70, AUTO), (SM70, AUTO), Mode.ON),
        ((SM70, AUTO), (SM80, AUTO), Mode.OFF),
        ((SM80, AUTO), (SM70, AUTO), Mode.OFF),
        ((SM80, FAST), (SM86, AUTO), Mode.OFF),
        ((SM70, AUTO), (SM80, FAST), Mode.FAST),
    ],
)
def test_the_safest_holds_while_runs_are_nested(outer: Any, inner: Any, inside: Mode) -> None:
    alone = STATE[decide(*outer).mode]
    with accumulation(*outer):
        assert state() == alone
        with accumulation(*inner):
            assert state() == STATE[inside]
        assert state() == alone
    assert state() == UNTOUCHED


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
    start = threading.Barrier(4)
    wrong: list[tuple[object, ...]] = []

    def work(architecture: Architecture) -> None:
        start.wait(30)
        for _ in range(50):
            with accumulation(architecture):
                if architecture is SM80 and state() != STATE[Mode.OFF]:
                    wrong.append(state())

    threads = [threading.Thread(target=work, args=[row]) for row in (SM70, SM80, SM70, SM80)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert state() == UNTOUCHED


def test_a_run_beside_a_less_safe_card_says_whose_value_it_got() -> None:
    with accumulation(SM80), accumulation(SM70) as switches:
        found = switch(switches, ATTENTION)
    assert found.value == "0"
    assert found.reason == (
        "shared with another GPU in this process; half-precision accumulation comes out NaN or black on sm80 (Ampere)"
    )


@pytest.mark.parametrize("look", [accumulation, lambda *args: nullcontext(preview(*args))], ids=["run", "preview"])
def test_another_gpu_in_the_process_makes_the_value_safe(look: Callable[..., Any]) -> None:
    with look(SM70, AUTO, (SM70, SM86)) as switches:
        found = switch(switches, ATTENTION)
    assert found.value == "0"
    assert found.reason.startswith("shared with another GPU in this process; ")
    assert found.reason.endswith("on sm86 (Ampere)")


def test_gpus_of_one_kind_share_nothing() -> None:
    with accumulation(SM70, AUTO, (SM70, SM70)) as switches:
        assert state() == STATE[Mode.ON]
        assert "shared" not in switch(switches, ATTENTION).reason
    with accumulation(SM80, AUTO, (SM86, SM75)) as switches:
        assert switch(switches, ATTENTION).reason.endswith("on sm80 (Ampere)"), "its own card is reason enough"


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
            doubted = means_true and card is SM80 and request is not FAST
            doubt = ", although half-precision accumulation comes out NaN or black on sm80 (Ampere)" if doubted else ""
            assert found.reason == f"set before this run, respected{doubt}"
            others = {found.set_by for found in switches if found.name != name}
            assert "user" not in others and "onediff-guard" in others
        assert os.environ[name] == value


@pytest.mark.parametrize("name", [ATTENTION, FMHA])
def test_nonsense_is_left_alone_and_reported_as_false(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "maybe")
    with accumulation(SM80) as switches:
        assert os.environ[name] == "maybe"
        found = switch(switches, name)
        assert (found.value, found.set_by) == ("maybe", "user")
        assert found.reason == "'maybe' is neither true nor false, and is taken for false: unset it, or write 0 or 1"
    assert os.environ[name] == "maybe"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("-1", "set before this run, respected"),
        ("256", "set before this run, respected"),
        ("many", "'many' is no number: unset it, or write -1 or 0"),
        ("", "'' is no number: unset it, or write -1 or 0"),
    ],
)
def test_the_limit_for_scores_is_a_number_and_the_users_too(monkeypatch, value: str, said: str) -> None:
    monkeypatch.setenv(SCORES, value)
    for request in Accumulation:
        doubt = ", although 'fast' is reported right with 0" if request is FAST and "respected" in said else ""
        with accumulation(SM80, request) as switches:
            assert switch(switches, SCORES) == Switch(SCORES, value, "user", said + doubt)
        assert os.environ[SCORES] == value


OTHERS_HAD = "; ComfyUI or another pack had it True, as it is again after the run"


@pytest.mark.parametrize("name", [MATH_SDP, FP16_SUMS])
def test_what_comfyui_switched_on_is_nobodys_and_made_safe_while_a_run_needs_it(name: str) -> None:
    """ComfyUI sets the first at import (comfy/model_management.py) and the second with --fast."""
    set_flags(True, name == FP16_SUMS, name == MATH_SDP)
    with accumulation(SM80) as switches:
        assert state() == STATE[Mode.OFF]
        found = switch(switches, name)
        assert (found.value, found.set_by) == ("False", "onediff-guard")
        assert found.reason == f"half-precision accumulation comes out NaN or black on sm80 (Ampere){OTHERS_HAD}"
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
