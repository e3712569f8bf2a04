"""'auto' compiles where that pays: pure decisions, a clock that nobody reads, and what the sampler says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.compile import payoff
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, MEASURED, BackendChoice, CompileOptions
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR, TRITON
from comfyui_onediff_guard.pipelines.compile.payoff import COMPILE_GUESS, FASTER_GUESS, Measured, Taken, decide, learn
from comfyui_onediff_guard.precision.report import Rerun, StepRecord
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE

SIZE = "720x480, 49 guided"


def steps(*seconds: float) -> list[StepRecord]:
    return [StepRecord("denoiser", n, None, "fp16", "finite", each, 1.0) for n, each in enumerate(seconds)]


def run(known: Measured, calls: int, eager: float, compiled: float, compiling: float) -> tuple[bool, float]:
    """A run as the sampler makes it → whether it compiled, and its seconds."""
    hand = any(taken.compiled for taken in known.sizes.values())
    pays, _ = decide(known, SIZE, calls, at_hand=hand)
    each = compiled if pays else eager
    first = each + (compiling if pays and not hand else 0)
    learn(known, SIZE, steps(first, *[each] * (calls - 1)), compiled=pays, graphs=int(pays and not hand))
    return pays, first + each * (calls - 1)


def test_the_first_run_is_eager_and_says_why() -> None:
    assert decide(Measured(), SIZE, 50, at_hand=False) == (
        False,
        "the first run at this size, to measure what compiling would save",
    )


def test_what_is_compiled_already_is_used_at_once() -> None:
    assert decide(Measured(), SIZE, 2, at_hand=True) == (True, "compiled already")


def test_what_was_slower_compiled_is_left_alone() -> None:
    known = Measured(sizes={SIZE: Taken(eager=1.0, compiled=1.1)})
    assert decide(known, SIZE, 50, at_hand=True) == (False, "a step compiled took 1.1 s here, and eager 1 s")


def test_a_long_run_compiles_in_the_second_and_a_short_one_does_not() -> None:
    known = Measured()
    learn(known, SIZE, steps(*[2.0] * 50), compiled=False, graphs=0)
    pays, why = decide(known, SIZE, 200, at_hand=False)
    assert pays and why == "compiling takes about 60 s, and this run of 200 × 2 s brings what it saves to 1e+02 s"
    few = Measured()
    learn(few, SIZE, steps(*[0.1] * 4), compiled=False, graphs=0)
    assert not decide(few, SIZE, 4, at_hand=False)[0]
    assert not decide(known, "64x64, 1", 50, at_hand=False)[0], "another size is measured first"


@pytest.mark.parametrize("calls", [2, 4, 20, 50])
@pytest.mark.parametrize(("eager", "compiled"), [(0.05, 0.04), (1.0, 0.8), (2.0, 1.0), (10.0, 9.0), (1.0, 1.2)])
@pytest.mark.parametrize("compiling", [5.0, 60.0, 300.0])
def test_it_never_costs_much_more_than_knowing_all_beforehand(
    calls: int, eager: float, compiled: float, compiling: float
) -> None:
    """Over any number of runs: no more is lost than a compile, what it is guessed to be worth before anything compiled
    was measured, and a run on either side of the moment in which it pays."""
    known, total = Measured(), 0.0
    guessed = COMPILE_GUESS * max(eager - compiled, 0) / (FASTER_GUESS * eager)
    for runs in range(1, 200):
        total += run(known, calls, eager, compiled, compiling)[1]
        best = min(runs * calls * eager, runs * calls * compiled + compiling)
        assert total <= best + compiling + guessed + 2 * calls * max(eager, compiled)


def test_a_rerun_and_the_first_step_do_not_count_as_a_steps_time() -> None:
    known = Measured()
    slow = StepRecord("denoiser", 1, None, "fp32", "rerun", 5.0, 1.0, rerun=Rerun(*_rerun(4.0)))
    learn(known, SIZE, [*steps(9.0), slow, *steps(1.0, 1.0)], compiled=False, graphs=0)
    assert known.at(SIZE).eager == 1.0


def _rerun(seconds: float) -> tuple[Any, ...]:
    from dataclasses import fields

    return tuple(seconds if field.name == "seconds" else 1 for field in fields(Rerun))


def test_compiling_is_what_the_first_compiled_run_took_beyond_its_steps() -> None:
    known = Measured()
    learn(known, SIZE, steps(31.0, 1.0, 1.0, 1.0), compiled=True, graphs=2)
    assert (known.compile_seconds, known.at(SIZE).compiled) == (30.0, 1.0)
    learn(known, SIZE, steps(1.0, 1.0, 1.0, 1.0), compiled=True, graphs=0)
    assert known.compile_seconds == 30.0


@pytest.fixture
def sampled(model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Samples a small CogVideoX as a new process would, with a backend → the report."""
    folder = model_folder("2b")
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED", str(tmp_path / "compiled"))
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    encode, sample = (NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]() for name in ("EncodePrompt", "SampleCogVideoX"))

    def run(backend: str) -> str:
        monkeypatch.setattr(payoff, "_MEASURED", {})
        with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
            load = NODE_CLASS_MAPPINGS["OneDiffGuardLoadCogVideoX"]().load
            pipeline = load(folder.name, "fp32", backend, "none")[0]
            pipeline.store.compiled.clear()
            positive, negative = encode.encode(pipeline, "a boat", "", "inherit")["result"]
            size = {"width": 96, "height": 64, "frames": 9, "steps": 2}
            more = {"guidance_scale": 6.0, "seed": 1, "scheduler": "DDIM", "precision": "inherit"}
            return sample.sample(pipeline, positive=positive, negative=negative, **size, **more)["result"][1]

    return run


