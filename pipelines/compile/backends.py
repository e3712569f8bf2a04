"""Compiles a denoiser through OneDiff, block by block. Only this file imports onediff.

The blocks are compiled in a shallow copy of the denoiser. The original stays unchanged, so an fp32 rerun compiles
nothing. Block by block, because identical blocks share one compiled graph.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...precision.accumulation import NEXFORT_OPTION, NEXFORT_SWITCH, allowed
from ...precision.arch import COMPILED, Architecture
from ...precision.attention import Attended, missing
from ...precision.machine import first_line
from ...precision.overflow_detection import BlockWithNanAttention
from ...precision.policy import failure
from ...precision.shallow_copy import Make, replace_submodules
from ...trust.message import Message
from ..errors import BackendUnavailable
from .block import EAGER, Compiler, Compiling, Run

logger = logging.getLogger(__name__)

_COMPILING = "_onediff_guard_compiling"
ONEDIFF_BUILDS = "OneDiff needs OneFlow's special builds from OneFlow's own package index, not PyPI's"
NEXFORT_NEEDS = "it needs Python 3.11 or older and PyTorch 2.3 to 2.5.1"


@dataclass(frozen=True)
class BackendChoice:
    """The backend that compiles, and the reason for it."""

    name: str  # "oneflow", "nexfort", "inductor" or "eager"
    reason: str
    automatic: bool = False  # chosen by 'auto': if it fails, the next one is tried

    @property
    def asked_for(self) -> tuple[str, bool]:
        """The backend's key for compiled modules. It contains `automatic`: if 'auto' gave this backend up, a request
        by name must not reuse the module."""
        return self.name, self.automatic


MODES = ("default", "max-autotune-no-cudagraphs")  # inductor's. CUDA graphs overwrite a block's output


def uses_torch_kernels(backend: str) -> bool:
    return backend in ("inductor", "eager")


@dataclass(frozen=True)
class CompileOptions:
    """How blocks are compiled, whatever the backend calls it."""

    # True: one graph for all sizes. False: one for each. None: the backend's own way; inductor's is a graph for the
    # first size, and one for all others
    dynamic: bool | None = None
    mode: str = MODES[0]  # for inductor alone
    attention: str = ""  # one of `attention.KERNELS`, where PyTorch's attention is used, as by 'eager'; "": its choice
    channels_last: bool = False  # whether 2D convolutions lie in memory so; for inductor and 'eager'

    def given_to(self, backend: str) -> Any:
        """Return the options in the form of OneDiff's backend.

        OneDiff sets a variable of OneFlow's for each option, so accumulation is not among them: the switches are set
        already while a stage runs. nexfort gets their current value.
        """
        if backend == "inductor":
            return {"dynamic": self.dynamic, "mode": self.mode}
        dynamic: dict[str, Any] = {} if self.dynamic is None else {"dynamic": self.dynamic}
        if backend == "nexfort":
            return {"options": {NEXFORT_OPTION: allowed(NEXFORT_SWITCH)}, **dynamic}
        from onediff.infer_compiler import OneflowCompileOptions

        return OneflowCompileOptions(**dynamic)

    def in_words(self, backend: str) -> str:
        """Return the options that are not the defaults, and those that the backend ignores; "" if there are none."""
        attention = f"attention: {self.attention}" if self.attention else ""
        if attention and not uses_torch_kernels(backend):
            attention = f"{attention}: not used, {backend} has its own"
        if backend == "eager":
            return attention
        sizes = {None: "", True: "one graph for all sizes", False: "a graph for each size"}[self.dynamic]
        said = f"mode {self.mode}" if self.mode != MODES[0] else ""
        if said and backend != "inductor":
            said = f"{said}: not used, only inductor has modes"
        return ", ".join(filter(None, [sizes, said, attention]))


def choose_backend(request: str, device: torch.device) -> BackendChoice:
    """Resolve 'auto' to the first backend that works here; check one that was asked for by name. Raises
    BackendUnavailable, with what is missing, if that one does not work."""
    if request == "eager":
        return BackendChoice("eager", "as you chose: nothing is compiled")
    if request in _PROBES:
        if missing := _PROBES[request](device):
            raise BackendUnavailable("Backend '{}' does not work here: {}. Choose 'auto' or 'eager'.", request, missing)
        return BackendChoice(request, "as you chose")
    lacking: list[str] = []
    for name, probe in _PROBES.items():
        missing = probe(device)
        if not missing:
            return BackendChoice(name, f"auto: {'; '.join(lacking) or 'first choice'}", automatic=True)
        lacking.append(f"no {name}: {missing}")
    choice = BackendChoice("eager", f"auto: {'; '.join(lacking)}", automatic=True)
    logger.warning("not compiling: %s", choice.reason)
    return choice


def check_attention(kernel: str, device: torch.device) -> None:
    """Raise BackendUnavailable if an attention kernel, given by name, is not available here."""
    if kernel and (lacks := missing(kernel, device)):
        raise BackendUnavailable("Attention '{}' does not work here: {}. Choose 'auto'.", kernel, lacks)


def backend_states(device: torch.device) -> dict[str, str | None]:
    """Return {backend: what it lacks here, None if nothing}, in the order in which 'auto' tries them."""
    return {name: probe(device) for name, probe in _PROBES.items()}


def for_dtype(choice: BackendChoice, architecture: Architecture, dtype: str) -> BackendChoice:
    """Return the backend for a plan's dtype. No compiler makes bf16 code for a device that only emulates bf16, and
    'auto' skips compilers that failed the card's self-test. Raises BackendUnavailable if one was asked for by name."""
    if choice.automatic and choice.name != EAGER and COMPILED in architecture.failed:
        why = failure(architecture, COMPILED)
        return BackendChoice(EAGER, Message("auto: {} is available, but {}", choice.name, why), automatic=True)
    if dtype != "bf16" or architecture.native_bf16 or choice.name == "eager":
        return choice
    missing = Message("{} cannot compile bf16 for {}, which has no bf16 in hardware", choice.name, architecture)
    if choice.automatic:
        return BackendChoice("eager", f"auto: {missing}", automatic=True)
    raise BackendUnavailable("{}. Choose precision 'auto' or 'fp16', or backend 'eager'.", missing)


