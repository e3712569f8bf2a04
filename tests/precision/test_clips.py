"""What a model clips in fp16 is seen wherever it clips, and healthy models are left alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from clipping import CLIPS, END, Clip, Clipping, given, guarded
from comfyui_onediff_guard.precision.overflow import ClipDetector
from torch import nn
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
@torch.no_grad()
def test_what_is_clipped_is_a_failure_and_a_healthy_call_is_the_same_to_the_bit(clip: Clip) -> None:
    hot, healthy = Clipping(clip, hot=4e4).half(), Clipping(clip).half()
    right, wrong, guard = copy.deepcopy(hot).float()(given().float()), hot(given()), guarded(hot)
    assert wrong.isfinite().all() and (wrong - right).norm() > 0.02 * right.norm()
    assert torch.equal(guard(given()), right)
    (step,) = guard.report.steps
    assert step.outcome == "rerun" and "'layers.1' reaches" in step.note
    guard = guarded(healthy)
    for _ in range(2):
        assert torch.equal(guard(given()), healthy(given()))
    assert guard.report.reruns == 0


def peak_of(call: Any, x: torch.Tensor) -> tuple[Any, Any]:
    """(what was found to be clipped while it ran, what it returned)"""
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
        (math.inf, 10.0, 0.0),  # a bound of the model's own, which fp32 has too
        (math.inf, torch.tensor(10.0), 0.0),
        (64992.0, torch.tensor([64504.0]), END),
        (math.inf, torch.tensor(1e9), 0.0),  # stays infinite, as fp16 has no 1e9: nothing is hidden
        (math.inf, 448.0, math.inf),  # fp8's end: what ComfyUI makes finite on the way to a product in fp8
        (900.0, 448.0, 0.0),  # fp8's rounding of what fp16 held
    ],
)
def test_a_clamp_counts_where_it_changes_what_fp16_cannot_hold(x: float, bound: Any, found: float) -> None:
    peak, _ = peak_of(lambda x: ((0 * x[:0]).isinf(), x.clamp(-bound, bound)), torch.tensor([x]).half())
    assert peak is not None
    assert torch.equal(peak, torch.tensor(found)) or (math.isnan(found) and peak.isnan())


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.clamp(min=-END),  # what makes a mask's -inf finite
        lambda x: x.clamp(-1, 1),
        lambda x: x.clamp(-1, math.inf),
        lambda x: x.float().nan_to_num(),
        lambda x: (x > 0).long().clamp(0, 70000),
        lambda x: x[:0].nan_to_num(),
        lambda x: (x / x.exp(), x / 2, x / torch.tensor(math.inf)),
    ],
)
@pytest.mark.parametrize("x", [-math.inf, 20.0])
def test_other_clamps_and_divisions_are_none_of_this(call: Clip, x: float) -> None:
    assert peak_of(call, torch.full((3,), x).half())[0] is None


@pytest.mark.parametrize(
    "asked",
    [
        [0.0, -math.inf, 0.0],  # an additive mask, which is the same in fp32
        [-1.0, -math.inf, -3.0],  # with distances
        [-math.inf] * 3,
        [1.0, -2.0, 65504.0],
    ],
)
def test_what_is_asked_of_a_mask_or_of_finite_values_is_no_failure(asked: list[float]) -> None:
    asks = lambda x: (x.isinf(), torch.isfinite(x), x == -math.inf, x > 0)  # noqa: E731
    assert peak_of(asks, torch.tensor(asked).half())[0] == 0


def by_attention(x: torch.Tensor) -> torch.Tensor:
    """ComfyUI's Normalized Attention Guidance: a ratio of norms that is kept below a bound."""
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
    "guidance by attention": by_attention,
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
def test_a_norm_counts_where_fp16_cannot_hold_it_or_the_square_that_is_written_out(norm, value, found):
    peak, made = peak_of(NORMS[norm], torch.full((2, 64), value).half())
    assert made.isfinite().all() == math.isfinite(value) and made.any() == (value not in (1.5e4, 300.0))
    assert peak is not None and peak.item() == pytest.approx(found)


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_that_is_compiled_is_seen_as_well(norm: str) -> None:
    torch.compiler.reset()
    x = torch.full((2, 64), 1.5e4 if norm == "normalize" else 300.0).half()
    compiled = torch.compile(NORMS[norm], backend="eager", fullgraph=True)
    assert peak_of(compiled, x)[0] == peak_of(NORMS[norm], x)[0] != 0