def test_the_sampler_compiles_when_it_pays(
    sampled: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "COMPILE_GUESS", 1e-9)
    first, second = sampled("auto"), sampled("auto")
    assert "the first run at this size, to measure what compiling would save" in first
    assert "inductor" in second and "brings what it saves to" in second
    kept = next((tmp_path / "compiled").glob("*.pace.json"))
    assert json.loads(kept.read_text())["compile_seconds"] > 0
    monkeypatch.setattr(payoff, "COMPILE_GUESS", 1e9)
    kept.unlink()
    assert "compiled already" in sampled("auto"), "by an earlier process"
    assert "asked for: not compiled" in sampled("eager")


@pytest.mark.parametrize(
    "found", ['{"sizes": {"96x64, 9 guided": {"eager": "often"}}}', "[]", "{", '{"sizes": {"a": 1}}']
)
def test_figures_that_cannot_be_read_are_measured_anew(
    sampled: Callable[[str], str], tmp_path: Path, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampled("auto")
    kept = next((tmp_path / "compiled").glob("*.pace.json"))
    kept.write_text(found)
    assert "the first run at this size" in sampled("auto")
    assert f"'{kept}' is left alone, and measured anew: " in caplog.text
    assert json.loads(kept.read_text())["sizes"]["96x64, 9 guided"]["eager"] > 0


def test_a_folder_that_cannot_be_written_to_fails_no_run(
    sampled: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "compiled").write_text("no folder")
    assert "the first run at this size" in sampled("auto")
    assert "what this run took could not be kept" in caplog.text


def test_where_nothing_is_kept_this_is_not_either(
    sampled: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, "0")
    assert "the first run at this size" in sampled("auto")
    assert not (tmp_path / "compiled").exists()


def test_sizes_that_were_not_met_for_long_are_measured_anew() -> None:
    known = Measured()
    for width in range(100):
        learn(known, f"{width}", steps(1.0, 1.0), compiled=False, graphs=0)
    assert len(known.sizes) == 64 and "99" in known.sizes and "0" not in known.sizes


def test_a_backend_that_was_asked_for_is_left_alone() -> None:
    from comfyui_onediff_guard.pipelines.compile.payoff import where_it_pays

    class Handle:
        backend = BackendChoice("inductor", "asked for")

    handle: Any = Handle()
    assert where_it_pays(handle, None, None) is handle  # pyright: ignore[reportArgumentType]
    handle.backend = BackendChoice(EAGER, "auto: no inductor", automatic=True)
    assert where_it_pays(handle, None, None) is handle  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("asked", "has", "at_hand"),
    [
        (MEASURED, "math", True),  # whichever kernel was chosen
        (MEASURED, "", True),
        ("math", "math", True),
        ("math", "", False),
        ("", "math", False),
    ],
)
def test_what_is_compiled_with_a_measured_kernel_is_at_hand_where_that_is_asked_for(
    asked: str, has: str, at_hand: bool
) -> None:
    handle: Any = SimpleNamespace(
        backend=BackendChoice("inductor", "auto: first choice", automatic=True),
        compile_options=CompileOptions(attention=asked),
        compiled=None,  # nothing is kept on disk
        family=SimpleNamespace(denoisers=("transformer",)),
        plan=lambda *_: SimpleNamespace(numerics="fp16"),
    )
    known = ("transformer", (), handle.backend.asked_for, CompileOptions(attention=has), "fp16", True)
    handle.store = SimpleNamespace(compiled={known: object()})
    assert payoff._at_hand(handle, None, "target") is at_hand