def compiled(
    denoiser: torch.nn.Module,
    parts: tuple[str, ...],
    choice: BackendChoice,
    how: CompileOptions | None = None,
    inside: Callable[[Any], Any] | None = None,  # block → the module that is compiled or runs eagerly
    *,
    device: torch.device | None = None,  # if not the CPU; other backends are tried there where one of 'auto' fails
) -> torch.nn.Module:
    """Return a shallow copy of the denoiser in which the named parts are compiled, a list block by block; the denoiser
    itself for 'eager'. Errors of a backend that was asked for by name pass."""
    if choice.name == EAGER:
        return replace_submodules(denoiser, dict.fromkeys(parts, _each(inside))) if inside else denoiser
    shared = Compiling(_compilers(choice, how or CompileOptions(), device or torch.device("cpu")), inside)
    shell = replace_submodules(denoiser, dict.fromkeys(parts, _each(shared.in_place_of)))
    logger.info("compiling %s of %s with %s", ", ".join(parts), type(denoiser).__name__, choice.name)
    shared.compile()
    shell.__dict__[_COMPILING] = shared
    return shell


def came_to(shell: torch.nn.Module, choice: BackendChoice) -> BackendChoice:
    """Return the backend that runs the blocks now; it differs from the choice if that one has failed."""
    shared = shell.__dict__.get(_COMPILING)
    if shared is None or not shared.given_up:
        return choice
    return BackendChoice(shared.backend, f"auto: {'; '.join(shared.given_up)}", automatic=True)


