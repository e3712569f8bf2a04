"""Decides when backend 'auto' compiles, and which calls of a VAE's decoder are compiled.

Ski-rental rule (Karlin et al. 1988): runs are eager until eager calls have taken as long as a compile is assumed to
take. Code that is compiled already is used at once. Eager seconds are counted in this process: a denoiser's per compile
target, a decoder's per compile target and call signature.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.policy import Component, Plan, Precision
from ...precision.report import RunReport, StepRecord
from ...precision.shallow_copy import with_forward
from .backends import EAGER, BackendChoice, came_to, choose_backend, compiled, for_dtype

if TYPE_CHECKING:
    from ..run.handle import PipelineHandle

COMPILE_SECONDS = 60.0  # assumed duration of a compile
CallSignature = tuple[torch.Size, Hashable]  # shape of the latents; shapes and values of all arguments
_eager_seconds: dict[Hashable, float] = {}  # by compile target; infinite once it is compiled


def decide(choice: BackendChoice, key: Hashable, *, kept: bool = False) -> BackendChoice:
    """Return the backend of a run; 'eager' if the rule says to wait. kept: compiled code is on disk."""
    spent = math.inf if kept else _eager_seconds.get(key, 0.0)
    said = f"eager calls took {spent:.3g} s; compiling is estimated at {COMPILE_SECONDS:.3g} s"
    if spent < COMPILE_SECONDS:
        return BackendChoice(EAGER, f"auto: not compiled yet: {said}", automatic=True)
    return replace(choice, reason=f"{choice.reason}; {'compiled already' if spent == math.inf else said}")


def record(key: Hashable, report: RunReport, steps: Iterable[StepRecord]) -> None:
    """Add the seconds of a run's eager calls, without their reruns, or note that the calls are compiled now."""
    if report.backend != EAGER:
        _eager_seconds[key] = math.inf if report.graphs else _eager_seconds.get(key, 0.0)
        return
    seconds = sum(step.seconds - (step.rerun.seconds if step.rerun else 0.0) for step in steps)
    _eager_seconds[key] = _eager_seconds.get(key, 0.0) + seconds


def with_backend_of_run(handle: PipelineHandle, request: Precision | None) -> tuple[PipelineHandle, str]:
    """Return the pipeline with the backend of a sampling run, and the key of its eager seconds; "" if these are not
    counted. handle: 'auto' has chosen a compiler for it. Quantised layers are compiled at once: eager, they are slower
    than half precision."""
    from .cache import SUFFIX, target_of

    plan = handle.plan(Component.DENOISER, request)
    if plan.quantised:
        return handle, ""
    key = target_of(handle, plan, handle.compile_options).name
    folder = handle.compiled / f"{key}{SUFFIX}" if handle.compiled and handle.backend.name == "inductor" else None

    def chosen() -> BackendChoice:
        kept = folder is not None and any(path.is_file() for path in folder.rglob("*"))
        return decide(handle.backend, key, kept=kept)

    return replace(handle, backend=handle.ranks.broadcast_from_rank0(chosen)), key


def signature_of(latents: torch.Tensor, *args: Any, **kwargs: Any) -> CallSignature:
    """Return a decoder call's signature, by which it would be compiled: the tensors' shapes and the other values.
    Dtypes are left out: the calls of a dry run have others than those of the decode."""
    leaves, structure = pytree.tree_flatten((latents, args, kwargs))
    shapes = tuple(leaf.shape if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    return latents.shape, (str(structure), shapes)


class DecoderCompiler:
    """Compiles a decoder for the call signature that does most work in a decode: tiles or chunks of one size, which
    share one graph. Other calls, at edges, run eagerly: a compile for each would take as long.

    asked: "auto", or a backend's name. 'auto' takes the pipeline's own backend by the ski-rental rule.
    Raises BackendUnavailable if a backend that was asked for by name does not work here.
    """

    def __init__(self, handle: PipelineHandle, plan: Plan, report: RunReport, asked: str = "auto"):
        own, how, device = handle.backend, handle.compile_options, handle.store.placement.device
        choice = choose_backend(asked, device) if asked != "auto" else replace(own, automatic=own.name != EAGER)
        self.backend = for_dtype(choice, handle.architecture, plan.dtype)
        self._how = replace(how, attention="", dynamic=how.dynamic or False)
        self._handle, self._plan, self._report = handle, plan, report
        self._dominant: CallSignature | None = None  # signature of the compiled calls
        self._say(self.backend)

    def begin(self, calls: Sequence[CallSignature]) -> tuple[PipelineHandle, Hashable]:
        """Decide for one decode. calls: the signatures of all its calls of the decoder; empty if unknown.

        Returns the pipeline with the backend of the decode, and the key to record its seconds by; None if they are
        not recorded.
        """
        backend, key, self._dominant = self.backend, None, None
        if not calls and backend.name != EAGER:
            backend = BackendChoice(EAGER, "nothing is compiled, since its calls could not be predicted")
            self._say(backend)
        elif backend.name != EAGER:
            work = Counter({call: calls.count(call) * call[0].numel() for call in calls})
            ((dominant, _),) = work.most_common(1)
            if backend.automatic:
                from .cache import target_of

                key = target_of(self._handle, self._plan, self._how).name, dominant
                backend = decide(backend, key)
            which = f"{calls.count(dominant)} of {len(calls)} calls, of latents {'×'.join(map(str, dominant[0]))}"
            self._say(backend, "" if backend.name == EAGER else f"; compiled: {which}")
            self._dominant = None if backend.name == EAGER else dominant
        return replace(self._handle, backend=backend, compile_options=self._how), key

    def shell(
        self,
        network: torch.nn.Module,
        otherwise: Callable[..., Any] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.nn.Module:
        """Return a shallow copy of the decoder that runs compiled code for the dominant signature, and `otherwise`
        (default: the network) for other calls. around: makes a context for compiled calls."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._dominant is None or signature_of(*args, **kwargs) != self._dominant:
                return (otherwise or network)(*args, **kwargs)
            store, plan = self._handle.store, self._plan
            how = self.backend.asked_for, self._how, plan.numerics, plan.overflow_protection, plan.accumulation
            key: Any = ("vae", (), *how, plan.component)
            if key not in store.compiled:
                store.compiled[key] = compiled(network, ("",), self.backend, self._how, device=store.placement.device)
            run = store.compiled[key]
            with around():
                made = run(*args, **kwargs)
            if (now := came_to(run, self.backend)) is not self.backend:
                self._say(now)
            return made

        return with_forward(network, forward)

    def leave(self, why: str) -> None:
        """Compile nothing from now on, for the reason `why`."""
        self.backend, self._dominant = BackendChoice(EAGER, why), None
        self._say(self.backend)

    def _say(self, backend: BackendChoice, more: str = "") -> None:
        self._report.backend, self._report.backend_reason = backend.name, f"{backend.reason}{more}"
