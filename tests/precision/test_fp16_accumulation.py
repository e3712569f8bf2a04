"""fp16 accumulation: when the switch is on, and how the first step decides. A model of tensor cores computes the
products (scripts/benchmarks/fp16_sums_on_cpu.py): a CPU ignores the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.accumulation import Accumulation, accumulation, fp16_accumulation
from comfyui_onediff_guard.precision.after_failure import (
    FallbackAdapter,
    HalfPrecisionForward,
    build_half_precision_forward,
)
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.guard import Scope
from comfyui_onediff_guard.precision.layer_peaks import Agree, alone
from comfyui_onediff_guard.precision.overrides import MAX_FP16_ERROR, NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from fp16_sums_on_cpu import Fp16SumsOnCpu, a_card_with_fp16_sums
from guards import error, guarded, outcomes, report_of
from residual_blocks import Block
from torch import nn

WIDTH, PRODUCTS = 128, 6  # matrix products per call of the network
ADA = ARCHITECTURES["sm89"]
MATMUL: Any = torch.backends.cuda.matmul


def network(squash: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, squash) for _ in range(3))).half().eval().requires_grad_(False)


def cancelling(module: nn.Sequential, size: float) -> nn.Sequential:
    """Let partial sums of the second block's first layer reach about 64 · `size`² and cancel."""
    block: Any = module[1]
    with torch.no_grad():
        block.norm.weight.zero_()
        block.norm.bias.fill_(size)
        block.inner.weight[:, : WIDTH // 2] += size
        block.inner.weight[:, WIDTH // 2 :] -= size
    return module


def make_input(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 96, WIDTH, generator=torch.Generator().manual_seed(seed)).half()


@pytest.fixture
def card() -> Iterator[Fp16SumsOnCpu]:
    with torch.no_grad(), a_card_with_fp16_sums() as card, accumulation(ADA, Accumulation.FP16):
        yield card
    assert not MATMUL.allow_fp16_accumulation


class Run:
    def __init__(
        self,
        module: nn.Module,
        learned: PrecisionOverrides = NOTHING,
        scope: Scope = Scope.LEARNED,
        agree: Agree = alone,
    ):
        def build(known: PrecisionOverrides) -> HalfPrecisionForward:
            is_right = known.fp16_error is not None and known.fp16_error <= MAX_FP16_ERROR
            return replace(build_half_precision_forward(module, known, "fp16"), fp16_accumulation=is_right)

        self.learner = FallbackAdapter(module, "fp16", build, ("0", "1", "2"), learned, agree)
        report = report_of("fp16", "SVD", "sm89", accumulation=Accumulation.FP16)
        self.guard = guarded(self.learner, rerun=module, report=report, scope=scope)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.guard(x)

    @property
    def error(self) -> float | None:
        return self.learner.learned.fp16_error


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """ComfyUI's setting: with or without --fast fp16_accumulation."""
    MATMUL.allow_fp16_accumulation = request.param
    yield request.param
    assert MATMUL.allow_fp16_accumulation == request.param
    MATMUL.allow_fp16_accumulation = False


def test_switch_is_set_inside_and_restored_afterwards(before: bool) -> None:
    with fp16_accumulation(True):
        assert MATMUL.allow_fp16_accumulation == before, "no stage runs"
    for architecture, held in ((ADA, False), (ARCHITECTURES["sm70"], before)):
        with accumulation(architecture, Accumulation.FP16):
            assert MATMUL.allow_fp16_accumulation == held
            for on, inside in ((True, True), (False, False), (None, held)):
                with suppress(KeyboardInterrupt), fp16_accumulation(on):
                    assert MATMUL.allow_fp16_accumulation == inside
                    raise KeyboardInterrupt
                assert MATMUL.allow_fp16_accumulation == held
        assert MATMUL.allow_fp16_accumulation == before


def test_switch_is_off_while_another_stage_runs() -> None:
    with accumulation(ADA, Accumulation.FP16):
        with accumulation(ADA), fp16_accumulation(True):
            assert not MATMUL.allow_fp16_accumulation
        with fp16_accumulation(True):
            assert MATMUL.allow_fp16_accumulation
            with accumulation(ADA):
                assert not MATMUL.allow_fp16_accumulation
            assert not MATMUL.allow_fp16_accumulation, "until the next call"


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "squash", "allowed"),
    [(0.0, torch.tanh, True), (0.5, torch.tanh, True), (2.0, torch.tanh, False), (40.0, torch.sin, False)],
    ids=["healthy", "near", "bits are lost", "not finite"],
)
def test_first_step_decides_if_fp16_accumulation_is_used(
    card: Fp16SumsOnCpu, size: float, squash: Any, allowed: bool
) -> None:
    module = cancelling(network(squash), size) if size else network()
    run, x = Run(module), make_input()
    plain = module(x)
    assert torch.equal(run(x), plain), "the first call uses fp32 sums"
    assert card.launched == PRODUCTS, "and is repeated with fp16 sums to compare"
    with fp16_accumulation(True):
        found = error(module(x), plain)
    assert run.error is not None and run.error == pytest.approx(found if found < 1 else 1.0, rel=1e-3)
    assert (run.error <= MAX_FP16_ERROR) == allowed and (run.error == 1) == (squash is torch.sin)
    card.launched = 0
    made = run(make_input(1))
    assert card.launched == allowed * PRODUCTS
    assert error(made, module(make_input(1))) <= 2 * MAX_FP16_ERROR
    assert outcomes(run.guard) == ["finite"] * 2


