"""Half-precision accumulation, switched by architecture while a stage runs.

OneFlow reads its switches at kernel launch, so they must hold while a pipeline samples, not at compile time. It reads
unset as True, which gives NaN or black on some architectures (OneDiff issues 722, 955, 958). nexfort and PyTorch have
their own switches: a user who set OneFlow's under nexfort still got black (OneDiff issue 1115). bf16 has fp32's range,
so nothing is switched for it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any

from ..trust.message import Message
from .arch import Architecture

ATTENTION_SWITCH = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION"
SCORES_SWITCH = "ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_SCORE_ACCUMULATION_MAX_M"
FP16_SUMS = "allow_fp16_accumulation"  # of torch.backends.cuda.matmul, from PyTorch 2.7 on
NEXFORT_OPTION = "triton.fuse_attention_allow_fp16_reduction"  # the same at compile time
NEXFORT_SWITCH = "NEXFORT_ENABLE_FUSE_ATTENTION_FP16_REDUCTION"
SOURCE = "https://github.com/siliconflow/onediff/issues/958"
FAST_SOURCE = "https://github.com/siliconflow/onediff/pull/454"
_TRUE = frozenset({"1", "true", "yes", "on", "y"})  # the words that OneFlow reads as true
_FALSE = frozenset({"0", "false", "no", "off", "n", ""})


class Accumulation(str, Enum):
    """The loader's choice. The values are saved in users' workflow files: never rename, add at the end."""

    AUTO = "auto"  # by architecture
    FAST = "fast"  # in half precision, except attention scores
    FP16 = "fp16"  # as AUTO; the denoiser's fp16 products accumulate in fp16 if its first step allows it


class Mode(Enum):
    """Values of the switches, the safest first."""

    OFF = "off"
    FAST = "on, with attention scores in fp32"
    ON = "on"


@dataclass(frozen=True)
class Decision:
    """The mode for one architecture, and the reason."""

    mode: Mode
    reason: str
    source: str
    made_for: Architecture

    def reason_on(self, architecture: Architecture) -> str:
        shared = "" if architecture == self.made_for else "shared with another GPU in this process; "
        return shared + self.reason


def decide(
    architecture: Architecture, request: Accumulation = Accumulation.AUTO, others: Iterable[Architecture] = ()
) -> Decision:
    """Decide whether half-precision accumulation is allowed: only where reports say that it is right.

    others: architectures that this process computes on besides `architecture`. The switches are process-wide, so the
        safest of all modes is taken.
    """
    return _safest(_decide(row, request) for row in (architecture, *others))


def _decide(architecture: Architecture, request: Accumulation) -> Decision:
    if request is Accumulation.FAST:
        reason = "'fast', as you chose: half-precision accumulation, scores in fp32, reported correct on sm89"
        return Decision(Mode.FAST, reason, FAST_SOURCE, architecture)
    found = {
        "right": f"half-precision accumulation is reported correct on {architecture}",
        "wrong": f"half-precision accumulation gives NaN or black frames on {architecture}",
        "untried": f"half-precision accumulation has never been confirmed safe on {architecture}",
    }
    right = architecture.half_accumulation == "right"
    return Decision(Mode.ON if right else Mode.OFF, found[architecture.half_accumulation], SOURCE, architecture)


def _safest(decisions: Iterable[Decision]) -> Decision:
    return min(decisions, key=lambda decision: list(Mode).index(decision.mode))


@dataclass(frozen=True)
class Switch:
    """A switch's value while a stage runs, and who set it."""

    name: str
    value: str
    set_by: str  # "user", "onediff-guard", "others" (ComfyUI or another pack) or "default"
    reason: str

    @property
    def set_against_advice(self) -> bool:
        return self.set_by == "user" and self.reason != _SET


@dataclass(frozen=True)
class _Spec:
    """A process-wide switch, and its value in each mode. Modes that are not named leave it alone."""

    name: str
    values: dict[Mode, str]
    default: str | None  # PyTorch's; None for a variable, which is unset by default
    read: Callable[[], str | None]  # None: a variable that is unset, or a PyTorch that is older than the switch
    write: Callable[[str | None], None]

    def is_missing(self, before: str | None) -> bool:
        return before is None and self.default is not None

    def is_users(self, before: str | None) -> bool:
        """Whether the user set it. That is known only of variables: ComfyUI and other packs set PyTorch's switches."""
        return before is not None and self.default is None


def _environment(name: str, values: dict[Mode, str]) -> _Spec:
    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return _Spec(name, values, None, lambda: os.environ.get(name), write)


def _torch(name: str, default: bool, read: Callable[[Any], bool], write: Callable[[Any, bool], object]) -> _Spec:
    """read, write: called with `torch.backends.cuda`."""

    def current() -> str | None:
        import torch

        try:
            return str(read(torch.backends.cuda))
        except AttributeError:
            return None

    def set_to(value: str | None) -> None:
        import torch

        write(torch.backends.cuda, value == "True")

    return _Spec(f"torch.backends.cuda.{name}", {Mode.OFF: "False"}, str(default), current, set_to)


def _matmul(name: str, default: bool) -> _Spec:
    path = f"matmul.{name}"
    return _torch(path, default, attrgetter(path), lambda cuda, value: setattr(cuda.matmul, name, value))


