"""What travels on an ONEDIFF_PIPELINE wire: an immutable handle to loaded components and how to run them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..precision.arch import Architecture, detect
from ..precision.guard import GuardPolicy, OnFailure
from ..precision.policy import VARIANTS, Component, Plan, Precision, choose
from ..precision.report import RunReport
from .compile import BackendChoice, choose_backend
from .families import FamilySpec
from .folder import inspect
from .placement import Placement
from .store import ComponentStore, shared_store


@dataclass(frozen=True, eq=False)
class PipelineHandle:
    """Nodes never change a handle: they return another (`dataclasses.replace`) that shares its store."""

    store: ComponentStore
    architecture: Architecture
    precision: Precision
    backend: BackendChoice
    offload: bool  # rest components in the host's memory between stages
    policy: GuardPolicy

    @property
    def family(self) -> FamilySpec:
        return self.store.folder.family

    def plan(self, component: Component, request: Precision | None = None) -> Plan:
        """The plan of one component; `request` overrides the loader's precision, None inherits it."""
        variant = VARIANTS[self.store.folder.variant]
        return choose(self.architecture, variant, component, request or self.precision)

    def policy_for(self, plan: Plan) -> GuardPolicy:
        """The NaN Guard's policy; a plan that is not guarded is only watched."""
        if plan.guarded or not plan.half:
            return self.policy
        return GuardPolicy(OnFailure.OFF, self.policy.strict)

    def report(self, plan: Plan) -> RunReport:
        return RunReport(
            variant=self.store.folder.variant,
            architecture=str(self.architecture),
            plan=plan,
            backend=self.backend.name,
            backend_reason=self.backend.reason,
        )

    def finish(self, component: str) -> None:
        """A stage is done with a component."""
        if self.offload:
            self.store.rest(component)


def load(
    path: Path, family: FamilySpec, *, precision: Precision, backend: str, offload: str, placement: Placement
) -> PipelineHandle:
    """Check a folder and make a handle. Weights are read when a stage first needs them.

    Raises BadFolder, or BackendUnavailable where a backend was asked for that does not work here.
    """
    folder = inspect(path, family)
    return PipelineHandle(
        store=shared_store(folder, placement),
        architecture=detect(placement.device),
        precision=precision,
        backend=choose_backend(backend, placement.device),
        offload=offload == "model",
        policy=GuardPolicy(),
    )
