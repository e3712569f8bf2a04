"""The value on an ONEDIFF_PIPELINE wire: an immutable handle to a model's components and the settings to run them.

The overrides that earlier runs learned are in the pipeline's store for this process, and in a profile
(`precision/overrides.py`) for later ones. A profile identifies a model by its denoiser's config, safetensors headers,
sizes and a sample of the weights: hashing 11 GB is slow, and headers alone are equal for a fine-tune and its base.
"""

from __future__ import annotations

import hashlib
import json
import struct
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from ...precision.accumulation import Accumulation, accumulation, without_fp16_accumulation
from ...precision.arch import Architecture, present
from ...precision.error_estimate import CachePolicy
from ...precision.guard import GuardPolicy, OnFailure
from ...precision.layer_peaks import alone
from ...precision.machine import check_torch, first_line
from ...precision.memory import Memory, peak_memory
from ...precision.overrides import NOTHING, PrecisionOverrides, Profile, ProfileFile
from ...precision.policy import Component, Plan, PlanImpossible, Precision, choose
from ...precision.process_state import PROCESS_GATE
from ...precision.report import RunReport
from ...precision.self_test import verified_architecture
from ...precision.upcast import tf32_off
from ...trust.message import Message, shown
from ..compile.backends import BackendChoice, CompileOptions, choose_backend
from ..errors import BadLora
from ..families.spec import FamilySpec
from ..models.folder import open_model
from ..models.lora import Lora, check_lora, keys
from ..models.on_disk import StoredModel, header_text
from ..parallel.group import ALONE, ProcessGroup
from ..weights.components import ComponentStore, MemoryKey, shared_store
from ..weights.offload import Offload, backend_with, brings_parts_to
from ..weights.placement import NoRoom, PlainPlacement, ran_out
from ..weights.quantising import check
from .stage import ComponentStage

Args = ParamSpec("Args")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class PipelineHandle:
    """A pipeline's store and settings. Nodes never change a handle: they return a copy (`dataclasses.replace`) that
    shares its store."""

    store: ComponentStore
    architecture: Architecture
    precision: Precision
    backend: BackendChoice
    offload: Offload
    policy: GuardPolicy
    guard_node: bool = False  # a NaN Guard node set the policy
    accumulation: Accumulation = Accumulation.AUTO
    beside: tuple[Architecture, ...] = ()  # the process's GPUs, which share the accumulation switches
    loras: tuple[Lora, ...] = ()  # for the denoisers
    compile_options: CompileOptions = field(default_factory=CompileOptions)
    full_report: bool = True  # with a line for every step
    step_cache: CachePolicy | None = None  # None: every step is computed
    profiles: Path | None = None  # folder of profiles; None: none are kept
    profile: Profile | None = None  # a profile from the user, used instead of the kept one
    compiled: Path | None = None  # folder of the compile cache; None: compiled code is not kept
    ranks: ProcessGroup = ALONE  # the processes that compute each run together

    def __post_init__(self) -> None:
        backend = backend_with(self.backend, self.offload, self.store.placement.device)
        object.__setattr__(self, "backend", backend)  # a node may have set one that does not fit the offload
        self.store.handles.add(self)

    @property
    def family(self) -> FamilySpec:
        return self.store.model.family

    def loras_of(self, denoiser: str) -> tuple[Lora, ...]:
        """Return the LoRAs for a denoiser, given by its component's name."""
        return tuple(lora for lora in self.loras if lora.denoiser in ("", denoiser))

    def memory_key(self, denoiser: str, dtype: str) -> MemoryKey:
        """Return the store's key of the overrides of a denoiser in `dtype`."""
        loras = self.loras_of(denoiser)
        given = self.profile.text() if self.profile else ""
        return denoiser, dtype, keys(loras) if loras else (), self.architecture.name, given

    def plan(self, component: Component, request: Precision | None = None) -> Plan:
        """Return a component's plan. request: overrides the loader's precision; None inherits it. Raises
        PlanImpossible."""
        variant = self.store.model.variant
        precision = request or self.precision
        plan = choose(self.architecture, variant, component, precision, self.accumulation, self.beside)
        if plan.quantised:
            check(plan, self.offload, self.store.placement.device)
        if plan.fp16_sums and (lacking := without_fp16_accumulation()):
            raise PlanImpossible(lacking)
        return plan

    def stage(self, component: Component, request: Precision | None = None) -> ComponentStage:
        """Return a component's stage, set up by its plan; nothing is loaded yet. Raises PlanImpossible."""
        plan, layout, name = self.plan(component, request), self.family.layout, self.family.folder(component)
        inputs = {self.family.denoiser: self.family.denoiser_inputs, "vae": (layout.cache,) if layout.cache else ()}
        as_the_decoder = component is Component.VAE_ENCODE  # they share the VAE's weights, which are loaded once
        return ComponentStage(
            plan=plan,
            report=self.report(plan),
            architecture=self.architecture,
            asked=self.policy,
            inputs=inputs.get(name, ()),
            agree=self.ranks.all_reduce_absmax if component is Component.DENOISER and not self.ranks.alone else alone,
            handle=self,
            name=name,
            weights_in=self.plan(Component.VAE_DECODE, request).dtype if as_the_decoder else plan.dtype,
        )

    def denoising(self, request: Precision | None = None) -> tuple[ComponentStage, ...]:
        """Return a stage for each denoiser, in the order of their calls, with one shared report."""
        first = self.stage(Component.DENOISER, request)
        return tuple(replace(first, name=name) for name in self.family.denoisers)

    def idle_guard(self, plan: Plan) -> tuple[str, ...]:
        """Return a warning if a NaN Guard node has no effect in this plan."""
        if plan.guarded or not plan.half or not self.guard_node or self.policy.on_failure is OnFailure.OFF:
            return ()
        return (
            Message(
                "The NaN Guard, set to '{}', does nothing here: precision 'fp16 (plain)' switches it off.",
                self.policy.on_failure.value,
            )
            + " "
            + Message("Choose 'auto' or 'fp16'."),
        )

    @contextmanager
    def switched(self, report: RunReport) -> Generator[None]:
        """Hold the accumulation switches while a stage runs inside, measure its peak memory, and write both to its
        report. Other threads' stages may compute at the same time."""
        device = self.store.placement.device
        held = accumulation(self.architecture, self.accumulation, self.beside)
        with peak_memory(device) as peak, held as switches, PROCESS_GATE.shared():
            report.switches = switches
            try:
                yield
            finally:
                if found := peak():
                    report.memory = Memory(str(device), found, self.store.bytes_on_device())

    def report(self, plan: Plan) -> RunReport:
        notes = [*self.store.model.notes]
        for lora in self.loras if plan.component is Component.DENOISER else ():
            notes += [str(lora), *lora.notes]
        if self.offload.in_parts and not brings_parts_to(self.store.placement.device):
            notes.append(f"offload '{self.offload.value}' works like 'model' here: a CPU computes in main memory")
        return RunReport(
            variant=self.store.model.variant.name,
            architecture=str(self.architecture),
            plan=plan,
            backend=self.backend.name,
            backend_reason=self.backend.reason,
            warnings=self.idle_guard(plan),
            notes=tuple(notes),
        )

    def finish(self, *components: str) -> None:
        """Offload a stage's components after use, if the offload asks for it. They need not be loaded."""
        if not self.offload.stays:
            for component in components:
                self.store.offload_to_cpu(component)


