"""A diagnosis on one screen: whether it runs, on what, in which precision, and what to do where something is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...precision.machine import Obstacle
from .diagnosis import estimates_text, wrapped

if TYPE_CHECKING:
    from ...precision.arch import Architecture
    from ...precision.policy import Plan
    from .diagnosis import Diagnosis
    from .vram_estimate import RunEstimate

WIDTH, INDENT = 79, 14  # of a terminal that nobody has widened; of what stands behind the labels


def summary(found: Diagnosis) -> str:
    """All that is wrong, and of the rest the answers alone. `found.text()` has the rest."""
    lines = [line for label, text in _rows(found) for line in wrapped(text, label.ljust(INDENT), " " * INDENT, WIDTH)]
    return "\n".join([*lines, *(["", *estimates] if (estimates := estimates_text(found.runs)) else [])])


def _rows(found: Diagnosis) -> Iterator[tuple[str, str]]:
    refused = [*dict.fromkeys(why for model in found.models for why in model.refused.values())]
    yield "Can it run?", _verdict(found, refused)
    yield from _under("Precision", _precisions(found))
    yield from _under("Why", _why(found))
    if found.here:  # both are of this machine
        yield "Backend", _backend(found)
        yield "Self-test", _self_test(found.architecture)
    advice = [*found.machine.advice, *filter(None, [found.missing])]
    yield from _under("To fix", advice)
    yield from _under("Refused", refused)
    yield from _under("Note", [*(note for note in found.notes if note not in advice), *_against_advice(found)])
    yield from _under("Next", [*_next(found)])


def _under(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The label once, before the first."""
    yield from zip([label, *[""] * len(texts)], texts, strict=False)


def _verdict(found: Diagnosis, refused: Sequence[str]) -> str:
    machine = found.machine
    gpu = next((f"{gpu.name}, " for gpu in machine.gpus if machine.device == f"cuda:{gpu.index}"), "")
    device = f"{machine.device}: {gpu}" if machine.device.startswith("cuda") else ""
    where = f"on {device if found.here else ''}{found.architecture}"
    if any(isinstance(each, Obstacle) for each in machine.advice):
        return "No. First do what 'To fix' says."
    if refused:
        return f"No, not {where} with precision '{found.precision.value}': see 'Refused'."
    if found.missing:
        return f"No, precision '{found.precision.value}' lacks a package: see 'To fix'."
    by = f", with PyTorch {machine.torch}" if found.here else ""
    but = " But see 'To fix'." if machine.advice else ""
    return f"Yes, {where}{by}{_no_room(found.runs)}.{but}"


def _no_room(runs: Sequence[RunEstimate]) -> str:
    """Say what has no room on the card of so much memory that was asked for."""
    lacking = [run for run in runs if not all(stage.fits for stage in run.stages)]
    if not lacking:
        return ""
    card = f"on a card of {runs[0].memory / 2**30:g} GiB"
    if len(runs) > 1:
        return f", but not {len(lacking)} of {len(runs)} models {card}: see 'no room' below"
    return f", but not {card}: no room for {', '.join(stage.stage for stage in lacking[0].stages if not stage.fits)}"


def _precisions(found: Diagnosis) -> list[str]:
    """Each precision once, before the parts of the model that run in it; without a model, before the variants whose
    denoiser does."""
    alike: dict[str, list[str]] = {}
    for model in found.models:
        plans = [plan for plan in model.plans if model.folder or plan.component == "denoiser"]
        for plan in plans:
            alike.setdefault(_runs_in(plan), []).append(plan.component.words if model.folder else model.variant)
    return [f"{runs_in}: {', '.join(names)}" for runs_in, names in alike.items()]


def _why(found: Diagnosis) -> list[str]:
    """The reason for the denoiser's precision, of one model."""
    return [
        plan.reason for model in found.models if model.folder for plan in model.plans if plan.component == "denoiser"
    ]


def _runs_in(plan: Plan) -> str:
    quantised = f"{plan.quantised} and " if plan.quantised else ""
    protected = " with overflow protection" if plan.overflow_protection else ""
    guarded = "" if not plan.half else ", guarded" if plan.guarded else ", not guarded"
    return f"{quantised}{plan.dtype}{protected}{guarded}"


def _backend(found: Diagnosis) -> str:
    if not found.machine.torch_works:
        return "none: nothing runs without PyTorch"
    if len(found.backends.states) == 1:  # eager, which needs nothing
        return "unknown: no compile backend could be asked what it needs"
    lacks = [state.reason for state in found.backends.states if not state.found]
    if found.backends.chosen == "eager":
        return f"eager, so nothing is compiled: {lacks[-1] if lacks else found.backends.reason}"
    from ..compile.auto_compile import COMPILE_SECONDS
    from ..compile.backends import BackendChoice, for_dtype

    plans = [plan for model in found.models for plan in model.plans if plan.component == "denoiser"]
    choice = BackendChoice(found.backends.chosen, found.backends.reason, automatic=True)
    for plan in plans:
        if (taken := for_dtype(choice, found.architecture, plan.dtype)) is not choice:
            return f"eager, so nothing is compiled: {taken.reason.removeprefix('auto: ')}"
    if any(plan.quantised for plan in plans):
        return f"{choice.name} compiles the denoiser in its first run, since it is quantised"
    pays = f"once its eager calls have taken {COMPILE_SECONDS:.0f} s, or at once where the compile cache has it"
    return f"{choice.name}, which compiles the denoiser when that pays: {pays}"


def _self_test(card: Architecture) -> str:
    if not card.tested:
        return "not run yet with this card, driver and PyTorch"
    wrong = f"{', '.join(card.failed)} came out WRONG, so 'auto' does not choose it" if card.failed else "passed"
    return f"{wrong} ({card.tested})"


def _against_advice(found: Diagnosis) -> Iterator[str]:
    for switch in found.switches:
        if switch.set_against_advice:
            yield f"{switch.name} = {switch.value}: {switch.reason}"
    for flag in found.comfyui.flags if found.comfyui else ():
        if flag.effect == "no effect":
            yield f"ComfyUI's {flag.given} has no effect on this pack's pipelines: {flag.here}"


def _next(found: Diagnosis) -> Iterator[str]:
    if found.machine.advice or found.missing:
        yield "Run `onediff-guard doctor` again once that is done."
    elif found.here and not found.architecture.tested:
        yield "`onediff-guard selftest` checks in a minute whether this card computes right."
    elif found.architecture.failed:
        yield "Update the driver or PyTorch, then run `onediff-guard selftest` again."
    yield "`onediff-guard doctor --verbose` tells the reasons, packages, backends and switches."
