"""A diagnosis for people: aligned, at most 96 columns, each reason once."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ...precision.arch import Architecture
from ...precision.policy import Component, Plan
from .diagnosis import Diagnosis, ModelPlans

if TYPE_CHECKING:
    from .vram_estimate import RunEstimate

WIDTH = 96
NONE = "–"
_SETTERS = {
    "user": "set by you",
    "onediff": "set by OneDiff",
    "others": "set by ComfyUI or another pack",
    "default": "not set by anyone",
}


def in_words(diagnosis: Diagnosis) -> str:
    """Say what will run and why, then what is to be noted, where it runs, and last the switches."""
    if any(model.folder for model in diagnosis.models):
        sections = [_plan(diagnosis, model) for model in diagnosis.models]
    else:
        sections = [_all_plans(diagnosis)]
    sections += [_runs(diagnosis.runs), _listed("Notes", diagnosis.notes)]
    sections += [_machine(diagnosis), _flags(diagnosis), _backends(diagnosis)]
    sections += [_listed("Never run by this project", diagnosis.not_run), _switches(diagnosis)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _machine(diagnosis: Diagnosis) -> list[str]:
    machine = diagnosis.machine
    gpus = [
        f"{gpu.index}: {gpu.name}, {gpu.architecture}{'' if gpu.memory is None else f', {gpu.memory:g} GiB'}"
        for gpu in machine.gpus
    ]
    installed = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    lacking = ", ".join(name for name, version in machine.packages.items() if not version)
    asked = [] if diagnosis.here else [("plans are for", f"{diagnosis.architecture}, which was asked for")]
    runs_on = f"{machine.device}, {machine.architecture}"
    built_for = f"built for {machine.built_for}" if machine.torch_works else "cannot be imported"
    return [
        "This machine",
        *_rows(
            [
                *asked,
                ("runs on", str(machine.architecture) if machine.device == machine.architecture.name else runs_on),
                *_rows_under("GPUs", gpus or ["none that PyTorch can use"]),
                ("driver", machine.driver),
                *([("self-test", _self_test(diagnosis.architecture))] if diagnosis.here else []),
                ("PyTorch", f"{machine.torch}, {built_for}"),
                ("packages", f"{installed or 'none'}; not installed: {lacking or 'none'}"),
                ("system", f"{machine.system}, Python {machine.python}"),
                *_comfyui(diagnosis),
            ]
        ),
    ]


def _self_test(architecture: Architecture) -> str:
    if not architecture.tested:
        return "this card, driver and PyTorch are not verified: run `onediff-guard selftest`, or the Self-Test node"
    if not architecture.failed:
        return f"verified on this card on {architecture.tested}"
    return f"on {architecture.tested}, {', '.join(architecture.failed)} came out WRONG on this card"


def _comfyui(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    if not (comfyui := diagnosis.comfyui):
        return []
    *others, last = comfyui.tested
    here = comfyui.version or "none here"
    return [("ComfyUI", f"{here}; this release was tested in {', '.join(others)} and {last}")]


def _flags(diagnosis: Diagnosis) -> list[str]:
    flags = diagnosis.comfyui.flags if diagnosis.comfyui else ()
    rows = [
        row
        for flag in flags
        for row in _rows_under(
            flag.given, [f"{flag.effect}: {flag.here}", *([f"its own models: {flag.native}"] if flag.native else [])]
        )
    ]
    return ["ComfyUI's flags in this pack's pipelines (its own models have all of them)", *_rows(rows)] if rows else []


def _backends(diagnosis: Diagnosis) -> list[str]:
    backends = diagnosis.backends
    if not diagnosis.machine.torch_works:
        return ["Compile backends here", "  none: nothing runs without PyTorch"]
    rows = [
        (f"{'*' if state.name == backends.chosen else ' '} {state.name}", state.reason) for state in backends.states
    ]
    if diagnosis.compile_cache:
        rows.append(("compile cache", diagnosis.compile_cache))
    return ["Compile backends here (* is used; 'auto' takes the first that is found)", *_rows(rows)]


def _switches(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.switches:
        return []
    alike: dict[tuple[str, str], list[str]] = {}
    for switch in sorted(diagnosis.switches, key=lambda switch: switch.set_by != "user"):
        alike.setdefault((switch.set_by, switch.reason), []).append(f"{switch.name} = {switch.value}")
    lines = ["Half-precision accumulation, and what else OneDiff sets: as it stands while a model runs"]
    for (set_by, reason), names in alike.items():
        who = _SETTERS.get(set_by, f"set by {set_by}")
        lines += _wrapped(f"{who}: {reason}", "  ", "    ")
        lines += [f"    {name}" for name in names]
    return lines


def _plan(diagnosis: Diagnosis, model: ModelPlans) -> list[str]:
    """One model: a row for each component, then the reasons."""
    lines = _wrapped(
        f"Plan for {model.folder}: {model.variant} on {diagnosis.architecture}, precision {diagnosis.precision.value}"
    )
    guard = "watch" if diagnosis.on_failure == "off" else diagnosis.on_failure
    if model.plans:
        rows = [
            (
                plan.component.words,
                plan.dtype,
                guard if plan.guarded else "no",
                _wide(plan),
                plan.accumulation,
            )
            for plan in model.plans
        ]
        lines += _table(("", "dtype", "guard", "wide", "half accumulation"), rows)
        lines += [
            "",
            *_rows(
                [
                    *_reasons("dtype", model.plans, lambda plan: plan.reason),
                    *_reasons("guard", model.plans, lambda plan: plan.guard_reason),
                    *([("", "reruns in plain fp32, not in TF32: strict is on")] if diagnosis.strict else []),
                    *_reasons("wide", _widened(model.plans), lambda plan: plan.wide_reason),
                    *_reasons("accumulation", model.plans, lambda plan: plan.accumulation_reason),
                    *_reasons("fp16 sums", _asked_for_sums(model.plans), lambda plan: plan.fp16_sums_reason),
                    *_reasons("sources", model.plans, lambda plan: plan.source),
                    *_reasons("", model.plans, lambda plan: plan.accumulation_source),
                    *_rows_under("stored as", [f"{name} {stored}" for name, stored in model.stored.items()]),
                ]
            ),
        ]
    return lines + _refused([model])


def _all_plans(diagnosis: Diagnosis) -> list[str]:
    """All variants: dtypes in a table, then each reason once, with those it holds for."""
    lines = [f"Plans on {diagnosis.architecture}, precision {diagnosis.precision.value} (no --model: all variants)"]
    rows = []
    reasons: dict[str, dict[str, None]] = {}
    for model in diagnosis.models:
        cells = {plan.component: f"{plan.dtype}{' wide' if plan.wide else ''}" for plan in model.plans}
        cells |= {Component(name): "refused" for name in model.refused}
        rows.append((model.variant, *(cells.get(component, NONE) for component in Component)))
        own_name = re.compile(rf"(?<![\w-]){re.escape(model.variant)}(?![\w'.-])")
        for plan in model.plans:
            reason = own_name.sub("the model", plan.reason)
            reasons.setdefault(reason, {})[model.variant] = None
            if plan.fp16_sums_reason:
                reasons.setdefault(f"fp16 sums: {plan.fp16_sums_reason}", {})[model.variant] = None
    lines += _table(("", *(component.words for component in Component)), rows)
    guarded = sorted({plan.dtype for model in diagnosis.models for plan in model.plans if plan.guarded})
    lines += ["", f"  guarded: {'whatever runs in ' if guarded else 'nothing'}{' or '.join(guarded)}", ""]
    for reason, models in reasons.items():
        lines += _wrapped(reason, "  ", "    ")
        lines += _wrapped(", ".join(models), "    ", "    ")
    return lines + _refused(diagnosis.models)


def _runs(runs: Sequence[RunEstimate]) -> list[str]:
    if not runs:
        return []
    memory, has = runs[0].memory, runs[0].has
    rows = []
    for run in runs:
        width, height, frames = run.size
        said = [run.variant, f"{width}×{height}{f', {frames} frames' if frames > 1 else ''}"]
        for number, stage in enumerate(run.stages):
            begins = said[number] if number < len(said) else ""
            sizes = (stage.weights, stage.beside, stage.weights + stage.beside)
            rows.append(
                (begins, stage.stage, stage.dtype, stage.way if stage.fits else "no room", *map(_gigabytes, sizes))
            )
    little = any(not stage.fits for run in runs for stage in run.stages)
    return [
        *_wrapped(
            f"What would run on a card of {memory / 2**30:g} GiB with offload 'auto', in GB: counted, not run. "
            f"{has / 1e9:.1f} GB of it are taken to be free for the model"
            f"{'; where there is no room, the least that the stage would take' if little else ''}"
        ),
        *_table(("", "stage", "dtype", "runs", "weights", "beside", "peak"), rows),
    ]


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f}"


def _refused(models: Iterable[ModelPlans]) -> list[str]:
    why = dict.fromkeys(why for model in models for why in model.refused.values())
    return [line for reason in why for line in _wrapped(f"refused: {reason}", "  ", "    ")]


def _wide(plan: Plan) -> str:
    if not plan.wide:
        return "no"
    return "its stream" if plan.component is Component.DENOISER else "every layer"


def _asked_for_sums(plans: Iterable[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.fp16_sums_reason]


def _widened(plans: Iterable[Plan]) -> list[Plan]:
    """Those of which it is told why; the denoiser's, why not."""
    return [plan for plan in plans if plan.wide or plan.component is Component.DENOISER]


