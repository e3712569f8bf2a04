"""Clip detection: clipping in fp16 is detected in every form, and healthy models are unchanged."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from clipping import CLIPS, END, Clip, Clipping, clip_input, guarded
from comfyui_onediff_guard.precision.overflow_detection import ClipDetector
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@torch.no_grad()
def test_clipped_call_is_recomputed_and_healthy_call_is_bit_equal(clip: Clip) -> None:
    hot, healthy = Clipping(clip, hot=4e4).half(), Clipping(clip).half()
    right, wrong, guard = copy.deepcopy(hot).float()(clip_input().float()), hot(clip_input()), guarded(hot)
    assert wrong.isfinite().all() and (wrong - right).norm() > 0.02 * right.norm()
    assert torch.equal(guard(clip_input()), right)
    (step,) = guard.report.steps
    assert step.outcome == "rerun" and "'layers.1' reaches" in step.note
    guard = guarded(healthy)
    for _ in range(2):
        assert torch.equal(guard(clip_input()), healthy(clip_input()))
    assert guard.report.reruns == 0


def peak_of(call: Any, x: torch.Tensor) -> tuple[Any, Any]:
    """(peak that was clipped during the call, its result)"""
    clips = ClipDetector("fp16")
    made = clips.wrap(call)(x)
    return clips.take(), made


@pytest.mark.parametrize(
    ("x", "bound", "found"),
    [
        (70.0, END, 70.0),
        (64992.0, END, 64992.0),
        (END, END, END),
        (64992.0, 64504.0, END),
        (math.inf, 64504.0, math.inf),
        (-math.inf, END, math.inf),
        (math.nan, END, math.nan),
        (math.inf, 10.0, 0.0),  # a bound of the model, which applies in fp32 too
        (math.inf, torch.tensor(10.0), 0.0),
        (64992.0, torch.tensor([64504.0]), END),
        (math.inf, torch.tensor(1e9), 0.0),  # stays infinite, since fp16 has no 1e9: nothing is hidden
        (math.inf, 448.0, math.inf),  # the largest fp8: ComfyUI clips to it before an fp8 product
        (900.0, 448.0, 0.0),  # finite in fp16: only fp8 clips it
    ],
)
def test_clamp_is_reported_where_it_hides_an_fp16_overflow(x: float, bound: Any, found: float) -> None:
    peak, _ = peak_of(lambda x: ((0 * x[:0]).isinf(), x.clamp(-bound, bound)), torch.tensor([x]).half())
    assert peak is not None
    assert torch.equal(peak, torch.tensor(found)) or (math.isnan(found) and peak.isnan())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.clamp(min=-END),  # makes a mask's -inf finite
        lambda x: x.clamp(-1, 1),
        lambda x: x.clamp(-1, math.inf),
        lambda x: x.float().nan_to_num(),
        lambda x: (x > 0).long().clamp(0, 70000),
        lambda x: x[:0].nan_to_num(),
        lambda x: (x / x.exp(), x / 2, x / torch.tensor(math.inf)),
    ],
)
@pytest.mark.parametrize("x", [-math.inf, 20.0])
def test_harmless_clamps_and_divisions_are_ignored(call: Clip, x: float) -> None:
    assert peak_of(call, torch.full((3,), x).half())[0] is None


@pytest.mark.parametrize(
    "asked",
    [
        [0.0, -math.inf, 0.0],  # an additive mask, the same in fp32
        [-1.0, -math.inf, -3.0],  # with distances
        [-math.inf] * 3,
        [1.0, -2.0, 65504.0],
    ],
)
def test_checks_on_masks_or_finite_values_are_not_failures(asked: list[float]) -> None:
    asks = lambda x: (x.isinf(), torch.isfinite(x), x == -math.inf, x > 0)  # noqa: E731
    assert peak_of(asks, torch.tensor(asked).half())[0] == 0


def attention_guidance(x: torch.Tensor) -> torch.Tensor:
    """ComfyUI's Normalized Attention Guidance: a ratio of norms, bounded from above."""
    ratio = (x**2).mean(1, keepdim=True).sqrt() / x[:, :1].abs()
    return x * (torch.minimum(ratio, torch.full_like(ratio, 2.5)) / ratio)


