"""Diagnosis of what would run here and why, without running it: machine, backends, switches, plans. For `doctor` and
the node: in full, or as a summary on one screen (whether it runs, in which precision, what to fix)."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.accumulation import Accumulation, Switch, preview, without_fp16_accumulation
from ...precision.arch import EXPERIMENTAL, Architecture
from ...precision.machine import Machine, Obstacle, look, tried
from ...precision.policy import Component, Plan, PlanImpossible, Precision, Variant, choose
from ...trust.plain import for_json
from ..families.table import VARIANTS
from ..models.folder import family_of, open_model

if TYPE_CHECKING:
    from ..compile.backends import BackendChoice
    from ..run.handle import PipelineHandle
    from .vram_estimate import RunEstimate, Size

NOT_RUN = (
    "OneFlow's special builds and nexfort: neither has been available.",
    "torchao's quantised products on a card, and fp16 accumulation on a GeForce: ran on a CPU, or emulated.",
    "SageAttention, `--gpus` and `batch` on a card: run on a CPU, or with stand-ins.",
    "ROCm, Intel and Apple GPUs, and NVIDIA's other than one H200: what is known to work there was run on CPUs.",
    "Published weights of any model: all models here are small ones with their classes and random or computed weights.",
    "Windows and macOS: nothing assumes Linux, but nobody has run it there.",
)
WIDTH = 96  # characters of a line of text
NARROW, INDENT = 79, 14  # characters of a line of the summary, as in an 80-column terminal, and of its labels
_SETTERS = {"user": "set by you", "others": "set by ComfyUI or another pack", "default": "not set by anyone"}
_REASONS = [each.name for each in fields(Plan) if each.name.endswith(("reason", "source"))]


@dataclass(frozen=True)
class BackendState:
    name: str
    found: bool  # its requirements are met here; compiling a model may still fail
    reason: str


@dataclass(frozen=True)
class Backends:
    states: tuple[BackendState, ...]  # in the order in which 'auto' tries them
    chosen: str
    reason: str


@dataclass(frozen=True)
class ModelPlans:
    """The plan of every component of one model."""

    variant: str
    plans: tuple[Plan, ...]
    refused: Mapping[str, str] = field(default_factory=dict)  # component → why it cannot run in the precision
    folder: str = ""  # the model's name; "": the plans are for all models of the variant


@dataclass(frozen=True)
class Flag:
    """A command-line option that ComfyUI was started with."""

    given: str  # "--reserve-vram 2"
    effect: str  # on pipelines: "honoured", "mapped" or "no effect"
    here: str  # the effect in words, or what to choose instead
    native: str  # a remark for ComfyUI's own models under the NaN Guard; "": none


@dataclass(frozen=True)
class ComfyUI:
    version: str  # of the ComfyUI that this runs in; "": none
    tested: tuple[str, ...]  # ComfyUI versions that this release was tested in
    flags: tuple[Flag, ...] = ()  # about memory and precision
    plans_memory: bool = False  # Comfy Compiler is on, and plans the memory of ComfyUI's own models


@dataclass(frozen=True)
class Diagnosis:
    architecture: Architecture  # the plans' target
    here: bool  # whether that is this machine's, and not one that the user named
    machine: Machine
    precision: Precision
    accumulation: Accumulation
    backends: Backends
    on_failure: str = "rerun"  # the guard's policy: "rerun", "stop" or "off"
    exact_fp32: bool = False
    switches: tuple[Switch, ...] = ()
    models: tuple[ModelPlans, ...] = ()
    notes: tuple[str, ...] = ()
    missing: str = ""  # the package that the precision lacks here, and what to do; also one of the notes
    compile_cache: str = ""  # its folder and how full it is; "": not checked
    comfyui: ComfyUI | None = None  # None: not checked
    runs: tuple[RunEstimate, ...] = ()  # estimates for a card's memory, if the user asked for them
    not_run: tuple[str, ...] = NOT_RUN

    def as_dict(self) -> dict[str, Any]:
        return for_json(asdict(self))

    def text(self) -> str:
        """Return the diagnosis in words: plans and reasons, estimates, notes, machine, backends, switches."""
        sections = [
            *([_model_text(self, model) for model in self.models if model.folder] or [_variants_text(self)]),
            estimates_text(self.runs),
            _listed("Notes", self.notes),
            _machine_text(self),
            _flags_text(self),
            _backends_text(self),
            _listed("Never run by this project", self.not_run),
            _switches_text(self.switches),
        ]
        return "\n\n".join("\n".join(section) for section in sections if section)


def diagnose(
    model: Path | None = None,
    architecture: Architecture | None = None,  # plan for that one instead of the one here
    *,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
    memory: int | None = None,  # bytes of a card, for which to tell how each stage would run
    size: Size | None = None,  # of the result; None: the model's own
    selftests: Path | None = None,  # folder of the results of this card's self-test
) -> Diagnosis:
    """The plan for a model folder, or for all variants. Raises BadFolder where `model` is no folder of a known family,
    or is not whole; BadSize where none can be made."""
    machine = look()
    here = tried(lambda: _tested(machine.device, selftests), machine.architecture)
    machine = replace(machine, architecture=here)
    stored = open_model(model, family_of(model)) if model else None
    found = Diagnosis(architecture or here, architecture is None, machine, precision, accumulation, _backends(machine))
    variants, folder, notes = VARIANTS.values(), "", ()
    if stored:
        variants, folder, notes = [stored.variant], stored.name, stored.notes
    found = _planned(found, variants, folder, [gpu.architecture for gpu in machine.gpus], notes)
    if memory is None:
        return found
    from .vram_estimate import estimate_runs

    runs = estimate_runs(stored, found.architecture, [memory], size, precision, accumulation)
    return replace(found, runs=tuple(runs))


def diagnose_pipeline(handle: PipelineHandle) -> Diagnosis:
    """Return the diagnosis for a loaded pipeline, with its own precision, accumulation, backend and guard policy."""
    model, machine = handle.store.model, look(handle.store.placement.device)
    found = Diagnosis(
        handle.architecture,
        True,
        machine,
        handle.precision,
        handle.accumulation,
        _backends(machine, handle.backend),
        handle.policy.on_failure.value,
        handle.policy.exact_fp32,
    )
    at_load = (note for notes in handle.store.notes.values() for note in notes)
    return _planned(found, [model.variant], model.name, handle.beside, (*model.notes, *at_load))


def _planned(
    found: Diagnosis,
    variants: Iterable[Variant],
    folder: str,
    beside: Collection[Architecture],
    notes: Iterable[str] = (),
) -> Diagnosis:
    """Return the diagnosis with plans, switches and notes added. beside: architectures of all GPUs of the process."""
    switches = tried(lambda: preview(found.architecture, found.accumulation, beside if found.here else ()), ())
    models = tuple(_plans(found, variant, folder) for variant in variants)
    found = replace(found, models=models, switches=switches, missing=tried(lambda: _missing(found.precision), ""))
    sums = any(plan.fp16_sums for model in found.models for plan in model.plans)
    unknown = dict.fromkeys(str(each) for each in (found.architecture, *beside) if not each.known)
    said = [
        *found.machine.advice,
        *(f"{each}: not a known architecture, so the plan is the safe one" for each in unknown),
        *_attention_of(found.architecture),
        *([] if switches else ["The accumulation switches could not be read from PyTorch"]),
        *filter(None, (found.missing, tried(without_fp16_accumulation, "") if sums else "")),
        *(["The NaN Guard is off: steps are only checked"] if found.on_failure == "off" else []),
        *notes,
    ]
    return replace(found, notes=tuple(dict.fromkeys(said)))


def _plans(found: Diagnosis, variant: Variant, folder: str) -> ModelPlans:
    """Return the plans of a variant's components, and for each component without one the reason."""
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    for component in variant.components:
        try:
            plans.append(choose(found.architecture, variant, component, found.precision, found.accumulation))
        except PlanImpossible as error:  # noqa: PERF203
            refused[component.value] = str(error)
    return ModelPlans(variant.name, tuple(plans), refused, folder)


