"""What inductor compiles outlasts the process: kept in a folder, one file for each model, plan and machine.

A run works in a folder of its own process. It is filled from the kept file, every byte of which is checked before it is
used (a library that was cut short would take the process with it), and written back when something was compiled. So
two processes cannot disturb each other, and dropping a file harms no run. Nothing here can fail a run: what goes wrong
is a line in the report and the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ...precision.shared import TURNS
from ..atomic_files import LIMIT_VARIABLE, delete, drop_oldest, last_used, limit_here, limit_of
from ..errors import BadCompiled
from ..insight.machine import first_line, version_of
from .code import SUFFIX, Platform, Target, files_in, pack, unpack

if TYPE_CHECKING:
    import torch

    from ...precision.arch import Architecture
    from ...precision.policy import Plan
    from ...precision.report import RunReport
    from ..models.on_disk import StoredModel
    from .backends import CompileOptions
    from .block import Tell

logger = logging.getLogger(__name__)

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_ASKED_AGAIN = 0.5  # seconds after which a run that waits may be interrupted
_STALE = 24 * 3600  # seconds after which what nobody finished or deleted is nobody's
_PREFIX = "onediff_guard_"  # of a process's folder; its number follows


@contextmanager
def inductor_folders(
    kept: Path | None, target: Target, report: RunReport, tell: Tell = lambda _: None
) -> Generator[None]:
    """Hold inductor's folders while a pipeline samples: what earlier processes compiled is there, and what is compiled
    now is kept.

    Folders are the process's, so another thread's run that compiles by inductor waits until this one has sampled.
    kept: the folder of what earlier processes compiled; None: nothing is kept.
    tell: is given a line where this one waits; may raise, to interrupt.
    """
    with _own_turn(tell):
        yield from _kept(kept, target, report)


def _kept(folder: Path | None, target: Target, report: RunReport) -> Generator[None]:
    limit = limit_here(partial(_say, report))
    if folder is None or not limit:
        yield
        return
    if own := exported():
        report.note(f"compiled code is kept in {INDUCTOR}={own}, as it was exported")
        yield
        return
    work = _ready(folder, target, report)
    if work is None:
        yield
        return
    try:
        with _folders(work):
            yield
    except (KeyboardInterrupt, SystemExit):  # it may have ended the compiler, too
        raise
    except Exception as error:
        if not _of_the_compiler(error):
            _keep(work, limit, report)
        elif work.known:
            _say(report, "compiling failed, so the compile cache for it is thrown away")
            _throw_away(work, report)
        raise
    else:
        _keep(work, limit, report)


def target_of(
    model: StoredModel, plan: Plan, options: CompileOptions, device: torch.device, architecture: Architecture
) -> Target:
    """What a model's denoiser is compiled for. Sizes, LoRAs and islands are told apart by inductor itself."""
    config = {name: value for name, value in model.denoiser_config.items() if not name.startswith("_")}
    parts = [
        "wide stream" if plan.wide else "narrow stream",
        f"half accumulation {plan.accumulation}",
        options.in_words("inductor"),
    ]
    return Target(
        model=model.variant.name,
        config=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        dtype=plan.dtype,
        plan=", ".join(filter(None, parts)),
        machine=platform_of(device, architecture.name),
    )


@lru_cache
def platform_of(device: torch.device, architecture: str) -> Platform:
    import torch

    libc = " ".join(platform.libc_ver())
    return Platform(
        architecture=architecture,
        device=_cpu() if device.type == "cpu" else torch.cuda.get_device_name(device),
        torch=torch.__version__,
        triton="" if device.type == "cpu" else _triton_version(),
        python=str(sys.implementation.cache_tag),
        system=", ".join(filter(None, [f"{platform.system()} {platform.machine()}", libc])),
    )


def kept_files(folder: Path) -> list[Path]:
    """Those used last first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=last_used, reverse=True)


def exported() -> str:
    """Inductor's folder as the user exported it, "" where it is inductor's own choice, which it exports too."""
    value = os.environ.get(INDUCTOR, "")
    return "" if _set_by_torch(value) else value


def room_in_words(folder: Path) -> str:
    """Where compiled code is kept, and how much of how much is used."""
    try:
        limit = limit_of(os.environ)
    except ValueError as error:
        return f"{LIMIT_VARIABLE} is not used: {error}"
    if own := exported():
        return f"inductor's own, {INDUCTOR}={own}, as it was exported"
    if not limit:
        return f"off ({LIMIT_VARIABLE}=0)"
    try:
        sizes = [file.stat().st_size for file in kept_files(folder)]
    except OSError as error:
        return f"{folder} cannot be read: {error}"
    return f"{folder}, {len(sizes)} kept, {sum(sizes) / 1e9:.2g} of {limit:g} GB"


@dataclass
class _Work:
    """The folder in which this process compiles for one target."""

    target: Target
    file: Path  # where it is kept
    holder: tempfile.TemporaryDirectory[str]  # gone with the process
    known: dict[str, int] = field(default_factory=dict)  # files that are kept already

    @property
    def folder(self) -> Path:
        return Path(self.holder.name)


_works: dict[Path, _Work] = {}  # of this process


def _ready(folder: Path, target: Target, report: RunReport) -> _Work | None:
    """The folder to compile in, with what inductor has loaded from others forgotten: it would not write that to this
    one. None where there can be none."""
    try:
        work = _opened(folder, target, report)
        with TURNS.alone():
            _forget_loaded()
            _offer_built(work.folder)
    except Exception as error:  # noqa: BLE001 - no disk, a broken inductor, one of other names: a run does without
        _say(report, f"compiled code is not kept: {first_line(error)}")
        return None
    return work


def _opened(folder: Path, target: Target, report: RunReport) -> _Work:
    """The process's own folder for a target, filled with what is kept."""
    file = folder / f"{target.name}{SUFFIX}"
    with suppress(OSError):
        os.utime(file)
    if file in _works:
        return _works[file]
    _drop_stale(_left_behind())
    holder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}_", ignore_cleanup_errors=True)
    work = _Work(target, file, holder)
    if _fill(work, report):
        work.known = files_in(work.folder)
    _forget_probes()
    _works[file] = work
    return work