def _reasons(title: str, plans: Sequence[Plan], reason: Callable[[Plan], str]) -> list[tuple[str, str]]:
    """Each reason once; with the components that it holds for, where there are several."""
    alike: dict[str, list[str]] = {}
    for plan in plans:
        alike.setdefault(reason(plan), []).append(plan.component.words)
    if len(alike) == 1:
        return [(title, next(iter(alike)))]
    return _rows_under(title, [f"{', '.join(components)}: {why}" for why, components in alike.items()])


def _rows_under(title: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    return [(title if i == 0 else "", text) for i, text in enumerate(texts)]


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    wrapped = [line for text in lines for line in _wrapped(text, "  - ", "    ")]
    return [title, *wrapped] if wrapped else []


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns; the second is wrapped under itself."""
    width = max(len(key) for key, _ in rows)
    return [line for key, text in rows for line in _wrapped(text, f"  {key:<{width}}  ", " " * (width + 4))]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell; a title may take two lines."""
    columns = [*zip(*rows, strict=True)]
    widths = []
    headings: list[list[str]] = []
    for title, cells in zip(titles, columns, strict=True):
        widths.append(max(*(len(word) for word in (title or " ").split(" ")), *(len(cell) for cell in cells)))
        headings.append(textwrap.wrap(title, widths[-1], break_long_words=False) or [""])
    depth = max(map(len, headings))
    padded = [[""] * (depth - len(heading)) + heading for heading in headings]
    lines = [*zip(*padded, strict=True), *rows]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def _wrapped(text: str, first: str = "", following: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]