def _tested(device: str, selftests: Path | None) -> Architecture:
    import torch

    from ...precision.self_test import verified_architecture

    return verified_architecture(torch.device(device), selftests)


def _backends(machine: Machine, chosen: BackendChoice | None = None) -> Backends:
    """Return the states of all backends. chosen: the pipeline's backend; None: the one that 'auto' would choose."""

    def states() -> Iterator[BackendState]:
        import torch

        from ..compile.backends import backend_states

        for name, lacks in backend_states(torch.device(machine.device)).items():
            yield BackendState(name, not lacks, lacks or "found")

    found = (*tried(lambda: [*states()], []), BackendState("eager", True, "always available: nothing is compiled"))
    if chosen:
        return Backends(found, chosen.name, chosen.reason)
    first = next(state.name for state in found if state.found)
    return Backends(found, first, "auto: the first one available")


def _attention_of(architecture: Architecture) -> Iterator[str]:
    without = "all attention scores are kept in memory: 154 GB instead of 1.6 GB for a step of CogVideoX-2B"
    if architecture.fused_attention == "missing":
        yield f"{architecture}: PyTorch has no fused attention for it, so {without}. Choose smaller sizes"
    if architecture.attention_locked:
        yield (
            f"{architecture}: some releases of PyTorch have fused attention for it only with {EXPERIMENTAL}=1 in the "
            f"environment, which ComfyUI sets at its start. Otherwise {without}"
        )