def _compilers(choice: BackendChoice, how: CompileOptions, device: torch.device) -> Iterator[Compiler]:
    """Yield the choice; if 'auto' made it, also its fallbacks. They work with every offload that it works with."""

    def of(name: str) -> Compiler:
        kernel = how.attention if uses_torch_kernels(name) else ""

        def compile_block(block: torch.nn.Module) -> Run:
            run = Attended(block, kernel) if kernel else block
            if name == EAGER:
                return run
            if name == "inductor" and device.type == "cpu":
                return partial(BlockWithNanAttention.run, _compile(BlockWithNanAttention(run), name, how))
            return _compile(run, name, how)

        return Compiler(name, compile_block, choice.automatic)

    yield of(choice.name)
    if choice.automatic:
        names = [*_PROBES]
        following = names[names.index(choice.name) + 1 :] if choice.name in names else []
        yield from (of(name) for name in following if not _PROBES[name](device))
        yield of(EAGER)


def _compile(block: torch.nn.Module, backend: str, how: CompileOptions) -> Run:
    import onediff.infer_compiler

    if backend == "inductor":
        _register_inductor()
    return onediff.infer_compiler.compile(block, backend=backend, options=how.given_to(backend))


def _each(make: Make) -> Make:
    """Return a function that applies `make` to each block of a list, or to a single part."""
    return lambda part: torch.nn.ModuleList(map(make, part)) if isinstance(part, torch.nn.ModuleList) else make(part)


def _register_inductor() -> None:
    """Register inductor as a backend of `onediff.infer_compiler.compile`, once: the pack can be imported twice.

    The compiled module is torch.compile's, without OneDiff's wrapper. block.py limits the number of compiled sizes.
    """
    from onediff.infer_compiler.backends import registry

    if "inductor" in registry._BACKENDS:
        return

    @registry.register_backend("inductor")
    def inductor(torch_module: torch.nn.Module, *, options: dict[str, Any] | None = None) -> Any:
        original = getattr(torch_module, "_torch_module", torch_module)
        return torch.compile(original, backend="inductor", **(options or {}))


def _missing_package(package: str, load: Callable[[], object], why: str, device: torch.device) -> str | None:
    """Return what a backend that needs a package lacks; None if nothing. load: imports it. why: what the
    package itself requires."""
    if device.type != "cuda":
        return f"{package} runs on CUDA devices, not on {device.type}"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed ({why})"
    try:
        load()
    except Exception as error:  # noqa: BLE001 - e.g. PyPI's placeholder, or an extension for another torch
        return f"this {package} cannot be used ({first_line(error)}; {why})"
    return None


def _inductor_missing(device: torch.device) -> str | None:
    if device.type == "mps":
        return "inductor is not used on mps"
    if importlib.util.find_spec("onediff") is None:
        return "onediff is not installed (pip install onediff==1.2.0)"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "inductor needs Triton, which is not installed (on Windows: pip install triton-windows)"
    if not find_c_compiler():
        return "inductor needs a C++ compiler, and none was found (set CXX, or install g++, clang++ or MSVC's cl)"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return (
            f"inductor needs Python's headers, and {headers} has no Python.h (Windows' embedded Python: put 'include' "
            "and 'libs' of the same Python's installer beside it; Linux: install python3-dev)"
        )
    return None


def find_c_compiler() -> str | None:
    """Return the path of the C++ compiler that inductor would use; None if there is none."""
    names = os.environ.get("CXX", ""), *(["cl"] if os.name == "nt" else ["g++", "clang++", "c++"])
    return next((path for name in names if name and (path := shutil.which(name))), None)


_PROBES: dict[str, Callable[[torch.device], str | None]] = {
    "oneflow": partial(
        _missing_package, "oneflow", lambda: importlib.import_module("oneflow.framework.args_tree"), ONEDIFF_BUILDS
    ),
    "nexfort": partial(
        _missing_package, "nexfort", lambda: importlib.import_module("nexfort.compilers"), NEXFORT_NEEDS
    ),
    "inductor": _inductor_missing,
}
BACKENDS = ("auto", *_PROBES, "eager")
