"""Which linear layers accumulate in fp16: decided from errors alone."""

from __future__ import annotations

import math

import pytest
from comfyui_onediff_guard.precision.sums import BUDGET, LAYER, ROWS, TRIALS, LayerError, Sums, settled


def layers(*errors: float, rows: int = 500) -> list[LayerError]:
    return [LayerError(f"blocks.{number}", error, rows) for number, error in enumerate(errors)]


class Step:
    """A step to which layers add their errors as errors add up that have nothing to do with each other.

    gain: what becomes of a layer's error on its way to the output. more: by layer, where it is otherwise.
    """

    def __init__(self, measured: list[LayerError], gain: float = 1.0, more: dict[str, float] | None = None):
        self.measured = {layer.name: layer.error * (more or {}).get(layer.name, gain) for layer in measured}
        self.made: list[tuple[str, ...]] = []

    def __call__(self, names: tuple[str, ...]) -> float:
        self.made.append(names)
        return math.sqrt(sum(self.measured[name] ** 2 for name in names))


def test_all_layers_stay_where_the_step_is_within_the_budget() -> None:
    measured = layers(0.001, 0.002, 0.001)
    step = Step(measured)
    found = settled(measured, step)
    assert found.layers == ("blocks.0", "blocks.1", "blocks.2") and found.islands == found.overflows == ()
    assert (found.largest, found.farthest, found.step) == (0.002, "blocks.1", pytest.approx(6**0.5 / 1000))
    assert len(step.made) == 1, "one step is enough to know"


def test_layers_that_matter_most_are_left_out_and_not_many_with_them() -> None:
    measured = layers(*(0.0003 for _ in range(38)), 0.009, 0.008)
    step = Step(measured)
    found = settled(measured, step)
    assert {"blocks.38", "blocks.39"} <= {*found.islands} and len(found.islands) <= 4
    assert found.step <= BUDGET and step(found.layers) == found.step, "what was tried last is what is kept"
    assert (found.largest, found.farthest) == (0.009, "blocks.38")


def test_a_layer_that_is_off_by_little_and_matters_much_is_found() -> None:
    measured = layers(*(0.0005 * (1 + number % 3) for number in range(60)))
    step = Step(measured, 0.5, {"blocks.30": 40.0})
    found = settled(measured, step)
    assert "blocks.30" in found.islands and len(found.layers) >= 50
    assert found.step <= BUDGET and len(step.made) <= TRIALS


def test_what_is_not_finite_is_never_tried() -> None:
    measured = layers(0.001, math.inf, 0.001)
    step = Step(measured)
    found = settled(measured, step)
    assert found.islands == found.overflows == ("blocks.1",)
    assert all("blocks.1" not in names for names in step.made)
    assert found.farthest != "blocks.1", "the largest error is a number"


def test_a_layer_that_is_far_off_by_itself_is_not_tried_though_the_step_would_bear_it() -> None:
    measured = layers(0.001, 2 * LAYER)
    found = settled(measured, Step(measured, gain=0.01))
    assert found.islands == ("blocks.1",) and found.overflows == ()


def test_layers_that_see_few_rows_are_left_alone_and_not_counted() -> None:
    measured = [*layers(0.001), LayerError("time", 0.001, ROWS - 1)]
    assert settled(measured, Step(measured)).layers == ("blocks.0",)
    few = [LayerError("time", 0.0, 1)]
    found = settled(few, lambda names: pytest.fail(f"a step with {names}"))
    assert found == Sums() and str(found) == "nothing: no linear layer is large enough to gain by it"


@pytest.mark.parametrize("gain", [0.1, 0.3, 1.0, 3.0, 10.0, 100.0])
def test_whatever_the_network_makes_of_errors_the_step_that_is_kept_is_within_the_budget(gain: float) -> None:
    measured = layers(*(0.0005 * (1 + number % 7) for number in range(60)))
    step = Step(measured, gain)
    found = settled(measured, step)
    assert len(step.made) <= TRIALS
    assert found.step <= BUDGET
    assert sorted((*found.layers, *found.islands)) == sorted(layer.name for layer in measured)
    assert bool(found.layers) == (gain < 10)
    if found.layers:
        assert step(found.layers) == pytest.approx(found.step), "what was tried last is what is kept"


def test_a_step_that_trembles_whatever_is_tried_leaves_every_layer_in_fp32() -> None:
    measured = layers(*(0.001 for _ in range(50)))
    made: list[int] = []

    def step(names: tuple[str, ...]) -> float:
        made.append(len(names))
        return 1.2 * BUDGET

    found = settled(measured, step)
    assert len(made) <= TRIALS and found.layers == () and len(found.islands) == 50 and found.step == 0
    assert str(found).startswith("none of 50 linear layers")


def test_parts_that_are_within_the_budget_and_are_not_together_are_tried_together() -> None:
    """As rounding errors that do have to do with each other."""
    measured = layers(*(0.001 for _ in range(16)))
    found = settled(measured, lambda names: 0.0006 * len(names))
    assert 4 <= len(found.layers) <= 8 and found.step <= BUDGET


@pytest.mark.parametrize("broken", [math.inf, math.nan])
def test_a_step_that_is_not_finite_is_beyond_every_budget(broken: float) -> None:
    measured = layers(*(0.001 for _ in range(64)))
    found = settled(measured, lambda names: broken if "blocks.7" in names else 0.0001)
    assert "blocks.7" in found.islands and len(found.layers) >= 48
    assert settled(measured, lambda _names: broken).layers == ()


def test_it_is_said_how_many_how_far_and_which() -> None:
    found = Sums(("a", "b"), ("c", "d"), ("d",), 0.0031, "c", 0.0021)
    assert str(found) == (
        "2 of 4 linear layers, by which a step is off by 0.21%; the farthest is 'c', off by 0.31%; in fp32: 'c', 'd'; "
        "not finite in fp16: 'd'"
    )
    many = Sums(("x",), ("a", "b", "c", "d", "e"))
    assert "in fp32: 'a', 'b', 'c' and 2 more" in str(many)


def test_a_layer_that_fails_later_joins_those_in_fp32() -> None:
    assert Sums(("a", "b"), ("c",), (), 0.1, "c", 0.2).without("a") == Sums(("b",), ("c", "a"), ("a",), 0.1, "c", 0.2)