def _missing(precision: Precision) -> str:
    from ...precision.quantised import lacking

    return lacking(precision.value) if precision.quantises else ""


def _model_text(found: Diagnosis, model: ModelPlans) -> list[str]:
    """Return one model's plan: a table with a row for each component, then the reasons."""
    title = f"Plan for {model.folder}: {model.variant} on {found.architecture}, precision {found.precision.value}"
    guard = "watch" if found.on_failure == "off" else found.on_failure
    table = [("", "dtype", "guard", "overflow protection", "half accumulation")]
    reasons: dict[tuple[str, str], list[str]] = {}
    for plan in model.plans:
        protected = "yes" if plan.overflow_protection else "no"
        row = (plan.dtype, guard if plan.guarded else "no", protected, plan.accumulation)
        table.append((plan.component.words, *row))
    for name, plan in product(_REASONS, model.plans):
        if why := getattr(plan, name):
            reasons.setdefault((name.replace("_", " "), why), []).append(plan.component.words)
    every = len(model.plans)
    told = [
        f"{about}: {why}" if len(parts) == every else f"{about} of {', '.join(parts)}: {why}"
        for (about, why), parts in reasons.items()
    ]
    told += ["reruns use full fp32 instead of TF32: exact_fp32 is on"] if found.exact_fp32 else []
    return [*wrapped(title), *(_table(table) if model.plans else []), *_listed("", told), *_refused([model])]


def _variants_text(found: Diagnosis) -> list[str]:
    """Return the plans of all variants: a table of dtypes, then each reason once."""
    table, told = [("", *(component.words for component in Component))], list[str]()
    for model in found.models:
        cells = {
            plan.component.value: f"{plan.dtype}{' protected' if plan.overflow_protection else ''}"
            for plan in model.plans
        }
        cells |= dict.fromkeys(model.refused, "refused")
        table.append((model.variant, *(cells.get(component.value, "–") for component in Component)))
        for plan in model.plans:
            told.append(plan.reason.replace(f"{model.variant} ", "the model ", 1))
            told += [f"fp16 sums: {plan.fp16_sums_reason}"] if plan.fp16_sums_reason else []
    guarded = " or ".join(sorted({plan.dtype for model in found.models for plan in model.plans if plan.guarded}))
    told.append(f"guarded: {f'everything that runs in {guarded}' if guarded else 'nothing'}")
    title = f"Plans on {found.architecture}, precision {found.precision.value} (no --model: all variants)"
    return [title, *_table(table), *_listed("", dict.fromkeys(told)), *_refused(found.models)]


def estimates_text(runs: Sequence[RunEstimate]) -> list[str]:
    if not runs:
        return []
    table: list[tuple[str, ...]] = [("", "size", "stage", "dtype", "runs", "weights", "activations", "peak")]
    for run in runs:
        for stage in run.stages:
            way = stage.way if stage.fits else "no room"
            sizes = (f"{n / 1e9:.1f}" for n in (stage.weights, stage.beside, stage.weights + stage.beside))
            table.append((run.variant, "×".join(map(str, run.size)), stage.stage, stage.dtype, way, *sizes))
    card = f"Estimates for a card of {runs[0].memory / 2**30:g} GiB with offload 'auto', in GB, not measured."
    free = f"{runs[0].has / 1e9:.1f} GB are free for the model. 'no room': the row is the cheapest option"
    return [*wrapped(f"{card} {free}"), *_table(table)]


