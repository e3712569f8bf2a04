"""What would run here and why, without running it: machine, backends, switches, plans. For `doctor` and the node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.accumulation import Accumulation, Switch, preview
from ...precision.arch import EXPERIMENTAL, Architecture
from ...precision.machine import Machine, first_line, look, tried
from ...precision.overrides import NOTHING
from ...precision.policy import Component, Plan, PlanImpossible, Precision, Variant, choose
from ...trust.plain import for_json
from ..families.spec import FamilySpec
from ..families.table import FAMILIES, VARIANTS
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


def diagnose(
    model: Path | None = None,
    architecture: Architecture | None = None,
    *,
    precision: Precision = Precision.AUTO,
    accumulation: Accumulation = Accumulation.AUTO,
    loaders: Mapping[str, str] | None = None,
    memory: int | None = None,
    size: Size | None = None,
    selftests: Path | None = None,
) -> Diagnosis:
    """The plan for a model folder, or for all variants.

    architecture: plan for that one instead of the one here. loaders: {diffusers pipeline: node that loads it}.
    memory: bytes of a card, for which to tell how each stage would run. size: of the result; None: the model's own.
    selftests: folder of the results of this card's self-test.

    Raises BadFolder where `model` is no folder of a known family, or is not whole; BadSize where none can be made.
    """
    machine = look()
    machine = replace(machine, architecture=tried(lambda: _tested(machine.device, selftests), machine.architecture))
    chosen = architecture or machine.architecture
    loaders = loaders or {}
    stored = None
    if model is None:
        models = tuple(_plans(variant, chosen, precision, accumulation) for variant in VARIANTS.values())
        notes = _without_loader(loaders)
    else:
        family = family_of(model)
        stored = open_model(model, family)
        models = (_plans(stored.variant, chosen, precision, accumulation, stored),)
        notes = (*_no_loader(family, loaders), *_about(stored))
    diagnosis = _put_together(machine, architecture, precision, accumulation, models, notes)
    if memory is None:
        return diagnosis
    from .vram_estimate import estimate_runs

    return replace(diagnosis, runs=tuple(estimate_runs(stored, chosen, [memory], size, precision, accumulation)))


def diagnose_pipeline(handle: PipelineHandle, architecture: Architecture | None = None) -> Diagnosis:
    """The same for a pipeline on a wire, with its own precision, accumulation, backend and guard policy."""
    model = handle.store.model
    chosen = architecture or handle.architecture
    models = (_plans(model.variant, chosen, handle.precision, handle.accumulation, model),)
    found_at_load = (note for notes in handle.store.notes.values() for note in notes)
    return _put_together(
        look(handle.store.placement.device),
        architecture,
        handle.precision,
        handle.accumulation,
        models,
        (*_about(model), *found_at_load, *_measured(handle)),
        handle,
    )


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
    if precision.quantises:
        said += tried(lambda: [*_without_quantiser(precision)], [])
    said += tried(lambda: [*_without_switch(models)], [])
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
    model: StoredModel | None = None,
) -> ModelPlans:
    """What can be planned, and why the rest cannot."""

    def plan(component: Component) -> Plan | str:
        try:
            return choose(architecture, variant, component, precision, accumulation)
        except PlanImpossible as error:
            return str(error)

    outcomes = {component.value: plan(component) for component in variant.components}
    stored = {name: f"{w.stored_dtype}, {_size(w.n_bytes)}" for name, w in model.weights.items()} if model else {}
    return ModelPlans(
        variant=variant.name,
        plans=tuple(outcome for outcome in outcomes.values() if isinstance(outcome, Plan)),
        refused={name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)},
        folder=model.name if model else "",
        stored=stored,
    )


def _attention_of(architecture: Architecture) -> Iterator[str]:
    without = "all its scores are in memory: 154 GB for a step of CogVideoX-2B, in place of 1.6"
    if architecture.fused_attention == "missing":
        yield f"{architecture}: PyTorch has no fused attention for it, so that {without}. Choose smaller sizes"
    if architecture.attention_locked:
        yield (
            f"{architecture}: in some releases of PyTorch, fused attention is experimental there, and off unless "
            f"{EXPERIMENTAL}=1 is in the environment before the start, where ComfyUI puts it. Else {without}"
        )


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.1f} MB"


def _about(model: StoredModel) -> Iterator[str]:
    yield from model.notes
    for name in model.family.weighted:
        yield from _unknown_fields(model, name)


def _unknown_fields(model: StoredModel, name: str) -> list[str]:
    try:
        return model.unknown_fields(name)
    except Exception as error:  # noqa: BLE001 - diffusers may be missing, broken, or older than the model
        return [f"the model's configs were not compared with diffusers, which cannot be asked ({first_line(error)})"]


def _no_loader(family: FamilySpec, loaders: Mapping[str, str]) -> Iterator[str]:
    if family.pipeline not in loaders:
        yield f"no node loads {family.name} yet: this is the plan that one will follow"


def _without_quantiser(precision: Precision) -> Iterator[str]:
    from ...precision.quantised import lacking

    if missing := lacking(precision.value):
        yield missing


def _without_switch(models: Iterable[ModelPlans]) -> Iterator[str]:
    from ..weights.summing import lacks_sums, missing

    if any(lacks_sums(plan) for model in models for plan in model.plans):
        yield missing()


def _without_loader(loaders: Mapping[str, str]) -> Iterator[str]:
    missing = [family.name for family in FAMILIES.values() if family.pipeline not in loaders]
    if missing:
        yield f"no node loads these yet: {', '.join(missing)}. Their rows are the plans that nodes will follow"


def _measured(handle: PipelineHandle) -> Iterator[str]:
    for denoiser, dtype in product(handle.family.denoisers, ("fp16", "bf16", "fp8", "int8")):
        learned = handle.store.learned.get(handle.memory_key(denoiser, dtype), NOTHING)
        if words := learned.in_words():
            which = f" of {denoiser}" if handle.family.also_denoise else ""
            yield f"runs{which} in {dtype} taught: {' and '.join(words)} (scope: learned)"


def _backends(machine: Machine, chosen: BackendChoice | None) -> Backends:
    missing = tried(lambda: _missing(machine.device), {})
    states = [BackendState(name, not lacks, _lacks(name, lacks)) for name, lacks in missing.items()]
    states.append(BackendState("eager", True, "always there: not compiled"))
    if chosen:
        return Backends(tuple(states), chosen.name, chosen.reason, chosen.automatic)
    first = next(state.name for state in states if state.found)
    return Backends(tuple(states), first, "auto: the first that is found", automatic=True)


def _lacks(backend: str, missing: str | None) -> str:
    from ..compile.backends import NEEDS

    return ". ".join(filter(None, [missing, NEEDS.get(backend)])) if missing else "found"


def _tested(device: str, selftests: Path | None) -> Architecture:
    import torch

    from ...precision.self_test import verified_architecture

    return verified_architecture(torch.device(device), selftests)


def _missing(device: str) -> dict[str, str | None]:
    import torch

    from ..compile.backends import backend_states

    return backend_states(torch.device(device))


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
