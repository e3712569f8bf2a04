"""NaN Guard (native) on small models of ComfyUI's own families, in every dtype of weights and compute."""

from __future__ import annotations

import math
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import guarded, texts
from native_models import CARD, LAYOUTS, largest_difference, make_model, sample, with_fp32_twin
from native_table import Cells, figures, table

STATES = {  # dtype of the weights, and the dtype they are cast to
    "fp16": (torch.float16, None),
    "fp32 computed in fp16": (torch.float32, torch.float16),
    "fp8 computed in fp16": (torch.float8_e4m3fn, torch.float16),
    "bf16": (torch.bfloat16, None),
    "fp16 computed in bf16": (torch.float16, torch.bfloat16),
}
FP16 = [state for state in STATES if "bf16" not in state]
STEPS = 2
CLIPS = ["flux", "flux2", "chroma", "hunyuan_video", "hunyuan_video_15"]  # these clip overflows in fp16
CLIPS += ["lumina2", "z_image"] * hasattr(import_module("comfy.ldm.lumina.model"), "clamp_fp16")
CLIPS_IN_FP32_TOO = ("ace",)
HEAD = """\
Healthy: the guarded run has the same bits as the plain one, which is so far from fp32. Overflowing:
the plain run's distance from fp32 → the guarded run's. Distances are the largest, as shares of the largest value. –:
not run."""
cells = table("families", HEAD, [*STATES, *(f"{state}, overflowing" for state in FP16)])


def check_healthy(patcher: Any, exact: Any, *, steps: int = STEPS) -> float:
    """Check that the guarded run has the same bits. Return its distance from fp32."""
    plain = sample(patcher, steps=steps)
    made = sample(guarded(patcher), steps=steps)
    assert plain.isfinite().all() and torch.equal(plain, made)
    assert reruns() == 0
    return largest_difference(patcher.model.layout, plain, sample(exact, steps=steps))


def check_overflowing(
    patcher: Any, exact: Any, *, steps: int = STEPS, bound: float
) -> tuple[tuple[float, float], int, int]:
    """Check that the guarded run is near fp32. Return the distances from fp32 without and with the guard, the number of
    fp32 calls of the overflowing part (EasyCache skips the part, not the network), and the number of reruns."""
    plain = sample(patcher, steps=steps)
    made = sample(guarded(patcher), steps=steps)
    calls, layout = list[int](), patcher.model.layout
    part = exact.model.diffusion_model.get_submodule(layout.once or layout.block)
    hook = part.register_forward_hook(lambda *_: calls.append(1))
    reference = sample(exact, steps=steps)
    hook.remove()
    error = largest_difference(layout, plain, reference), largest_difference(layout, made, reference)
    assert error[1] <= bound
    return error, len(calls), reruns()


def reruns() -> int:
    """Return the number of reruns that the guard reported."""
    found = re.search(r"(\d+)(?: of \d+ calls)? recomputed in fp32\.", texts[-1])
    assert found or texts[-1].splitlines()[0].endswith(" fine."), texts[-1]
    return int(found[1]) if found else 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("family", LAYOUTS)
def test_healthy_run_is_bit_equal_with_guard(cells: Cells, family: str, state: str) -> None:
    error = check_healthy(*with_fp32_twin(family, *STATES[state]))
    assert error > 0  # so it ran in half precision
    cells[family, state] = f"same bits, {figures(error)}"


@pytest.mark.parametrize("state", FP16)  # not bf16: it has fp32's range
@pytest.mark.parametrize("family", LAYOUTS)
def test_overflowing_run_is_broken_unguarded_and_near_fp32_guarded(cells: Cells, family: str, state: str) -> None:
    rounds = LAYOUTS[family].rounds
    exact = CARD.type == "cpu" and rounds == 1e-5  # on a card, rounding depends on a tensor's address
    models = with_fp32_twin(family, *STATES[state], hot=True)
    (error, guarded_error), calls, times = check_overflowing(*models, bound=0 if exact else rounds)
    cells[family, f"{state}, overflowing"] = figures(error, guarded_error)
    if family in CLIPS_IN_FP32_TOO:
        assert error <= 2e-2
    elif family in CLIPS:
        assert error > 2e-2  # finite but wrong
    else:
        assert math.isnan(error)
    assert times == calls > 0


@pytest.mark.parametrize(
    ("family", "broken"), {"ltx2": [True, True], "ltx2_sound": [False, True], "minimax_h3": [True, True]}.items()
)
def test_plain_run_overflows_in_expected_streams(family: str, broken: list[bool]) -> None:
    """One model overflows only in its sound; the tests above cover its guarded run."""
    if family not in LAYOUTS:
        pytest.skip(f"this ComfyUI has no {family}")
    plain = sample(make_model(family, hot=True), steps=1)
    assert [not bool(stream.isfinite().all()) for stream in LAYOUTS[family].split(plain)] == broken