def _machine_text(found: Diagnosis) -> list[str]:
    machine, comfyui, architecture = found.machine, found.comfyui, found.architecture
    packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in machine.packages.items())
    built_for = f"built for {machine.built_for}" if machine.torch_works else "cannot be imported"
    wrong = f", but {', '.join(architecture.failed)} FAILED" if architecture.failed else ""
    tested = f"verified on this card on {architecture.tested}{wrong}"
    if not architecture.tested:
        tested = "this card, driver and PyTorch are not verified: run `onediff-guard selftest`, or the Self-Test node"
    told = [
        f"self-test: {tested}" if found.here else f"plans are for {architecture}, as you chose",
        f"runs on {machine.device}, {machine.architecture}",
        *(
            f"GPU {gpu.index}: {gpu.name}, {gpu.architecture}{'' if gpu.memory is None else f', {gpu.memory:g} GiB'}"
            for gpu in machine.gpus
        ),
        *([] if machine.gpus else ["GPUs: none that PyTorch can use"]),
        f"driver: {machine.driver}",
        f"PyTorch {machine.torch}, {built_for}",
        f"packages: {packages}",
        f"system: {machine.system}, Python {machine.python}",
    ]
    if comfyui:
        told.append(
            f"ComfyUI: {comfyui.version or 'not found'}; this release was tested with {', '.join(comfyui.tested)}"
        )
    if comfyui and comfyui.plans_memory:
        told.append(
            "Comfy Compiler: on; steps of ComfyUI's own models that the NaN Guard recomputes or protects need memory "
            "beyond its plan"
        )
    return _listed("This machine", told)


def _flags_text(found: Diagnosis) -> list[str]:
    told = [
        f"{flag.given}: {flag.effect}: {flag.here}{f'; its own models: {flag.native}' if flag.native else ''}"
        for flag in (found.comfyui.flags if found.comfyui else ())
    ]
    return _listed("Effect of ComfyUI's flags on this pack's pipelines (all apply to ComfyUI's own models)", told)


def _backends_text(found: Diagnosis) -> list[str]:
    if not found.machine.torch_works:
        return _listed("Compile backends here", ["none: nothing runs without PyTorch"])
    told = [
        f"{state.name}{' (used)' if state.name == found.backends.chosen else ''}: {state.reason}"
        for state in found.backends.states
    ]
    told += [f"compile cache: {found.compile_cache}"] if found.compile_cache else []
    return _listed("Compile backends here ('auto' uses the first one available)", told)


def _switches_text(switches: Sequence[Switch]) -> list[str]:
    def why(switch: Switch) -> tuple[bool, str, str]:
        return switch.set_by != "user", _SETTERS.get(switch.set_by, f"set by {switch.set_by}"), switch.reason

    lines = ["Half-precision accumulation while a model runs"] if switches else []
    for (_, setter, reason), alike in groupby(sorted(switches, key=why), why):
        lines += _listed("", [f"{setter}: {reason}"])
        lines += [f"    {switch.name} = {switch.value}" for switch in alike]
    return lines


def _refused(models: Iterable[ModelPlans]) -> list[str]:
    return _listed("", dict.fromkeys(f"refused: {why}" for model in models for why in model.refused.values()))


def _listed(title: str, texts: Iterable[str]) -> list[str]:
    lines = [line for text in texts for line in wrapped(text, "  - ", "    ")]
    return [title, *lines] if lines and title else lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, row, widths))}".rstrip() for row in rows]


def wrapped(text: str, first: str = "", following: str = "", width: int = WIDTH) -> list[str]:
    indents: Any = {"initial_indent": first, "subsequent_indent": following}
    return textwrap.wrap(text, width, **indents, break_long_words=False, break_on_hyphens=False) or [first.rstrip()]


def summary(found: Diagnosis) -> str:
    """Return all problems, and short answers for the rest. `found.text()` has everything."""
    lines = [line for label, text in _rows(found) for line in wrapped(text, label.ljust(INDENT), " " * INDENT, NARROW)]
    return "\n".join([*lines, *(["", *estimates] if (estimates := estimates_text(found.runs)) else [])])