def test_guidance_whose_norms_leave_fp16_while_their_values_do_not_is_seen() -> None:
    """As ComfyUI-NAG writes it, with a bound of one number, and norms that are expanded."""
    x = torch.full((2, 1280), 20.0).half()

    def guided(x: torch.Tensor) -> torch.Tensor:
        norms = [torch.norm(each, p=1, dim=-1, keepdim=True).expand_as(each) for each in (5 * x, x)]
        s = norms[0] / norms[1]
        return 5 * x * torch.minimum(s, s.new_full((1,), 2.5)) / s

    peak, made = peak_of(guided, x)
    assert not made.any() and peak is not None and peak.isinf()


def test_the_lesser_of_masks_is_no_failure() -> None:
    mask = torch.tensor([0.0, -math.inf, 0.0]).half()
    peak, _ = peak_of(lambda x: torch.minimum(x, x.flip(0)), mask)
    assert peak == 0


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_only_fp16_is_watched(dtype: str) -> None:
    clips, calls = ClipDetector(dtype), []
    clips.wrap(modes(calls))(torch.full((1,), math.inf))
    assert calls == [0] and clips.take() is None


def test_each_call_is_judged_by_itself() -> None:
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
def test_a_stage_that_does_not_clip_is_not_watched_after_its_first_call_unless_something_is_compiled(
    clips: bool, graphs: int, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is compiled would be made twice: PyTorch makes it anew where a mode comes or goes."""
    monkeypatch.setitem(counters["stats"], "unique_graphs", graphs)
    calls: list[int] = []
    stage = ClipDetector("fp16").wrap(lambda x: modes(calls)(CLIPS["clip"](x) if clips else x))
    for _ in range(3):
        stage(torch.ones(1).half())
    assert calls == watched


def test_nothing_stays_when_the_stage_raises() -> None:
    clips = ClipDetector("fp16")

    def stage(x: torch.Tensor) -> torch.Tensor:
        CLIPS["clip"](x)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        clips.wrap(stage)(torch.full((1,), math.inf).half())
    assert torch._C._len_torch_function_stack() == 0
    clips.wrap(CLIPS["clip"])(torch.ones(1).half())
    assert clips.take() == 1.0


def test_other_modes_stay_in_force() -> None:
    seen: list[Any] = []

    class Other(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Other():
        ClipDetector("fp16").wrap(lambda x: x.clip(-END, END))(torch.ones(1).half())
    assert torch.Tensor.clip in seen


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_the_peak_is_kept_where_the_stage_computes(dtype):
    """A text encoder is given token ids alone. Kept elsewhere, each look waits for the device; at 'meta' it fails."""
    clips = ClipDetector("fp16")
    stage = clips.wrap(lambda given: torch.zeros(3, dtype=torch.float16, device=given.device).clamp(max=64504.0))
    stage(torch.zeros(2, dtype=dtype, device="meta"))
    peak = clips.take()
    assert peak is not None and peak.device.type == "meta"


def test_what_modules_are_moved_to_is_looked_up_nowhere(monkeypatch):
    """PyTorch 2.11's compiler traces `Module.to` with something in place of that function that equals nothing."""

    class StandsIn:
        __hash__ = None  # pyright: ignore[reportAssignmentType]

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("has no traceable function")

        def __call__(self, *args: Any) -> Any:
            return args

    monkeypatch.setattr("comfyui_onediff_guard.precision.overflow._PARSE_TO", function := StandsIn())
    assert ClipDetector("fp16").__torch_function__(function, (), ("cpu",)) == ("cpu",)


def test_what_unflattens_is_traced_whole():
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nan_to_num(x.unflatten(1, (2, -1)).unflatten(dim=2, sizes=(2, 2)).flatten(1))

    clips = ClipDetector("fp16")
    made = clips.wrap(torch.compile(Heads(), backend="eager", fullgraph=True))(given())
    assert torch.equal(made, given()) and clips.take() == given().abs().max()
