"""A VAE's decoder, compiled whole: for the kind of call that makes up most of a decode, and where that pays.

A decode makes many calls of the decoder, of which most are alike: tiles of one size, chunks of as many frames, each
with a full cache of the one before. Those share one graph. The others, ragged tiles and first chunks, are as many kinds
as there are edges and make up little: each would compile as long as the first, so they run as they are. Padding them
would not be exact, since group norms take in what is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from ...precision.shells import with_forward
from ...precision.upcast import Mode
from .backends import EAGER, BackendChoice, came_to, choose_backend, compiled, for_plan
from .payoff import Measured, decide, is_kept, keep, measured_of, own_seconds, take_in

if TYPE_CHECKING:
    from ...precision.policy import Plan
    from ...precision.report import RunReport, StepRecord
    from ..run.handle import PipelineHandle


@dataclass(frozen=True)
class Kind:
    """What tells calls apart that a graph of their own would be compiled for."""

    given: Hashable  # shapes of the tensors, and all other arguments
    shape: tuple[int, ...]  # of the first tensor, the latents
    unread: frozenset[int] = frozenset()  # places of tensors, among all arguments, that the network does not look at

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], unread: frozenset[int] = frozenset()) -> Kind:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        told = tuple(
            (tuple(leaf.shape) if place not in unread else ...) if isinstance(leaf, torch.Tensor) else leaf
            for place, leaf in enumerate(leaves)
        )
        first = next((leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)), ())
        return cls((str(structure), told), tuple(first), unread)

    def without_unread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of such a call with an empty tensor in place of each that is not looked at, whose shape
        would make a graph of its own for it."""
        if not self.unread:
            return args, kwargs
        leaves, structure = pytree.tree_flatten((args, kwargs))
        empty = [leaf.new_empty(0) if place in self.unread else leaf for place, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(empty, structure)

    def __str__(self) -> str:
        return "×".join(map(str, self.shape))


class Kinds:
    """Finds the kinds of a network's calls while they are made, on "meta"."""

    def __init__(self) -> None:
        self.calls: list[Kind] = []  # one for each call, in order
        self._unread: dict[Kind, frozenset[int]] = {}

    def noting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call, which is noted."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            made = call(*args, **kwargs)
            self.calls.append(Kind.of(args, kwargs, self._unread[Kind.of(args, kwargs)]))
            return made

        return noted

    def looking(self, network: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same call, of which is noted what it looks at. It has to be made once for each kind."""

        def looked(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            kind = Kind.of(args, kwargs)
            with _Looked() as seen:
                made = network(*args, **kwargs)
            kept = seen.ids | {id(leaf) for leaf in pytree.tree_leaves(made)}
            places = (n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and id(leaf) not in kept)
            self._unread[kind] = frozenset(places)
            return made

        return looked


class _Looked(Mode):
    """Notes which tensors any function of PyTorch is given, the one that reads a shape among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.ids |= {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Most:
    """The kind of call that makes up most of a decode, among all its calls in order."""

    kind: Kind
    calls: tuple[Kind, ...]

    @classmethod
    def of(cls, calls: Sequence[Kind]) -> Most:
        """calls: at least one. A kind's part of the work is taken for its part of the latents' values."""
        work: dict[Kind, int] = {}
        for kind in calls:
            work[kind] = work.get(kind, 0) + torch.Size(kind.shape).numel()
        return cls(max(work, key=work.__getitem__), tuple(calls))

    @property
    def count(self) -> int:
        return self.calls.count(self.kind)

    def seconds(self, of_calls: Sequence[float]) -> list[float]:
        """Return what the calls of the kind took, of what all of them did."""
        return [taken for kind, taken in zip(self.calls, of_calls, strict=False) if kind == self.kind]

    def __str__(self) -> str:
        calls = "the one call" if len(self.calls) == 1 else f"{self.count} of {len(self.calls)} calls"
        return f"{calls}, of latents {self.kind}"


class DecoderCompiling:
    """How one decode is compiled: with which backend, and which of its calls.

    asked: "auto", or a backend's name. 'auto' takes the pipeline's own backend where that pays, and compiles nothing
        where the pipeline is not compiled.
    Raises BackendUnavailable where one was asked for that does not work here.
    """

    def __init__(self, handle: PipelineHandle, plan: Plan, report: RunReport, asked: str = "auto"):
        device = handle.store.placement.device
        own = handle.backend
        choice = choose_backend(asked, device) if asked != "auto" else replace(own, automatic=own.name != EAGER)
        self.backend = for_plan(choice, handle.architecture, plan, device)
        how = handle.compile_options
        self._how = replace(how, attention="", dynamic=how.dynamic or False)  # edges are not compiled: few sizes
        self._handle, self._plan, self._report = handle, plan, report
        self._most: Most | None = None  # whose calls are compiled
        self._left = False  # it is not compiled any more
        self._say(self.backend)

    @property
    def possible(self) -> bool:
        """Whether anything may be compiled."""
        return self.backend.name != EAGER and not self._left

    @property
    def handle(self) -> PipelineHandle:
        """The pipeline with the backend that a decode runs with, since it began, and how that compiles."""
        name = self.backend.name if self._most else EAGER
        return replace(self._handle, backend=replace(self.backend, name=name), compile_options=self._how)

    def begin(self, most: Most | None) -> None:
        """Decide whether a decode of such calls is compiled. None: nothing is known of them, and nothing compiled."""
        self._most = None
        if most is None or self._left:
            return
        pays, why = True, ""
        if self.backend.automatic:
            known, _ = self._measured()
            pays, why = decide(known, _size(most), most.count, at_hand=self._at_hand(known, most), unit="call")
        if not pays:
            self._say(BackendChoice(EAGER, f"auto: not compiled: {why}", automatic=True))
            return
        self._most = most
        options = self._how.in_words(self.backend.name)
        self._say(self.backend, why, f"compiled: {most}", options if self._how.dynamic else "")

    def shell(
        self,
        network: torch.nn.Module,
        otherwise: Callable[..., Any] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> torch.nn.Module:
        """Return a shell of the network that runs what is compiled of it for calls of that kind.

        otherwise: what runs for the others; by default the network itself. around: what compiled calls run inside of.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            kind = self._most and self._most.kind
            if kind is None or Kind.of(args, kwargs, kind.unread) != kind:
                return (otherwise or network)(*args, **kwargs)
            run = self._compiled(network)
            args, kwargs = kind.without_unread(args, kwargs)
            with around():
                made = run(*args, **kwargs)
            if (now := came_to(run, self.backend)) is not self.backend:
                self._say(now)
            return made

        return with_forward(network, forward)

    def leave(self, why: str) -> None:
        """Compile nothing from now on."""
        self._most, self._left = None, True
        self._say(BackendChoice(EAGER, why))

    def learn(self, most: Most, steps: Sequence[StepRecord]) -> None:
        """Take in, and keep, what a decode's calls took, where 'auto' decides."""
        if not self.backend.automatic or self._left:
            return
        known, file = self._measured()
        graphs = (self._report.graphs or 0) - self._report.graphs_kept
        seconds = most.seconds([own_seconds(step) for step in steps])
        take_in(known, _size(most), seconds, compiled=self._report.backend != EAGER, graphs=graphs)
        keep(known, file)

    def _compiled(self, network: torch.nn.Module) -> torch.nn.Module:
        """Made once for as long as the weights are loaded."""
        known, key = self._handle.store.compiled, self._key
        if key not in known:
            known[key] = compiled(network, ("",), self.backend, self._how, device=self._handle.store.placement.device)
        return known[key]

    @property
    def _key(self) -> tuple[Any, ...]:
        how = self.backend.asked_for, self._how, self._plan.numerics, self._plan.wide, self._plan.accumulation
        return ("vae", (), *how, self._plan.component)

    def _at_hand(self, known: Measured, most: Most) -> bool:
        """Whether code for such calls is there, in this process or, by inductor, on disk."""
        if not known.at(_size(most)).compiled:
            return False
        if self._key in self._handle.store.compiled:
            return True
        return self.backend.name == "inductor" and is_kept(self._handle, self._target)

    def _measured(self) -> tuple[Measured, Path | None]:
        return measured_of(self._handle, self._target)

    @property
    def _target(self) -> str:
        from .target import target_of

        handle = self._handle
        return target_of(
            handle.store.model, self._plan, self._how, handle.store.placement.device, handle.architecture
        ).name

    def _say(self, backend: BackendChoice, *more: str) -> None:
        self._report.backend = backend.name
        self._report.backend_reason = "; ".join(filter(None, (backend.reason, *more)))


def _size(most: Most) -> str:
    """How the kind is called among what was measured."""
    return f"latents {most.kind}"