NORMS: dict[str, Clip] = {
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=1),
    "divided": lambda x: x / (x**2).mean(1, keepdim=True).sqrt(),
    "in place": lambda x: x.clone().div_((x * x).mean(1, keepdim=True).sqrt_()),
    "rsqrt": lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True)),
    "a power": lambda x: x * x.pow(2).mean(1, keepdim=True).pow(-0.5),
    "a power by name": lambda x: x * torch.pow((x**2).mean(1, keepdim=True), exponent=-0.5),
    "a power in a tensor": lambda x: x * (x**2).mean(1, keepdim=True) ** torch.tensor(-0.5),
    "a power by its sign": lambda x: x * (x**2).mean(1, keepdim=True) ** -0.5,
    "reciprocal": lambda x: x * (x**2).mean(1, keepdim=True).sqrt().reciprocal(),
    "one over it": lambda x: x * (1 / (x**2).mean(1, keepdim=True).sqrt()),
    "one over it, of all": lambda x: x * (1 / (x**2).mean().sqrt()),
    "of all": lambda x: x / (x**2).mean().sqrt(),
    "of a column": lambda x: x / (x**2).mean(0).sqrt(),
    "attention guidance": attention_guidance,
    "a ratio of norms": lambda x: x * (x[:, :1] * 0 + 1 / (x**2).mean(1, keepdim=True).sqrt()),
    "without its dimension": lambda x: x * (1 / (x**2).mean(1).sqrt())[:, None],
    "addcdiv": lambda x: torch.addcdiv(torch.zeros_like(x), x, (x**2).mean(1, keepdim=True).sqrt()),
    "by name": lambda x: torch.div(x, other=(x**2).mean(1, keepdim=True).sqrt()),
    "weights over it": lambda x: x * (torch.ones(64).half() / (x**2).mean(1, keepdim=True).sqrt()),
}


@pytest.mark.parametrize(
    ("norm", "value", "found"),
    [("normalize", 1.5e4, 1.2e5), ("normalize", 8e3, 0.0), ("normalize", -math.inf, math.inf)]
    + [("normalize", math.nan, 0.0)]
    + [(norm, value, found) for norm in [*NORMS][1:] for value, found in ((300.0, math.inf), (200.0, 0.0))],
)
def test_norm_is_reported_where_it_or_its_square_overflows_fp16(norm, value, found):
    peak, made = peak_of(NORMS[norm], torch.full((2, 64), value).half())
    assert made.isfinite().all() == math.isfinite(value) and made.any() == (value not in (1.5e4, 300.0))
    assert peak is not None and peak.item() == pytest.approx(found)


@pytest.mark.parametrize("norm", NORMS)
def test_overflow_of_compiled_norm_is_reported(norm: str) -> None:
    torch.compiler.reset()
    x = torch.full((2, 64), 1.5e4 if norm == "normalize" else 300.0).half()
    compiled = torch.compile(NORMS[norm], backend="eager", fullgraph=True)
    assert peak_of(compiled, x)[0] == peak_of(NORMS[norm], x)[0] != 0


def test_guidance_with_overflowing_norms_is_reported() -> None:
    """As in ComfyUI-NAG: a scalar bound, and norms that are expanded."""
    x = torch.full((2, 1280), 20.0).half()

    def guided(x: torch.Tensor) -> torch.Tensor:
        norms = [torch.norm(each, p=1, dim=-1, keepdim=True).expand_as(each) for each in (5 * x, x)]
        s = norms[0] / norms[1]
        return 5 * x * torch.minimum(s, s.new_full((1,), 2.5)) / s

    peak, made = peak_of(guided, x)
    assert not made.any() and peak is not None and peak.isinf()