def in_turn(
    stage: Callable[Concatenate[PipelineHandle, Args], tuple[Result, RunReport]],
) -> Callable[Concatenate[PipelineHandle, Args], tuple[Result, RunReport]]:
    """Decorate a stage: it waits for stages of other threads on the same store. If memory runs out outside a model's
    call (which has its own fallback), it restarts once, with all components off the device."""

    @wraps(stage)
    def waiting(handle: PipelineHandle, *args: Args.args, **kwargs: Args.kwargs) -> tuple[Result, RunReport]:
        placement = handle.store.placement
        with handle.store.turn(), tf32_off(handle.policy.exact_fp32):  # also for diffusers' own computations
            try:
                return stage(handle, *args, **kwargs)
            except RuntimeError as error:
                if not ran_out(error) or not handle.ranks.alone:  # the other ranks do not restart
                    raise
                traceback.clear_frames(error.__traceback__)
            handle.store.leave_device()
            placement.give_back()
            try:
                made, report = stage(handle, *args, **kwargs)
            except RuntimeError as error:
                if not ran_out(error):
                    raise
                raise NoRoom(
                    "Out of memory, although nothing else of the model is on {}. Choose a smaller size, close other "
                    "programs that use the card, or use a card with more memory. PyTorch said: {}",
                    placement.device,
                    first_line(error),
                ) from error
            report.note(Message("out of memory: the stage started again, with nothing else of the model on the device"))
            return made, report

    return waiting


