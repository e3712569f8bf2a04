"""NaN Guard (native) on every family of ComfyUI's own that people ask for, small, in every state of its weights."""

from __future__ import annotations

import math
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import guarded, said
from native_models import CARD, LAYOUTS, apart, make_model, sample, with_its_twin
from native_table import Cells, figures, table

STATES = {  # dtype of the weights, and what they are cast to
    "fp16": (torch.float16, None),
    "fp32 computed in fp16": (torch.float32, torch.float16),
    "fp8 computed in fp16": (torch.float8_e4m3fn, torch.float16),
    "bf16": (torch.bfloat16, None),
    "fp16 computed in bf16": (torch.float16, torch.bfloat16),
}
FP16 = [state for state in STATES if "bf16" not in state]
STEPS = 2
HIDES = ["flux", "flux2", "chroma", "hunyuan_video", "hunyuan_video_15"]  # it clips what overflows in fp16
HIDES += ["lumina2", "z_image"] * hasattr(import_module("comfy.ldm.lumina.model"), "clamp_fp16")
CLIPS_IN_FP32_TOO = ("ace",)
HEAD = """\
Healthy: the guarded run has the same bits as the plain one, which is so far from fp32. Overflowing:
the plain run's distance from fp32 → the guarded run's. Distances are the largest, as shares of the largest value. –:
not run."""
cells = table("families", HEAD, [*STATES, *(f"{state}, overflowing" for state in FP16)])


def check_healthy(patcher: Any, exact: Any, *, steps: int = STEPS) -> float:
    """With the guard it has the same bits. Returns how far it is off."""
    plain = sample(patcher, steps=steps)
    made = sample(guarded(patcher), steps=steps)
    assert plain.isfinite().all() and torch.equal(plain, made)
    assert reruns() == 0
    return apart(patcher.model.layout, plain, sample(exact, steps=steps))


def check_overflowing(
    patcher: Any, exact: Any, *, steps: int = STEPS, bound: float
) -> tuple[tuple[float, float], int, int]:
    """With the guard it is right. Returns how far it is off without and with it; how often the part that overflows is
    called in fp32, since EasyCache skips it and not the network; and the number of reruns."""
    plain = sample(patcher, steps=steps)
    made = sample(guarded(patcher), steps=steps)
    calls, layout = list[int](), patcher.model.layout
    part = exact.model.diffusion_model.get_submodule(layout.once or layout.block)
    hook = part.register_forward_hook(lambda *_: calls.append(1))
    reference = sample(exact, steps=steps)
    hook.remove()
    off = apart(layout, plain, reference), apart(layout, made, reference)
    assert off[1] <= bound
    return off, len(calls), reruns()


def reruns() -> int:
    """That the guard reported."""
    found = re.search(r"(\d+)(?: of \d+ calls)? recomputed in fp32\.", said[-1])
    assert found or said[-1].splitlines()[0].endswith(" fine."), said[-1]
    return int(found[1]) if found else 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", LAYOUTS)
def test_a_healthy_run_is_the_same_to_the_bit(cells: Cells, family: str, state: str) -> None:
    off = check_healthy(*with_its_twin(family, *STATES[state]))
    assert off > 0  # it did run in half precision
    cells[family, state] = f"same bits, {figures(off)}"


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("family", LAYOUTS)
def test_an_inserted_guard_comes_to_the_same(family: str, hot: bool) -> None:
    """As one that was wired by hand; of a healthy run it says nothing."""
    patcher = make_model(family, hot=hot)
    by_hand = sample(guarded(patcher), steps=STEPS)
    assert torch.equal(by_hand, sample(guarded(patcher, inserted=True), steps=STEPS))
    assert hot or not said


@pytest.mark.parametrize("state", FP16)  # of what bf16 does not hold, fp32 holds no more
@pytest.mark.parametrize("family", LAYOUTS)
def test_a_run_that_overflows_is_broken_without_and_right_with_it(cells: Cells, family: str, state: str) -> None:
    rounds = LAYOUTS[family].rounds
    exact = CARD.type == "cpu" and rounds == 1e-5  # a card's kernels round by where a tensor begins
    models = with_its_twin(family, *STATES[state], hot=True)
    (off, off_with_it), calls, times = check_overflowing(*models, bound=0 if exact else rounds)
    cells[family, f"{state}, overflowing"] = figures(off, off_with_it)
    if family in CLIPS_IN_FP32_TOO:
        assert off <= 2e-2
    elif family in HIDES:
        assert off > 2e-2  # finite, and wrong
    else:
        assert math.isnan(off)
    assert times == calls > 0


@pytest.mark.parametrize(
    ("family", "broken"), {"ltx2": [True, True], "ltx2_sound": [False, True], "minimax_h3": [True, True]}.items()
)
def test_every_stream_is_looked_at(family: str, broken: list[bool]) -> None:
    """One has an overflow in its sound alone, and is right above."""
    if family not in LAYOUTS:
        pytest.skip(f"this ComfyUI has no {family}")
    plain = sample(make_model(family, hot=True), steps=1)
    assert [not bool(stream.isfinite().all()) for stream in LAYOUTS[family].split(plain)] == broken