def test_minimum_of_masks_is_not_a_failure() -> None:
    mask = torch.tensor([0.0, -math.inf, 0.0]).half()
    peak, _ = peak_of(lambda x: torch.minimum(x, x.flip(0)), mask)
    assert peak == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_only_fp16_is_checked(dtype: str) -> None:
    clips, calls = ClipDetector(dtype), []
    clips.wrap(modes(calls))(torch.full((1,), math.inf))
    assert calls == [0] and clips.take() is None


def test_each_call_reports_its_own_peak() -> None:
    clips = ClipDetector("fp16")
    stage = clips.wrap(CLIPS["clip"])
    peaks = []
    for x in (math.inf, 3.0):
        stage(torch.tensor([x, 1.0]).half())
        peaks.append(clips.take())
    assert peaks == [math.inf, 3.0]


def modes(calls: list[int]) -> Clip:
    def stage(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch._C._len_torch_function_stack())
        return x + 1

    return stage


@pytest.mark.parametrize(
    ("clips", "graphs", "watched"), [(False, 0, [1, 0, 0]), (True, 0, [1, 1, 1]), (False, 1, [1, 1, 1])]
)
def test_stage_without_clips_is_unwatched_after_first_call_if_eager(
    clips: bool, graphs: int, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode that comes or goes would make PyTorch compile again."""
    monkeypatch.setitem(counters["stats"], "unique_graphs", graphs)
    calls: list[int] = []
    stage = ClipDetector("fp16").wrap(lambda x: modes(calls)(CLIPS["clip"](x) if clips else x))
    for _ in range(3):
        stage(torch.ones(1).half())
    assert calls == watched


def test_mode_is_removed_when_the_stage_raises() -> None:
    clips = ClipDetector("fp16")

    def stage(x: torch.Tensor) -> torch.Tensor:
        CLIPS["clip"](x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        clips.wrap(stage)(torch.full((1,), math.inf).half())
    assert torch._C._len_torch_function_stack() == 0
    clips.wrap(CLIPS["clip"])(torch.ones(1).half())
    assert clips.take() == 1.0


def test_other_function_modes_stay_active() -> None:
    seen: list[Any] = []

    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Other():
        ClipDetector("fp16").wrap(lambda x: x.clip(-END, END))(torch.ones(1).half())
    assert torch.Tensor.clip in seen


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_peak_is_stored_on_the_device_of_the_stage(dtype):
    """A text encoder gets only token ids. A peak on another device would make each read wait, and fail on 'meta'."""
    clips = ClipDetector("fp16")
    stage = clips.wrap(lambda given: torch.zeros(3, dtype=torch.float16, device=given.device).clamp(max=64504.0))
    stage(torch.zeros(2, dtype=dtype, device="meta"))
    peak = clips.take()
    assert peak is not None and peak.device.type == "meta"


def test_parse_to_function_is_never_hashed_or_compared(monkeypatch):
    """PyTorch 2.11's compiler traces `Module.to` with a stand-in for that function that cannot be compared."""

    class StandsIn:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("has no traceable function")

        def __call__(self, *args: Any) -> Any:
            return args

    monkeypatch.setattr("comfyui_onediff_guard.precision.overflow_detection._PARSE_TO", function := StandsIn())
    assert ClipDetector("fp16").__torch_function__(function, (), ("cpu",)) == ("cpu",)


def test_unflatten_compiles_in_one_graph_with_clip_detection():
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(x.unflatten(1, (2, -1)).unflatten(dim=2, sizes=(2, 2)).flatten(1))

    clips = ClipDetector("fp16")
    made = clips.wrap(torch.compile(Heads(), backend="eager", fullgraph=True))(clip_input())
    assert torch.equal(made, clip_input()) and clips.take() == clip_input().abs().max()