def load(
    path: Path,
    family: FamilySpec,
    *,
    precision: Precision,
    backend: str,
    offload: str,
    placement: PlainPlacement,
    accumulation: Accumulation = Accumulation.AUTO,
    profiles: Path | None = None,
    compiled: Path | None = None,
    selftests: Path
    | None = None,  # folder of the results of this card's self-test; None: its architecture alone is known
    ranks: ProcessGroup = ALONE,  # of which this process is one
) -> PipelineHandle:
    """Check a model and make a handle. Weights are read when a stage first needs them.

    Raises TorchTooOld; BadFolder; BackendUnavailable where a backend was asked for that does not work here, or not with
    this offload; PlanImpossible where the device has no such precision.
    """
    check_torch()
    model = open_model(path, family)
    handle = PipelineHandle(
        store=shared_store(model, placement),
        architecture=verified_architecture(placement.device, selftests),
        precision=precision,
        backend=choose_backend(backend, placement.device),
        offload=Offload(offload),
        policy=GuardPolicy(),
        accumulation=accumulation,
        beside=present(),
        profiles=profiles,
        compile_options=CompileOptions(channels_last=placement.channels_last),
        compiled=compiled if ranks.alone else None,  # ranks compile different parts of the work
        ranks=ranks,
    )
    family = model.family
    wanted = {family.folder(component): handle.plan(component).dtype for component in model.variant.components}
    wanted |= dict.fromkeys(family.denoisers, wanted[family.denoiser])
    handle.store.drop_unless(wanted, handle)  # before further weights are read
    return handle


def add_lora(handle: PipelineHandle, lora: Lora) -> PipelineHandle:
    """Return the pipeline with one more LoRA, checked by its header. Raises BadLora."""
    if lora.denoiser not in ("", *handle.family.denoisers):
        raise BadLora(
            "{} has no second transformer to add '{}' to. Choose 'both' as the LoRA's transformer.",
            handle.store.model.variant.name,
            lora.path.name,
        )
    notes = check_lora(lora.path, handle.family, handle.store.model.bare(handle.family.denoiser))
    return replace(handle, loras=(*handle.loras, replace(lora, notes=notes)))


_SAMPLES, _SAMPLE_BYTES = 64, 4096  # number of samples of a file's weights, and bytes of each


def load_profile(handle: PipelineHandle, key: MemoryKey) -> tuple[PrecisionOverrides, tuple[str, ...]]:
    """Return a denoiser's overrides, from the store or from its profile, and lines for the report."""
    if key in handle.store.learned:
        return handle.store.learned[key], ()
    learned, notes = _profile_file(handle, key).load()
    handle.store.learned[key] = learned
    if handle.profile is None and learned != NOTHING:
        handle.store.recalled.add(key)
    return learned, notes


def update_cache(handle: PipelineHandle, key: MemoryKey, learned: PrecisionOverrides) -> None:
    """Keep a denoiser's overrides while the store lives, except `whole_run_fp32`, which is for one run alone."""
    handle.store.learned[key] = replace(learned, whole_run_fp32=False)


def save_profile(handle: PipelineHandle, key: MemoryKey) -> None:
    """Write a denoiser's overrides to its profile; also if there are none, but the run began with a kept profile. In a
    parallel run, only rank 0 writes."""
    if not handle.ranks.first:
        return
    learned = handle.store.learned.get(key, NOTHING)
    if learned.to_share != NOTHING or key in handle.store.recalled:
        _profile_file(handle, key).save(learned)


def _profile_file(handle: PipelineHandle, key: MemoryKey) -> ProfileFile:
    return ProfileFile(_identity(handle, key), handle.profiles, handle.profile)


def profile_of(handle: PipelineHandle, denoiser: str, dtype: str) -> Profile:
    """Return a denoiser's profile without overrides."""
    return _identity(handle, handle.memory_key(denoiser, dtype))


def _identity(handle: PipelineHandle, key: MemoryKey) -> Profile:
    """Return a profile without overrides. Reads files at the first call, when a run begins: later they may change."""
    profiles, (denoiser, dtype, _, architecture, _) = handle.store.profiles, key
    if (whose := key[:4]) not in profiles:
        profiles[whose] = identify(handle.store.model, denoiser, handle.loras_of(denoiser), architecture, dtype)
    return profiles[whose]


def identify(model: StoredModel, denoiser: str, loras: Sequence[Lora], architecture: str, dtype: str) -> Profile:
    """Return the profile, without overrides, of a denoiser (a component's name) with LoRAs."""
    import diffusers
    import torch

    versions = {package.__name__: ".".join(package.__version__.split(".")[:2]) for package in (torch, diffusers)}
    return Profile(
        model=shown(model.name, 300),
        weights=fingerprint(model.weights[denoiser].files, model.denoiser_config),
        loras=tuple(f"{fingerprint([lora.path], lora.beside)} at {lora.scale:g}" for lora in loras if lora.scale),
        architecture=architecture,
        dtype=dtype,
        versions=versions,
    )


def fingerprint(files: Iterable[Path], config: Mapping[str, Any] | None = None) -> str:
    """Return 32 hexadecimal digits that identify safetensors files and a config."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in files:
        size = file.stat().st_size
        header = header_text(file)
        digest.update(struct.pack("<Q", len(header)) + header)
        start = 8 + len(header)
        with file.open("rb") as stream:
            for sample in range(_SAMPLES):
                stream.seek(start + (size - start) * sample // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
        digest.update(f":{size};".encode())
    return digest.hexdigest()[:32]
