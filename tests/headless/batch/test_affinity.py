"""Which job a free worker takes: decided on plain data."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from comfyui_onediff_guard.headless.batch.affinity import Landing, Warmth, choose, landing, warmth_of
from comfyui_onediff_guard.headless.workflow.graph import from_api

A, A2, B, C = Warmth("a", "p", "1"), Warmth("a", "p", "2"), Warmth("b", "p", "1"), Warmth("c", "p", "1")


@pytest.mark.parametrize(
    ("window", "own", "owners", "patience", "expected"),
    [
        ([], [], {}, 8, None),
        ([A, B], [], {}, 8, 0),  # nobody is warm: the oldest
        ([A, B, B], [B], {A: 1, B: 1}, 8, 1),  # the oldest of those that it is warm for
        ([A, B], [C], {A: 1, C: 1}, 8, 1),  # one for which nobody is warm
        ([A, B, A2], [A, C], {A: 1, C: 1}, 8, 0),
        ([B, A2], [A], {A: 1}, 8, 1),  # of these, one whose model is loaded here
        ([A] * 7, [], {A: 1}, 8, None),  # sooner over where they wait for the one that is warm
        ([A] * 8, [], {A: 1}, 8, 0),
        ([A] * 8, [], {A: 2}, 8, None),  # two are warm
        ([A] * 8 + [B] * 9, [], {A: 1, B: 1}, 8, 8),  # where most wait
        ([A] * 8 + [A2] * 8, [Warmth("a", "p", "9")], {A: 1, A2: 1}, 8, 0),
        ([A], [], {A: 0}, 8, 0),  # whoever was warm is gone
    ],
)
def test_what_a_free_worker_takes(window: Any, own: Any, owners: Any, patience: float, expected: int | None) -> None:
    assert choose(window, own, owners, patience) == expected


def test_how_a_job_lands() -> None:
    assert landing(A, [A, B]) is Landing.WARM
    assert landing(A, [A2]) is Landing.LOADED
    assert landing(A, [B, Warmth("a", "other", "1")]) is Landing.COLD


def graph(**changes: Any) -> Any:
    inputs = {
        "1": {"model": "m", "precision": "bf16", "backend": "auto"},
        "2": {"pipeline": ["1", 0], "width": 64, "height": 64, "frames": 9, "steps": 20, "seed": 1, "scheduler": "x"},
        "3": {"text": "a boat", "clip": ["1", 0], "sampler_name": "euler", "ckpt_name": "c", "length": 8},
    }
    for name, value in changes.items():
        next(node for node in inputs.values() if name in node)[name] = value
    return from_api({number: {"class_type": f"N{number}", "inputs": node} for number, node in inputs.items()})


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"seed": 2, "steps": 3, "text": "a cat", "sampler_name": "dpm"}, ()),
        ({"model": "other"}, ("model",)),
        ({"ckpt_name": "other"}, ("model",)),
        ({"precision": "fp16"}, ("plan",)),
        ({"backend": "eager"}, ("plan",)),
        ({"width": 128}, ("shape",)),
        ({"length": 16}, ("shape",)),
        ({"frames": 17, "model": "other"}, ("model", "shape")),
    ],
)
def test_what_a_workflow_has_to_be_warm_for(changes: dict[str, Any], differs: tuple[str, ...]) -> None:
    before, after = warmth_of(graph()), warmth_of(graph(**changes))
    assert (
        tuple(name for name in ("model", "plan", "shape") if getattr(before, name) != getattr(after, name)) == differs
    )


@pytest.mark.parametrize("kinds", [4, 6, 12])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_a_mixed_stream_lands_warm(kinds: int, workers: int) -> None:
    """On paper: workers that hold one model, in turns, on a shuffled stream of 50 jobs a kind."""
    drawn = random.Random(kinds * workers)
    stream = [Warmth(str(number % kinds), "", "") for number in range(50 * kinds)]
    drawn.shuffle(stream)
    warm: list[Warmth | None] = [None] * workers
    landed: Counter[Landing] = Counter()
    window = stream[:]
    while window:
        for worker in range(workers):
            owners = Counter(each for each in warm if each)
            own = [each] if (each := warm[worker]) else []
            place = choose(window[:256], own, owners, 8)
            if place is None:
                continue
            job = window.pop(place)
            landed[landing(job, own)] += 1
            warm[worker] = job
    assert landed[Landing.WARM] >= 0.95 * len(stream)


def test_what_is_still_to_come_counts_beyond_the_window() -> None:
    """Else 1,000 workers, on jobs of one kind, would wait for those few that are warm for it."""
    window, owners = [A] * 8, Counter({A: 100})
    assert choose(window, [], owners, 8) is None
    assert choose(window, [], owners, 8, ahead=99) is None
    assert choose(window, [], owners, 8, ahead=100) == 0