def _rows(found: Diagnosis) -> Iterator[tuple[str, str]]:
    refused = [*dict.fromkeys(why for model in found.models for why in model.refused.values())]
    yield "Can it run?", _verdict(found, refused)
    yield from _under("Precision", _precisions(found))
    of_one = (plan for model in found.models if model.folder for plan in model.plans)
    yield from _under("Why", [plan.reason for plan in of_one if plan.component == "denoiser"])
    if found.here:  # both are of this machine
        yield "Backend", _backend(found)
        yield "Self-test", _self_test(found.architecture)
    advice = [*found.machine.advice, *filter(None, [found.missing])]
    yield from _under("To fix", advice)
    yield from _under("Refused", refused)
    yield from _under("Note", [*(note for note in found.notes if note not in advice), *_against_advice(found)])
    yield from _under("Next", [*_next(found)])


def _under(label: str, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts with the label before the first one only."""
    yield from zip([label, *[""] * len(texts)], texts, strict=False)


def _verdict(found: Diagnosis, refused: Sequence[str]) -> str:
    machine = found.machine
    gpu = next((f"{gpu.name}, " for gpu in machine.gpus if machine.device == f"cuda:{gpu.index}"), "")
    device = f"{machine.device}: {gpu}" if machine.device.startswith("cuda") else ""
    where = f"on {device if found.here else ''}{found.architecture}"
    if any(isinstance(each, Obstacle) for each in machine.advice):
        return "No. First follow 'To fix'."
    if refused:
        return f"No, not {where} with precision '{found.precision.value}': see 'Refused'."
    if found.missing:
        return f"No, precision '{found.precision.value}' lacks a package: see 'To fix'."
    by = f", with PyTorch {machine.torch}" if found.here else ""
    but = " But see 'To fix'." if machine.advice else ""
    return f"Yes, {where}{by}{_no_room(found.runs)}.{but}"


def _no_room(runs: Sequence[RunEstimate]) -> str:
    """Return which models or stages do not fit the card that the user named; "" if all fit."""
    lacking = [run for run in runs if not all(stage.fits for stage in run.stages)]
    if not lacking:
        return ""
    card = f"on a card of {runs[0].memory / 2**30:g} GiB"
    if len(runs) > 1:
        return f", but not {len(lacking)} of {len(runs)} models {card}: see 'no room' below"
    return f", but not {card}: no room for {', '.join(stage.stage for stage in lacking[0].stages if not stage.fits)}"


def _precisions(found: Diagnosis) -> list[str]:
    """Return a line for each precision with the components that run in it; without a model, with the variants whose
    denoiser does."""
    alike: dict[str, list[str]] = {}
    for model in found.models:
        plans = [plan for plan in model.plans if model.folder or plan.component == "denoiser"]
        for plan in plans:
            alike.setdefault(_runs_in(plan), []).append(plan.component.words if model.folder else model.variant)
    return [f"{runs_in}: {', '.join(names)}" for runs_in, names in alike.items()]


def _runs_in(plan: Plan) -> str:
    quantised = f"{plan.quantised} and " if plan.quantised else ""
    protected = " with overflow protection" if plan.overflow_protection else ""
    guarded = "" if not plan.half else ", guarded" if plan.guarded else ", not guarded"
    return f"{quantised}{plan.dtype}{protected}{guarded}"


def _backend(found: Diagnosis) -> str:
    if not found.machine.torch_works:
        return "none: nothing runs without PyTorch"
    if len(found.backends.states) == 1:  # eager alone
        return "unknown: the compile backends could not be checked"
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
    pays = f"after {COMPILE_SECONDS:.0f} s of eager calls, or at once if the compile cache has it"
    return f"{choice.name} compiles the denoiser when it saves time: {pays}"


def _self_test(card: Architecture) -> str:
    if not card.tested:
        return "not run yet with this card, driver and PyTorch"
    wrong = f"{', '.join(card.failed)} failed, so 'auto' does not choose it" if card.failed else "passed"
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
        yield "Run `onediff-guard doctor` again afterwards."
    elif found.here and not found.architecture.tested:
        yield "`onediff-guard selftest` checks in a minute whether this card computes correctly."
    elif found.architecture.failed:
        yield "Update the driver or PyTorch, then run `onediff-guard selftest` again."
    yield "`onediff-guard doctor --verbose` shows the reasons, packages, backends and switches."
