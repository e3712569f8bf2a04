"""PyTorch functions that turn values beyond a plan's range into finite ones: the step is still taken for a failure."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.fp16_safe import inputs_to_check
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.planned_products import CallPattern, PlannedMode
from comfyui_onediff_guard.precision.upcast import run_in
from torch.utils import _pytree as pytree

# test values, and where they leave the range
GENERATOR = torch.Generator().manual_seed(0)
VALUES, OTHERS = (torch.randn(2, 4, 6, 8, generator=GENERATOR) for _ in range(2))
LEFT, OTHERS = torch.rand(VALUES.shape, generator=GENERATOR) < 0.1, OTHERS.abs() + 0.5
SIGNS = {"both": VALUES.sign(), "above": torch.ones(()), "below": -torch.ones(())}
ARGUMENTS: tuple[Callable[[torch.Tensor], tuple[Any, ...]], ...] = (
    lambda x: (x,),
    lambda x: (x, x),
    lambda x: (x, OTHERS.clone()),
    lambda x: (OTHERS.clone(), x),
    lambda x: (x, 0.5),
    lambda x: (0.5, x),
    lambda x: (x, -1),
    lambda x: (x[0, 0], OTHERS[0, 0]),
)
# functions that need a device, move memory, draw random numbers, or return no values
LEFT_OUT = """
    cuda xpu ipu pin_memory share_memory storage sparse backward numpy set_ resize rand normal_ uniform_ exponential_
    cauchy geometric bernoulli dropout multinomial poisson binomial empty hash_tensor _cdata polynomial fbgemm nextafter
    svd lstsq pinv matrix_rank __reduce register
    """.split()  # noqa: SIM905
# functions of masks too, which hold -inf: a layer's output of -inf gets weight 0 if no other value left the range
# upwards
MASKED = ("softmax", "logsumexp", "scaled_dot_product_attention")


def numbers(made: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, (torch.Tensor, bool, int, float))]
    dense = [torch.as_tensor(each) for each in tensors]
    return [torch.view_as_real(each) if each.is_complex() else each for each in dense if each.layout is torch.strided]


def called(function: Any, arguments: Any, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    try:
        return [each.detach().double() for each in numbers(function(*arguments(x.clone())))]
    except Exception:  # noqa: BLE001 - most take other arguments
        return []


def is_noticed(function: Any, arguments: Any, x: torch.Tensor) -> bool:
    mode = PlannedMode({}, CallPattern(writes=True))

    def call(x: torch.Tensor) -> None:
        function(*arguments(x))

    try:
        run_in(mode, call, (x.clone(),), {})
    except Exception:  # noqa: BLE001 - the call is then repeated, in the end in fp32
        return True
    return not mode.nan_if_failed(torch.ones(3)).isfinite().all()


def hidden() -> list[str]:
    found = []
    for function in torch.overrides.get_testing_overrides():
        name = torch.overrides.resolve_name(function) or str(function)
        if any(part in name for part in LEFT_OUT):
            continue
        for (where, signs), (at, arguments) in itertools.product(SIGNS.items(), enumerate(ARGUMENTS)):
            left, scaled_down = (torch.where(LEFT, signs * value, VALUES) for value in (math.inf, 3.0))
            made = called(function, arguments, left)
            if not made or not all(each.isfinite().all() for each in made):
                continue
            right = called(function, arguments, scaled_down)
            alike = len(made) == len(right) and all(map(torch.equal, made, right))
            masked = where == "below" and name.rpartition(".")[2] in MASKED
            if not alike and not masked and not is_noticed(function, arguments, left):
                found.append(f"{name}, {where}, {at}")
    return found


def test_functions_that_hide_infinities_are_noticed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not hidden()


def nan_like(_: torch.Tensor) -> torch.Tensor:
    return torch.full((2, 8, 64), math.nan)  # like uninitialised memory


@torch.library.custom_op("guard_tests::biased", mutates_args=("out",))
def biased(x: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x + bias.clamp(min=-1))


MASK = torch.where(torch.arange(64) % 3 == 0, -math.inf, 0.0)
IS_RIGHT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "written by out=": lambda h: torch.sigmoid(h, out=nan_like(h)),
    "filled": lambda h: h + 0 * nan_like(h).normal_(),
    "written by an operator with a mask": lambda h: (biased(h, MASK, out := nan_like(h)), out)[1],
    "a transposed mask": lambda h: h + torch.t(MASK[None]).ravel().softmax(-1),
    "bounds": lambda h: torch.minimum(h.clamp(torch.tensor(-math.inf), torch.tensor(9e9)), torch.tensor(math.inf)),
    "in parallel": lambda h: torch.vmap(lambda row: torch.hypot(row, row))(h),
    "an exponential of a mask of the lowest float": lambda h: h + (MASK.clamp(min=-3.4e38) + h[..., :1]).exp(),
    "normalised": lambda h: torch.nn.functional.normalize(h, dim=-1),
}


@pytest.mark.parametrize("function", IS_RIGHT.values(), ids=IS_RIGHT)
def test_correct_calls_keep_the_plan(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    first, last = (torch.nn.Linear(64, 64).half().requires_grad_(False) for _ in range(2))
    products = LearnedProducts()
    for _ in range(3):
        assert products.run(lambda x: last(function(first(x))), torch.randn(2, 8, 64)).isfinite().all()
    assert products._planned and not products._renewals


HIDES: dict[str, Callable[[torch.Tensor], Any]] = {  # with arguments that the tests above do not pass
    "to the dtype of integers": lambda x: x.type_as(torch.ones(1, dtype=torch.int64)),
    "to a tensor of integers": lambda x: x.to(torch.ones(1, dtype=torch.int64)),
    "to a class of integers": lambda x: x.type("torch.LongTensor"),
    "into integers": lambda x: torch.zeros(x.shape, dtype=torch.int64).copy_(x),
    "summed in integers": lambda x: x.sum(dtype=torch.int64),
    "to 8 bits": lambda x: x.to(torch.float8_e4m3fn),
    "a divisor by name": lambda x: torch.addcdiv(OTHERS, tensor1=OTHERS, tensor2=x),
    "an operator": lambda x: biased(x, torch.zeros(8), torch.empty(x.shape)),
}


@pytest.mark.parametrize("hides", HIDES.values(), ids=HIDES)
def test_hidden_infinity_is_noticed(hides: Callable[[torch.Tensor], Any]) -> None:
    assert is_noticed(lambda x: hides(x), lambda x: (x,), torch.where(LEFT, math.inf, VALUES))


UNDONE: dict[str, Callable[[PlannedMode, torch.Tensor], object]] = {
    "an infinity that a function hides": lambda _, x: torch.reciprocal(x / 0),
    "a row too small for fp16": lambda mode, x: mode._record_rows(x * 2.0**-20),
    "a gate too small for fp16": lambda mode, x: mode._record_gated_rows(x * 0),
    "a constant scale that underflowed": lambda mode, _: mode._underflows.append(torch.tensor(True)),
    "a call that the plan does not cover": lambda mode, _: mode._mismatch_error("another call"),
    "a position": lambda mode, _: mode.next_key(torch.add),
}


@pytest.mark.parametrize("undone", [True, False])
@pytest.mark.parametrize("do", UNDONE.values(), ids=UNDONE)
def test_rollback_removes_recorded_checks(do: Callable[[PlannedMode, torch.Tensor], object], undone: bool) -> None:
    """For another pack's attention that is tried and dropped."""
    mode, x = PlannedMode({}, CallPattern(writes=True)), torch.ones(2, 4)
    mode.begin(x)
    back, before = mode.rollback_point(), mode.position
    with mode:
        do(mode, x)
    if undone:
        back()
    passed = mode.nan_if_failed(torch.ones(3)).isfinite().all() and not mode._mismatch and mode.position == before
    assert bool(passed) is undone


class OnCard(torch.Tensor):
    device = torch.device("cuda")


@pytest.mark.parametrize(
    ("function", "to", "looks"),
    [
        (torch.Tensor.cpu, (), True),
        (torch.Tensor.to, ("cpu",), True),
        (torch.Tensor.to, (torch.device("cpu"), torch.float32), True),
        (torch.Tensor.to, ("cuda",), False),
        (torch.Tensor.to, (torch.float32,), False),
    ],
)
def test_copies_from_device_to_host_are_checked(function: Any, to: tuple[Any, ...], looks: bool) -> None:
    found, _ = inputs_to_check(function, (torch.ones(2).as_subclass(OnCard), *to), {})
    assert bool(found) == looks