def _fill(work: _Work, report: RunReport) -> bool:
    """With what is kept, if anything. What cannot be used is thrown away: False."""
    try:
        unpack(work.file, work.target, work.folder)
    except FileNotFoundError:
        return False
    except (BadCompiled, OSError) as error:
        _say(report, f"the compile cache is thrown away, and what it held is compiled again: {error}")
        _delete(work.file, report)
        return False
    return True


def _throw_away(work: _Work, report: RunReport) -> None:
    shutil.rmtree(work.folder, ignore_errors=True)
    work.folder.mkdir(exist_ok=True)
    work.known = {}
    _delete(work.file, report)


def _delete(file: Path, report: RunReport) -> None:
    try:
        delete(file)
    except OSError as error:
        _say(report, f"it could not be deleted: {error}")


def _keep(work: _Work, limit: float, report: RunReport) -> None:
    """Write back what was compiled, with what another process has kept meanwhile."""
    try:
        found = files_in(work.folder)
        if found == work.known and (work.file.exists() or not found):
            return
        work.file.parent.mkdir(parents=True, exist_ok=True)
        _fill(work, report)
        pack(work.folder, work.target, work.file)
        work.known = files_in(work.folder)
        logger.info("keeping compiled code: %s", work.file)
        drop_oldest(kept_files(work.file.parent), work.file, limit)
        _drop_stale(work.file.parent.glob(".*.tmp"))
    except OSError as error:
        _say(report, f"compiled code could not be kept in {work.file.parent}: {error}")


def _left_behind() -> Iterator[Path]:
    """Folders of processes that were killed before they could delete them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        process = folder.name.removeprefix(_PREFIX).partition("_")[0]
        if not (process.isdigit() and psutil.pid_exists(int(process))):
            yield folder


def _drop_stale(left: Iterable[Path]) -> None:
    for path in left:
        if time.time() - last_used(path) > _STALE:
            with suppress(OSError):
                delete(path)


_TURN = threading.RLock()  # a run that warms up may be inside of another


@contextmanager
def _own_turn(tell: Tell) -> Generator[None]:
    with TURNS.away():
        while not _TURN.acquire(timeout=_ASKED_AGAIN):
            tell("waiting for another run that compiles")
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def _folders(work: _Work) -> Generator[None]:
    """Inductor and Triton read these variables whenever they compile."""
    before = {variable: os.environ.get(variable) for variable in (INDUCTOR, TRITON)}
    with TURNS.alone():
        os.environ[INDUCTOR] = str(work.folder)
        triton = before[TRITON]
        if triton is None or _set_by_torch(triton):
            os.environ[TRITON] = str(work.folder / "triton")
    try:
        yield
    finally:
        with TURNS.alone():
            for variable, value in before.items():
                os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})
            _forget_loaded()


def _forget_loaded() -> None:
    from torch._inductor import utils

    clear: Any = getattr(utils, "clear_caches", None) or getattr(utils, "clear_inductor_caches", lambda: None)
    clear()


def _offer_built(folder: Path) -> None:
    """Libraries that are there are loaded as they are. Asked for by their source, inductor would first precompile the
    C++ headers to build them with, for 5 s and 150 MB of the temporary folder."""
    from torch._inductor import codecache

    loader: Any = getattr(codecache, "CppPythonBindingsCodeCache", None)
    if not (hasattr(loader, "cache") and hasattr(loader, "_load_library")):
        return
    for library in folder.glob("*/*.main.so"):
        key = library.name.removesuffix(".main.so")
        loader.cache[key] = partial(loader._load_library, str(library), key)


def _forget_probes() -> None:
    """Which vector instructions the compiler can build for, found by building: a kept file needs those libraries."""
    from torch._inductor import cpu_vec_isa

    kinds = [kind for kind in vars(cpu_vec_isa).values() if isinstance(kind, type)]
    probes = [probe for kind in kinds for probe in vars(kind).values()]
    for probe in [*probes, *vars(cpu_vec_isa).values()]:
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()


def _set_by_torch(value: str) -> bool:
    """To its default, when it was asked for it."""
    path, temporary = Path(value), Path(tempfile.gettempdir()).absolute()
    return temporary in path.parents and path.relative_to(temporary).parts[0].startswith("torchinductor_")


def _of_the_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _say(report: RunReport, line: str) -> None:
    logger.warning("%s", line)
    report.note(line)


def _triton_version() -> str:
    names = ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu")
    return next((version for name in names if (version := version_of(name))), "")


def _cpu() -> str:
    """Inductor compiles for the very CPU: code for one with more instruction sets would end this process."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    sets = facts.get("flags") or facts.get("Features") or torch.backends.cpu.get_cpu_capability()
    return f"{name}, {hashlib.sha256(' '.join(sorted(sets.split())).encode()).hexdigest()[:8]}"