def test_failed_first_call_defers_the_check_to_the_next_call(card: Fp16SumsOnCpu) -> None:
    calls = [0]

    def broken_once(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.tanh(x) * (torch.nan if calls[0] <= 3 and x.dtype is torch.float16 else 1)

    run = Run(network(broken_once))
    run(make_input())
    assert outcomes(run.guard) == ["rerun"] and run.error is None and card.launched == 0
    run(make_input())
    assert outcomes(run.guard) == ["rerun", "finite"] and run.error is not None


def test_later_overflow_is_recomputed_and_disables_fp16_accumulation(before: bool) -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    def watched(x: torch.Tensor) -> torch.Tensor:
        seen.append((x.dtype, MATMUL.allow_fp16_accumulation))
        return torch.sin(x)  # NaN for infinite values

    module = cancelling(network(watched), 40.0)
    with torch.no_grad(), accumulation(ADA, Accumulation.FP16):
        right = module.float()(make_input().float())
        run = Run(module.half(), PrecisionOverrides(fp16_error=0.0))
        seen.clear()
        with Fp16SumsOnCpu() as card:
            assert error(run(make_input()), right) < 0.01
            rerun = run.guard.report.steps[0].rerun
            assert rerun is not None and rerun.module == "1.inner"
            assert not any(on for dtype, on in seen if dtype is torch.float32), "the fp32 rerun"
            assert run.learner.learned == PrecisionOverrides(fp16_error=1.0)
            card.launched = 0
            run(make_input())
    assert outcomes(run.guard) == ["rerun", "finite"] and card.launched == 0


def test_fp32_for_rest_of_run_keeps_the_measured_error(card: Fp16SumsOnCpu) -> None:
    run = Run(network())
    run(make_input())
    found = run.error
    run.learner.stay()
    assert found is not None and run.error == found


def test_step_scope_also_checks_fp16_accumulation(card: Fp16SumsOnCpu) -> None:
    run = Run(network(), scope=Scope.STEP)
    run(make_input())
    assert run.error is not None and card.launched and run.guard.learned is None


@pytest.mark.parametrize(("size", "allowed"), [(0.0, True), (40.0, False)], ids=["healthy", "overflows plain fp16"])
def test_scaled_products_are_checked_for_fp16_accumulation(card: Fp16SumsOnCpu, size: float, allowed: bool) -> None:
    module = cancelling(network(torch.sin), size) if size else network()
    run, launched = Run(module, PrecisionOverrides(all_layers_scaled=True)), []
    for step in range(3):
        card.launched, x = 0, make_input(step)
        assert error(run(x), run_in_fp32(module, x)) <= MAX_FP16_ERROR
        launched.append(card.launched)
    assert run.error is not None and run.error < 1 and (run.error <= MAX_FP16_ERROR) == allowed
    assert launched == [PRODUCTS, *[PRODUCTS * allowed] * 2] and outcomes(run.guard) == ["finite"] * 3


@pytest.mark.parametrize(("others", "found"), [(torch.inf, 1.0), (torch.nan, None)], ids=["overflow", "turned off"])
def test_ranks_agree_on_fp16_accumulation(card: Fp16SumsOnCpu, others: float, found: float | None) -> None:
    run = Run(network(), agree=lambda values: torch.full_like(values, others) if values.shape == (1,) else values)
    run.learner.check_fp16_accumulation(make_input())
    assert run.error == found


def test_check_waits_until_no_other_stage_runs(card: Fp16SumsOnCpu) -> None:
    run = Run(network())
    with accumulation(ADA):
        run(make_input())
    assert run.error is None and card.launched == 0
    run(make_input())
    assert run.error is not None


def test_interrupt_during_check_resets_switch_and_error(card: Fp16SumsOnCpu) -> None:
    stop = [True]

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        if MATMUL.allow_fp16_accumulation and stop[0]:
            raise KeyboardInterrupt
        return torch.tanh(x)

    run = Run(network(interrupted))
    with pytest.raises(KeyboardInterrupt):
        run(make_input())
    assert not MATMUL.allow_fp16_accumulation and run.error is None
    stop[0] = False
    run(make_input())
    assert run.error is not None
