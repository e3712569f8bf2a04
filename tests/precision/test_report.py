"""The exact wording of a run's report."""

from __future__ import annotations

from dataclasses import replace

import pytest
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision.accumulation import Switch
from comfyui_onediff_guard.precision.arch import named
from comfyui_onediff_guard.precision.overrides import ALL_LAYERS_SCALED
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import Rerun, RunReport, StepRecord

DENOISER, TEXT, DECODER = Component.DENOISER, Component.TEXT_ENCODER, Component.VAE_DECODE
FINE = StepRecord("denoiser", 0, 874.0, "fp16", "finite", 0.228, 3.211)
RERUN = Rerun("blocks.1.ff", 264_522.4, "'blocks.1' in fp32 from here on", 0.3, 12_000_000)
IN_FP32 = replace(FINE, dtype="fp32")
FAILED = replace(FINE, dtype="fp32", outcome="rerun", rerun=RERUN)
UNPLACED = replace(FAILED, rerun=replace(RERUN, module="", peak=None, action=""))
FITTING = replace(FAILED, rerun=replace(RERUN, peak=12.0))
AT_THE_END = replace(FAILED, rerun=replace(RERUN, peak=3.4e38))  # bf16 ends at 3.39e38
NAN, CLIPPED = replace(FINE, outcome="non-finite", largest=None), replace(FINE, outcome="saturated", largest=65504.0)
WRONG = "with NaN, infinite or clipped values"
PLAIN = "fp16 (plain), as you chose: no protection, for comparison"
BF16 = "bf16, as you chose, which sm75 (Turing) only emulates: slow, with more memory; 'auto' is faster here"
CHOOSE = f"{WRONG}: the result is broken; choose precision 'auto' or 'fp16'."
UNKNOWN = "only the NaN Guard finds the layer."
SWITCHED_OFF = f"{WRONG}: the result is broken; set the NaN Guard's on_failure to 'rerun'."
RECOMPUTED = "Recomputed in fp32; 'blocks.1' in fp32 from here on."
BEYOND = f"a value reached 264,522 (fp16 ends at 65,504) in blocks.1.ff. {RECOMPUTED}"
NOT_LOCATED = "on_failure 'rerun' also finds the layer."


def report(
    component: Component, *steps: StepRecord, request: Precision = Precision.FP16, card: str = "sm75", **more: object
) -> RunReport:
    plan = choose(named(card), VARIANTS["CogVideoX-2B"], component, request)
    numbered = [replace(step, step=number) for number, step in enumerate(steps)]
    return RunReport("CogVideoX-2B", "sm75 (Turing)", plan, steps=numbered, **more)


@pytest.mark.parametrize(
    ("of", "summary", "finding"),
    [
        (report(DENOISER, FINE), "fp16, as you chose; 1 step, fine.", ""),
        (report(DENOISER, FINE, FINE, protection=ALL_LAYERS_SCALED),
         "fp16, as you chose; overflow protection; 2 steps, all fine.", ""),
        (report(TEXT, FINE, FINE, protection=ALL_LAYERS_SCALED),
         "text encoder: fp16, as you chose; overflow protection; 2 prompts, all fine.", ""),
        (report(DECODER, FINE), "VAE decoder: fp16, as you chose; 1 part, fine.", ""),
        (report(DENOISER, FAILED, IN_FP32),
         "fp16, as you chose; the rest of the run in fp32; 2 steps, 1 recomputed in fp32.", f"Step 1: {BEYOND}"),
        (report(DENOISER, IN_FP32, request=Precision.FP32), "fp32, as you chose; 1 step, fine.", ""),
        (report(DENOISER, FAILED, FINE), "fp16, as you chose; 2 steps, 1 recomputed in fp32.",
         f"Step 1: {BEYOND}"),
        (report(DENOISER, FINE, UNPLACED), "fp16, as you chose; 2 steps, 1 recomputed in fp32.",
         "Step 2: NaN, infinite or clipped values. Recomputed in fp32."),
        (report(DECODER, FITTING), "VAE decoder: fp16, as you chose; 1 part, 1 recomputed in fp32.",
         f"Part 1: NaN, infinite or clipped values in blocks.1.ff. {RECOMPUTED}"),
        (report(DENOISER, AT_THE_END, request=Precision.BF16),
         f"{BF16}; 1 step, 1 recomputed in fp32.",
         f"Step 1: a value reached 3.4e+38 in blocks.1.ff. {RECOMPUTED}"),
        (report(DENOISER, FAILED, FINE, FAILED, FAILED, calls_per_step=2),
         "fp16, as you chose; 2 steps, 3 of 4 calls recomputed in fp32.",
         f"Step 1: {BEYOND}"),
        (report(DENOISER, FINE, NAN, request=Precision.FP16_PLAIN), f"{PLAIN}; 2 steps, 1 {CHOOSE}",
         f"Step 2: NaN or infinite values; {UNKNOWN}"),
        (report(DENOISER, FINE, NAN), f"fp16, as you chose; 2 steps, 1 {SWITCHED_OFF}",
         f"Step 2: NaN or infinite values; {NOT_LOCATED}"),
        (report(DENOISER, FINE, NAN, request=Precision.FP32), f"fp32, as you chose; 2 steps, 1 {SWITCHED_OFF}",
         f"Step 2: NaN or infinite values; {NOT_LOCATED}"),
        (report(TEXT, CLIPPED), f"text encoder: fp16, as you chose; 1 prompt, 1 {SWITCHED_OFF}",
         f"Prompt 1: clipped values; {NOT_LOCATED}"),
        (report(DENOISER, FAILED, NAN), f"fp16, as you chose; 2 steps, 1 recomputed in fp32, 1 {SWITCHED_OFF}",
         f"Step 1: {BEYOND}"),
        (report(DENOISER, FINE, NAN, in_calls=True, ended_by="ended by the NaN Guard at call 2"),
         f"fp16, as you chose; 2 calls, 1 {WRONG}; ended by the NaN Guard at call 2.",
         "Call 2: NaN or infinite values."),
        (report(DENOISER, ended_by="stopped at call 1"), "fp16, as you chose; stopped at call 1.", ""),
    ],
)  # fmt: skip
def test_summary_and_first_failure(of: RunReport, summary: str, finding: str) -> None:
    assert (of.summary(), of.finding()) == (summary, finding)


