"""What would run here and why, without running it: machine, backends, switches, plans. For `doctor` and the node."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.accumulation import Accumulation, Switch, preview, without_fp16_accumulation
from ...precision.arch import EXPERIMENTAL, Architecture
from ...precision.machine import Machine, first_line, look, tried
from ...precision.overrides import NOTHING
from ...precision.policy import Component, Plan, PlanImpossible, Precision, Variant, choose
from ...trust.plain import for_json
from ..families.table import VARIANTS
from ..models.on_disk import StoredModel
from ..models.recognised import family_of, open_model

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
WIDTH = 96  # of a line of text
_SETTERS = {
    "user": "set by you",
    "others": "set by ComfyUI or another pack",
    "default": "not set by anyone",
}


@dataclass(frozen=True)
class BackendState:
    name: str
    found: bool  # what it needs is here; whether it compiles a model shows when it does
    reason: str


@dataclass(frozen=True)
class Backends:
    states: tuple[BackendState, ...]  # in the order in which 'auto' tries them
    chosen: str
    reason: str
    automatic: bool


@dataclass(frozen=True)
class ModelPlans:
    """The plan of every component of one model."""

    variant: str
    plans: tuple[Plan, ...]
    refused: Mapping[str, str] = field(default_factory=dict)  # component → why it cannot run like that
    folder: str = ""  # its name; empty where it stands for all models of the variant
    stored: Mapping[str, str] = field(default_factory=dict)  # folder of a component → "BF16, 11.1 GB"


@dataclass(frozen=True)
class Flag:
    """What ComfyUI was started with."""

    given: str  # "--reserve-vram 2"
    effect: str  # on pipelines: "honoured", "mapped" or "no effect"
    here: str  # what that comes to, or what to choose instead
    native: str  # for ComfyUI's own models under the NaN Guard; "" where nothing is to be added


@dataclass(frozen=True)
class ComfyUI:
    version: str  # of the one that this runs in, "" where it runs in none
    tested: tuple[str, ...]  # versions that this release was tested in
    flags: tuple[Flag, ...] = ()  # about memory and precision


@dataclass(frozen=True)
class Diagnosis:
    architecture: Architecture  # that the plans are for
    here: bool  # it is the one that pipelines run on here, and not one that was asked for
    machine: Machine
    precision: Precision
    accumulation: Accumulation
    on_failure: str  # the guard's policy: "rerun", "stop" or "off"
    strict: bool
    backends: Backends
    switches: tuple[Switch, ...]
    models: tuple[ModelPlans, ...]
    notes: tuple[str, ...]
    compile_cache: str = ""  # where it is and how full; empty where nobody said
    comfyui: ComfyUI | None = None  # None where nobody looked
    runs: tuple[RunEstimate, ...] = ()  # on a card of so much memory, where one was asked for
    not_run: tuple[str, ...] = NOT_RUN

    def as_dict(self) -> dict[str, Any]:
        return for_json(asdict(self))

    def text(self) -> str:
        """For people: what will run and why, then what is to be noted, where it runs, and last the switches."""
        named = [model for model in self.models if model.folder]
        sections = [_model_text(self, model) for model in named] or [_variants_text(self)]
        sections += [
            _estimates_text(self.runs),
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
    architecture: Architecture | None = None,
    *,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
    memory: int | None = None,
    size: Size | None = None,
    selftests: Path | None = None,
) -> Diagnosis:
    """The plan for a model folder, or for all variants.

    architecture: plan for that one instead of the one here.
    memory: bytes of a card, for which to tell how each stage would run. size: of the result; None: the model's own.
    selftests: folder of the results of this card's self-test.

    Raises BadFolder where `model` is no folder of a known family, or is not whole; BadSize where none can be made.
    """
    machine = look()
    machine = replace(machine, architecture=tried(lambda: _tested(machine.device, selftests), machine.architecture))
    chosen = architecture or machine.architecture
    stored = open_model(model, family_of(model)) if model else None
    variants = [stored.variant] if stored else VARIANTS.values()
    models = tuple(_plans(variant, chosen, precision, accumulation, stored) for variant in variants)
    notes = _about(stored) if stored else ()
    diagnosis = _put_together(machine, architecture, precision, accumulation, models, notes)
    if memory is None:
        return diagnosis
    from .vram_estimate import estimate_runs

    return replace(diagnosis, runs=tuple(estimate_runs(stored, chosen, [memory], size, precision, accumulation)))


def diagnose_pipeline(handle: PipelineHandle, architecture: Architecture | None = None) -> Diagnosis:
    """The same for a pipeline on a wire, with its own precision, accumulation, backend and guard policy."""
    model = handle.store.model
    models = (_plans(model.variant, architecture or handle.architecture, handle.precision, handle.accumulation, model),)
    found_at_load = (note for notes in handle.store.notes.values() for note in notes)
    notes = (*_about(model), *found_at_load, *_learned(handle))
    machine = look(handle.store.placement.device)
    return _put_together(machine, architecture, handle.precision, handle.accumulation, models, notes, handle)


def _put_together(
    machine: Machine,
    asked: Architecture | None,
    precision: Precision,
    accumulation: Accumulation,
    models: tuple[ModelPlans, ...],
    notes: Iterable[str],
    handle: PipelineHandle | None = None,
) -> Diagnosis:
    chosen = asked or (handle.architecture if handle else machine.architecture)
    beside = handle.beside if handle else tuple(gpu.architecture for gpu in machine.gpus)
    backends = _backends(machine, handle.backend if handle else None)
    switches = tried(lambda: preview(chosen, accumulation, () if asked else beside), ())
    on_failure = handle.policy.on_failure.value if handle else "rerun"
    unknown = {a.name: a for a in (chosen, *beside) if not a.known}
    said = [*machine.advice, *(f"{a}: little is known of it, so its plan is the safe one" for a in unknown.values())]
    said += _attention_of(chosen)
    if not switches:
        said.append("The accumulation switches could not be read: some are PyTorch's")
    said += tried(lambda: [*_lacking(precision, models)], [])
    if on_failure == "off":
        said.append("The NaN Guard is off: steps are only watched")
    if asked is None:
        said += tried(lambda: [*_not_compiled(backends, chosen, models)], [])
    return Diagnosis(
        architecture=chosen,
        here=asked is None,
        machine=machine,
        precision=precision,
        accumulation=accumulation,
        on_failure=on_failure,
        strict=handle.policy.strict if handle else False,
        backends=backends,
        switches=switches,
        models=models,
        notes=tuple(dict.fromkeys((*said, *notes))),
    )


def _plans(
    variant: Variant,
    architecture: Architecture,
    precision: Precision,
    accumulation: Accumulation,
    model: StoredModel | None,
) -> ModelPlans:
    """What can be planned, and why the rest cannot."""
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    for component in variant.components:
        try:
            plans.append(choose(architecture, variant, component, precision, accumulation))
        except PlanImpossible as error:  # noqa: PERF203
            refused[component.value] = str(error)
    stored = {name: f"{w.stored_dtype}, {_size(w.n_bytes)}" for name, w in model.weights.items()} if model else {}
    return ModelPlans(variant.name, tuple(plans), refused, model.name if model else "", stored)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


# --- notes ------------------------------------------------------------------------------------------------------------


def _attention_of(architecture: Architecture) -> Iterator[str]:
    without = "all its scores are in memory: 154 GB for a step of CogVideoX-2B, in place of 1.6"
    if architecture.fused_attention == "missing":
        yield f"{architecture}: PyTorch has no fused attention for it, so that {without}. Choose smaller sizes"
    if architecture.attention_locked:
        yield (
            f"{architecture}: in some releases of PyTorch, fused attention is experimental there, and off unless "
            f"{EXPERIMENTAL}=1 is in the environment before the start, where ComfyUI puts it. Else {without}"
        )


def _about(model: StoredModel) -> Iterator[str]:
    yield from model.notes
    try:
        for name in model.family.weighted:
            yield from model.unknown_fields(name)
    except Exception as error:  # noqa: BLE001 - diffusers may be missing, broken, or older than the model
        yield f"the model's configs were not compared with diffusers, which cannot be asked ({first_line(error)})"


def _lacking(precision: Precision, models: Iterable[ModelPlans]) -> Iterator[str]:
    """What the plans need and PyTorch or torchao does not have."""
    from ...precision.quantised import lacking

    if precision.quantises and (quantiser := lacking(precision.value)):
        yield quantiser
    asked_for = any(plan.fp16_sums for model in models for plan in model.plans)
    if asked_for and (switch := without_fp16_accumulation()):
        yield switch


def _learned(handle: PipelineHandle) -> Iterator[str]:
    for denoiser in handle.family.denoisers:
        for dtype in ("fp16", "bf16", "fp8", "int8"):
            if words := handle.store.learned.get(handle.memory_key(denoiser, dtype), NOTHING).in_words():
                which = f" of {denoiser}" if handle.family.also_denoise else ""
                yield f"runs{which} in {dtype} taught: {' and '.join(words)} (scope: learned)"


def _not_compiled(backends: Backends, architecture: Architecture, models: Iterable[ModelPlans]) -> Iterator[str]:
    """Where the backend cannot compile the dtype that a denoiser is planned in."""
    from ..compile.backends import BackendChoice, for_dtype
    from ..errors import BackendUnavailable

    choice = BackendChoice(backends.chosen, backends.reason, backends.automatic)
    try:
        for plan in (plan for model in models for plan in model.plans if plan.component is Component.DENOISER):
            used = for_dtype(choice, architecture, plan.dtype)
            if used.name != choice.name:
                yield f"not compiled: {used.reason.removeprefix('auto: ')}"
    except BackendUnavailable as error:
        yield str(error)


def _tested(device: str, selftests: Path | None) -> Architecture:
    import torch

    from ...precision.self_test import verified_architecture

    return verified_architecture(torch.device(device), selftests)


def _backends(machine: Machine, chosen: BackendChoice | None) -> Backends:
    states = (*tried(lambda: _states(machine.device), ()), BackendState("eager", True, "always there: not compiled"))
    if chosen:
        return Backends(states, chosen.name, chosen.reason, chosen.automatic)
    first = next(state.name for state in states if state.found)
    return Backends(states, first, "auto: the first that is found", automatic=True)


def _states(device: str) -> tuple[BackendState, ...]:
    import torch

    from ..compile.backends import backend_states

    return tuple(
        BackendState(name, not lacks, lacks or "found") for name, lacks in backend_states(torch.device(device)).items()
    )


# --- text: aligned, each reason once ----------------------------------------------------------------------------------


def _model_text(diagnosis: Diagnosis, model: ModelPlans) -> list[str]:
    """One model: a row for each component, then the reasons."""
    lines = _wrapped(
        f"Plan for {model.folder}: {model.variant} on {diagnosis.architecture}, precision {diagnosis.precision.value}"
    )
    if not (plans := model.plans):
        return lines + _refused([model])
    guard = "watch" if diagnosis.on_failure == "off" else diagnosis.on_failure
    rows = [
        (plan.component.words, plan.dtype, guard if plan.guarded else "no", _wide(plan), plan.accumulation)
        for plan in plans
    ]
    widened = [plan for plan in plans if plan.wide or plan.component is Component.DENOISER]
    reasons = [
        *_reasons("dtype", plans, lambda plan: plan.reason),
        *_reasons("guard", plans, lambda plan: plan.guard_reason),
        *([("", "reruns in plain fp32, not in TF32: strict is on")] if diagnosis.strict else []),
        *_reasons("wide", widened, lambda plan: plan.wide_reason),
        *_reasons("accumulation", plans, lambda plan: plan.accumulation_reason),
        *_reasons("fp16 sums", plans, lambda plan: plan.fp16_sums_reason),
        *_reasons("sources", plans, lambda plan: plan.source),
        *_reasons("", plans, lambda plan: plan.accumulation_source),
        *_keyed("stored as", [f"{name} {stored}" for name, stored in model.stored.items()]),
    ]
    table = _table(("", "dtype", "guard", "wide", "half accumulation"), rows)
    return [*lines, *table, "", *_rows(reasons), *_refused([model])]


def _variants_text(diagnosis: Diagnosis) -> list[str]:
    """All variants: dtypes in a table, then each reason once, with those it holds for."""
    rows = []
    reasons: dict[str, dict[str, None]] = {}
    for model in diagnosis.models:
        cells = {plan.component: f"{plan.dtype}{' wide' if plan.wide else ''}" for plan in model.plans}
        cells |= {Component(name): "refused" for name in model.refused}
        rows.append((model.variant, *(cells.get(component, "–") for component in Component)))
        for plan in model.plans:
            reason = plan.reason.replace(f"{model.variant} ", "the model ", 1)
            reasons.setdefault(reason, {})[model.variant] = None
            if plan.fp16_sums_reason:
                reasons.setdefault(f"fp16 sums: {plan.fp16_sums_reason}", {})[model.variant] = None
    guarded = sorted({plan.dtype for model in diagnosis.models for plan in model.plans if plan.guarded})
    lines = [
        f"Plans on {diagnosis.architecture}, precision {diagnosis.precision.value} (no --model: all variants)",
        *_table(("", *(component.words for component in Component)), rows),
        "",
        f"  guarded: {'whatever runs in ' if guarded else 'nothing'}{' or '.join(guarded)}",
        "",
    ]
    for reason, models in reasons.items():
        lines += _wrapped(reason, "  ", "    ") + _wrapped(", ".join(models), "    ", "    ")
    return lines + _refused(diagnosis.models)


def _estimates_text(runs: Sequence[RunEstimate]) -> list[str]:
    rows = []
    for run in runs:
        width, height, frames = run.size
        begins = [run.variant, f"{width}×{height}{f', {frames} frames' if frames > 1 else ''}"]
        for begin, stage in zip([*begins, *[""] * len(run.stages)], run.stages, strict=False):
            sizes = [f"{n / 1e9:.1f}" for n in (stage.weights, stage.beside, stage.weights + stage.beside)]
            rows.append((begin, stage.stage, stage.dtype, stage.way if stage.fits else "no room", *sizes))
    if not rows:
        return []
    little = any(not stage.fits for run in runs for stage in run.stages)
    return [
        *_wrapped(
            f"What would run on a card of {runs[0].memory / 2**30:g} GiB with offload 'auto', in GB: counted, not run. "
            f"{runs[0].has / 1e9:.1f} GB of it are taken to be free for the model"
            f"{'; where there is no room, the least that the stage would take' if little else ''}"
        ),
        *_table(("", "stage", "dtype", "runs", "weights", "beside", "peak"), rows),
    ]


def _machine_text(diagnosis: Diagnosis) -> list[str]:
    machine, comfyui = diagnosis.machine, diagnosis.comfyui
    gpus = [
        f"{gpu.index}: {gpu.name}, {gpu.architecture}{'' if gpu.memory is None else f', {gpu.memory:g} GiB'}"
        for gpu in machine.gpus
    ]
    installed = ", ".join(f"{name} {version}" for name, version in machine.packages.items() if version)
    lacking = ", ".join(name for name, version in machine.packages.items() if not version)
    runs_on = f"{machine.device}, {machine.architecture}"
    built_for = f"built for {machine.built_for}" if machine.torch_works else "cannot be imported"
    rows = [] if diagnosis.here else [("plans are for", f"{diagnosis.architecture}, which was asked for")]
    rows += [
        ("runs on", str(machine.architecture) if machine.device == machine.architecture.name else runs_on),
        *_keyed("GPUs", gpus or ["none that PyTorch can use"]),
        ("driver", machine.driver),
        *([("self-test", _self_test(diagnosis.architecture))] if diagnosis.here else []),
        ("PyTorch", f"{machine.torch}, {built_for}"),
        ("packages", f"{installed or 'none'}; not installed: {lacking or 'none'}"),
        ("system", f"{machine.system}, Python {machine.python}"),
    ]
    if comfyui:
        tested = f"{', '.join(comfyui.tested[:-1])} and {comfyui.tested[-1]}"
        rows.append(("ComfyUI", f"{comfyui.version or 'none here'}; this release was tested in {tested}"))
    return ["This machine", *_rows(rows)]


def _self_test(architecture: Architecture) -> str:
    if not architecture.tested:
        return "this card, driver and PyTorch are not verified: run `onediff-guard selftest`, or the Self-Test node"
    if not architecture.failed:
        return f"verified on this card on {architecture.tested}"
    return f"on {architecture.tested}, {', '.join(architecture.failed)} came out WRONG on this card"


def _flags_text(diagnosis: Diagnosis) -> list[str]:
    rows = []
    for flag in diagnosis.comfyui.flags if diagnosis.comfyui else ():
        native = [f"its own models: {flag.native}"] if flag.native else []
        rows += _keyed(flag.given, [f"{flag.effect}: {flag.here}", *native])
    return ["ComfyUI's flags in this pack's pipelines (its own models have all of them)", *_rows(rows)] if rows else []


def _backends_text(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.machine.torch_works:
        return ["Compile backends here", "  none: nothing runs without PyTorch"]
    chosen = diagnosis.backends.chosen
    rows = [
        (f"{'*' if state.name == chosen else ' '} {state.name}", state.reason) for state in diagnosis.backends.states
    ]
    if diagnosis.compile_cache:
        rows.append(("compile cache", diagnosis.compile_cache))
    return ["Compile backends here (* is used; 'auto' takes the first that is found)", *_rows(rows)]


def _switches_text(switches: Sequence[Switch]) -> list[str]:
    alike: dict[tuple[str, str], list[str]] = {}
    for switch in sorted(switches, key=lambda switch: switch.set_by != "user"):
        alike.setdefault((switch.set_by, switch.reason), []).append(f"{switch.name} = {switch.value}")
    lines = []
    for (set_by, reason), names in alike.items():
        lines += _wrapped(f"{_SETTERS.get(set_by, f'set by {set_by}')}: {reason}", "  ", "    ")
        lines += [f"    {name}" for name in names]
    title = "Half-precision accumulation, as it stands while a model runs"
    return [title, *lines] if lines else []


def _wide(plan: Plan) -> str:
    if not plan.wide:
        return "no"
    return "its stream" if plan.component is Component.DENOISER else "every layer"


def _refused(models: Iterable[ModelPlans]) -> list[str]:
    why = dict.fromkeys(why for model in models for why in model.refused.values())
    return [line for reason in why for line in _wrapped(f"refused: {reason}", "  ", "    ")]


def _reasons(title: str, plans: Iterable[Plan], reason: Callable[[Plan], str]) -> list[tuple[str, str]]:
    """Each reason once; with the components that it holds for, where there are several."""
    alike: dict[str, list[str]] = {}
    for plan in plans:
        if why := reason(plan):
            alike.setdefault(why, []).append(plan.component.words)
    if len(alike) == 1:
        return [(title, next(iter(alike)))]
    return _keyed(title, [f"{', '.join(components)}: {why}" for why, components in alike.items()])


def _keyed(title: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Rows, the first of which has the title."""
    return [("" if i else title, text) for i, text in enumerate(texts)]


def _listed(title: str, lines: Iterable[str]) -> list[str]:
    wrapped = [line for text in lines for line in _wrapped(text, "  - ", "    ")]
    return [title, *wrapped] if wrapped else []


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns; the second is wrapped under itself."""
    width = max(len(key) for key, _ in rows)
    return [line for key, text in rows for line in _wrapped(text, f"  {key:<{width}}  ", " " * (width + 4))]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    return [f"  {'  '.join(map(str.ljust, line, widths))}".rstrip() for line in (titles, *rows)]


def _wrapped(text: str, first: str = "", following: str = "") -> list[str]:
    wrapper = textwrap.TextWrapper(
        WIDTH,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text) or [first.rstrip()]