SPECS: tuple[_Spec, ...] = (
    _environment(ATTENTION_SWITCH, {Mode.OFF: "0", Mode.FAST: "1", Mode.ON: "1"}),
    _environment(SCORES_SWITCH, {Mode.FAST: "0"}),
    # on by default; open OneFlow's flash attention accumulates in fp16 and does not read the switch for scores
    _environment("ONEFLOW_KERNEL_FMHA_ENABLE_TRT_FLASH_ATTN_IMPL", {Mode.OFF: "0", Mode.FAST: "0", Mode.ON: "1"}),
    _environment(NEXFORT_SWITCH, {Mode.OFF: "0", Mode.FAST: "0", Mode.ON: "1"}),
    _environment("NEXFORT_ENABLE_MATMUL_FP16_REDUCTION", {Mode.OFF: "0", Mode.FAST: "1", Mode.ON: "1"}),
    _matmul("allow_fp16_reduced_precision_reduction", True),
    _matmul(FP16_SUMS, False),
    _torch(
        "allow_fp16_bf16_reduction_math_sdp",
        False,
        lambda cuda: cuda.fp16_bf16_reduction_math_sdp_allowed(),
        lambda cuda, value: cuda.allow_fp16_bf16_reduction_math_sdp(value),
    ),
)
SWITCHES = tuple(spec.name for spec in SPECS)


class _Holders:
    """The stages that are running. The process-wide switches take the safest of their modes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.current: list[Decision] = []
        self.before: dict[str, str | None] = {}

    @contextmanager
    def joined(self, architecture: Architecture, own: Decision) -> Generator[tuple[Switch, ...]]:
        with self.lock:
            if not self.current:
                self.before = {spec.name: spec.read() for spec in SPECS}
            self.current.append(own)
            self.apply()
            switches = self.described(architecture, own, _safest(self.current))
        try:
            yield switches
        finally:
            with self.lock:
                self.current.remove(own)
                self.apply()

    def described(self, architecture: Architecture, own: Decision, safest: Decision) -> tuple[Switch, ...]:
        before = self.before if self.current else {spec.name: spec.read() for spec in SPECS}
        return tuple(
            _describe(spec, before[spec.name], own, safest.mode, safest.reason_on(architecture))
            for spec in SPECS
            if not spec.is_missing(before[spec.name])
        )

    def apply(self) -> None:
        mode = _safest(self.current).mode if self.current else None
        for spec in SPECS:
            before = self.before[spec.name]
            if not spec.is_missing(before):
                values = {} if spec.is_users(before) else spec.values
                value = before if mode is None else values.get(mode, before)
                if spec.read() != value:  # writing PyTorch's switch for reductions also allows split-k
                    spec.write(value)


_HOLDERS = _Holders()


@contextmanager
def accumulation(
    architecture: Architecture, request: Accumulation = Accumulation.AUTO, others: Iterable[Architecture] = ()
) -> Generator[tuple[Switch, ...]]:
    """Hold the switches while a stage runs, and yield their values. A value that the user set is left alone."""
    with _HOLDERS.joined(architecture, decide(architecture, request, others)) as switches:
        yield switches


def preview(
    architecture: Architecture, request: Accumulation = Accumulation.AUTO, others: Iterable[Architecture] = ()
) -> tuple[Switch, ...]:
    """Return the values that the switches would have while a stage runs, without setting them."""
    own = decide(architecture, request, others)
    with _HOLDERS.lock:
        return _HOLDERS.described(architecture, own, own)


def without_fp16_accumulation() -> str:
    """Say that this PyTorch lacks the switch for fp16 accumulation, and what to do; "" if it has one."""
    import torch

    if hasattr(torch.backends.cuda.matmul, FP16_SUMS):
        return ""
    return Message(
        "Accumulation 'fp16' needs PyTorch 2.7 or newer; this is {}. Choose accumulation 'auto', or update PyTorch.",
        torch.__version__,
    )


@contextmanager
def fp16_accumulation(on: bool | None) -> Generator[None]:
    """Hold PyTorch's switch for fp16 accumulation while a stage calls its network. The stage already holds the others.

    The switch is process-wide, and PyTorch reads it at each kernel launch. So it is on only while no other stage runs
    in this process, and a stage that starts meanwhile turns it off.

    on: None leaves it as it is.
    """
    if on is None:
        yield
        return
    import torch

    with _HOLDERS.lock:
        if _HOLDERS.current:
            setattr(torch.backends.cuda.matmul, FP16_SUMS, on and len(_HOLDERS.current) == 1)
    try:
        yield
    finally:
        with _HOLDERS.lock:
            if _HOLDERS.current:
                _HOLDERS.apply()


def allowed(name: str) -> bool:
    """Return whether a variable allows half precision. OneFlow and nexfort read unset as allowed."""
    return os.environ.get(name, "1").lower() in _TRUE


def _describe(spec: _Spec, before: str | None, own: Decision, mode: Mode, reason: str) -> Switch:
    if before is not None and spec.is_users(before):
        unsafe = spec.values.get(own.mode) == "0" and before.strip().lower() not in _FALSE
        return Switch(spec.name, before, "user", f"{_SET}, although {own.reason}" if unsafe else _SET)
    by_others = before != spec.default
    value = spec.values.get(mode, before)
    if value == before:
        return Switch(spec.name, "unset" if value is None else value, "others" if by_others else "default", _LEFT)
    after = f"; ComfyUI or another pack had set it to {before}, which is restored after the run" if by_others else ""
    return Switch(spec.name, value or "", "onediff-guard", reason + after)


_SET = "set before this run, respected"
_LEFT = "unchanged"