def test_summary_of_a_stage_that_computed_nothing() -> None:
    assert report(TEXT).summary() == "text encoder: fp16, as you chose; nothing new to compute."


@pytest.mark.parametrize(
    ("of", "lines"),
    [
        (report(DENOISER, FINE, replace(FINE, cached=True)),
         ["step 1 (t=874): fp16, OK, 0.23 s, largest value 3.21",
          "step 2 (t=874): fp16, OK, from the step cache, 0.23 s, largest value 3.21"]),
        (report(DENOISER, FAILED),
         ["step 1 (t=874): fp32, recomputed in fp32, 0.23 s, largest value 3.21",
          "    recomputed in fp32: 0.30 s; 12 MB more memory; first in 'blocks.1.ff', which reached 264,522; "
          "'blocks.1' in fp32 from here on"]),
        (report(DECODER, NAN), ["VAE decoder, part 1 (t=874): fp16, NaN or infinite, 0.23 s"]),
        (report(DENOISER, FINE, CLIPPED, calls_per_step=2),
         ["step 1, call 1 of 2 (t=874): fp16, OK, 0.23 s, largest value 3.21",
          "step 1, call 2 of 2 (t=874): fp16, clipped, 0.23 s, largest value 65,504"]),
    ],
)  # fmt: skip
def test_text_has_one_line_per_step(of: RunReport, lines: list[str]) -> None:
    assert "\n".join(lines) in of.text()


@pytest.mark.parametrize("asked", [Precision.FP16, Precision.BF16, Precision.INT8])
@pytest.mark.parametrize("protection", ["", ALL_LAYERS_SCALED])
def test_text_and_summary_agree_on_overflow_protection(asked: Precision, protection: str) -> None:
    on = bool(protection) or asked is Precision.FP16
    of = report(DENOISER, FINE, request=asked, protection=protection, card="sm86")
    assert of.text().count("\noverflow protection on") == on


def test_report_has_one_cell_per_step_and_a_fixed_text_order() -> None:
    steps = FINE, FAILED, FINE, FINE, replace(FINE, dtype="fp32"), CLIPPED, FAILED
    of = report(DENOISER, *steps, switches=(Switch("A_SWITCH", "1", "user", "exported"),))
    of.note("a note")
    assert of.as_dict()["cells"] == ["half", "rerun", "half", "half", "fp32", "failed", "rerun"]
    of.calls_per_step = 2
    assert of.cells() == ["rerun", "half", "failed", "rerun"]
    said = of.as_dict()["text"]
    parts = of.summary(), "overflow protection ", "step 1, call 1 of 2 (t=874): fp16, OK, ", "note: a note", "A_SW"
    places = [said.index(part) for part in parts]
    assert places == sorted(places)


@pytest.mark.parametrize(("steps", "said"), [((FINE,), ""), ((FAILED, FINE, FAILED), "2 recomputed in fp32")])
def test_recomputed_text_is_empty_without_reruns(steps: tuple[StepRecord, ...], said: str) -> None:
    assert report(DENOISER, *steps).recomputed() == said


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.0, "0"), (0.012345, "0.0123"), (3.211, "3.21"), (99.5, "99.5"), (99.99, "100"), (65504.0, "65,504"),
     (3.4e38, "3.4e+38")],
)  # fmt: skip
def test_largest_value_is_formatted_readably(value: float, said: str) -> None:
    assert report(DENOISER, replace(FINE, largest=value)).text().endswith(f" s, largest value {said}")
