"""What inductor compiles outlasts the process: kept in a folder, one file for each model, plan and machine.

A run works in a folder of its own process. It is filled from the kept file, every byte of which is checked before it is
used (a library that was cut short would take the process with it), and written back when something was compiled. So
two processes cannot disturb each other, and dropping a file harms no run. Nothing here can fail a run: what goes wrong
is a line in the report and the log.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ...precision.machine import first_line
from ...precision.shared import TURNS
from ...trust.atomic_files import LIMIT_VARIABLE, delete, drop_oldest, last_used, limit_here, limit_of
from ...trust.message import Message
from ...trust.owners import why_unsafe_below
from ...trust.text import shown
from ..errors import BadCompiled
from .code import SUFFIX, check, files_in, pack, unpack

if TYPE_CHECKING:
    from ...precision.report import RunReport
    from .block import Tell
    from .target import Target

logger = logging.getLogger(__name__)

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
_ASKED_AGAIN = 0.5  # seconds after which a run that waits may be interrupted
_STALE = 24 * 3600  # seconds after which what nobody finished or deleted is nobody's
_PREFIX = "onediff_guard_"  # of a process's folder; its number follows
_TURN = threading.RLock()  # a run that warms up may be inside of another


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
        limit = limit_here(partial(_say, report))
        work = _ready(kept, target, report) if kept and limit else None
        if work is None:
            with _folders_of_inductor(report):
                yield
            return
        try:
            with _folders(work.folder):
                yield
        except Exception as error:  # not an interrupt of the process, which may have ended the compiler, too
            if not _of_the_compiler(error):
                _keep(work, limit, report)
            elif work.known:
                _say(report, "compiling failed, so the compile cache for it is thrown away")
                _throw_away(work, report)
            raise
        else:
            _keep(work, limit, report)


def kept_files(folder: Path) -> list[Path]:
    """Those used last first."""
    return sorted(folder.glob(f"*{SUFFIX}"), key=last_used, reverse=True)


def take_in(folder: Path, name: str, data: bytes) -> None:
    """Keep a file of compiled code that another process of the user's sent, beside what is here for the same target.
    What does not fit this machine, or is damaged, is left alone: a run compiles then.

    name: of the file there. data: all of it.
    """
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}_", ignore_cleanup_errors=True) as holder:
        sent, together = Path(holder) / f"sent{SUFFIX}", Path(holder) / "together"
        try:
            together.mkdir()
            sent.touch(0o600)
            sent.write_bytes(data)
            target = check(sent)
            if name != f"{target.name}{SUFFIX}":
                raise BadCompiled("it is called '{}' and is for {}", shown(name), target.name)
            folder.mkdir(parents=True, exist_ok=True)
            here = folder / name
            if here.exists():
                unpack(here, target, together)
            known = files_in(together)
            unpack(sent, target, together)
            if files_in(together) != known:
                pack(together, target, here)
            if work := _works.get(here):
                unpack(sent, target, work.folder)
        except (BadCompiled, OSError) as error:
            logger.warning("compiled code from another machine is not used: %s", error)


def exported(variable: str = INDUCTOR) -> str:
    """A folder of inductor's as the user exported it, "" where it is inductor's own choice, which it exports too."""
    value, temporary = os.environ.get(variable, ""), Path(tempfile.gettempdir()).absolute()
    own = temporary in Path(value).parents and Path(value).relative_to(temporary).parts[0].startswith("torchinductor_")
    return "" if own else value


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


def _ready(kept: Path, target: Target, report: RunReport) -> _Work | None:
    """The folder to compile in, with what inductor has loaded from others forgotten: it would not write that to this
    one. None where there can be none."""
    if own := exported():
        report.note(f"compiled code is kept in {INDUCTOR}={own}, as it was exported")
        return None
    try:
        work = _opened(kept / f"{target.name}{SUFFIX}", target, report)
        with TURNS.alone():
            _forget_loaded()
            _offer_built(work.folder)
    except Exception as error:  # noqa: BLE001 - no disk, a broken inductor, one of other names: a run does without
        _say(report, f"compiled code is not kept: {first_line(error)}")
        return None
    return work


def _opened(file: Path, target: Target, report: RunReport) -> _Work:
    """The process's own folder for a target, filled with what is kept."""
    with suppress(OSError):
        os.utime(file)
    if file not in _works:
        _drop_stale(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"))
        holder = tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}_", ignore_cleanup_errors=True)
        work = _Work(target, file, holder)
        if _fill(work, report):
            work.known = files_in(work.folder)
        _forget_probes()
        _works[file] = work
    return _works[file]


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


def _drop_stale(left: Iterable[Path]) -> None:
    """Delete what processes left that were killed. Their folders are named by their numbers."""
    for path in left:
        process = path.name.removeprefix(_PREFIX).partition("_")[0]
        running = process.isdigit() and psutil.pid_exists(int(process))
        if not running and time.time() - last_used(path) > _STALE:
            with suppress(OSError):
                delete(path)


@contextmanager
def _own_turn(tell: Tell) -> Generator[None]:
    with TURNS.away():
        while not _TURN.acquire(timeout=_ASKED_AGAIN):
            tell(Message("waiting for another run that compiles"))
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def _folders_of_inductor(report: RunReport) -> Generator[None]:
    """Inductor's own, or the exported one; a new one where another user could have put code there: the default is in
    the system's temporary folder, which others can make beforehand."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    used = [os.environ.get(INDUCTOR) or default_cache_dir(), exported(TRITON)]
    why = next(filter(None, (why_unsafe_below(Path(folder)) for folder in used if folder)), "")
    if not why:
        yield
        return
    _say(report, f"compiled code is not taken from where another user could have written it, and not kept: {why}")
    prefix = f"{_PREFIX}{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as holder, _folders(Path(holder)):
        yield


@contextmanager
def _folders(folder: Path) -> Generator[None]:
    """Inductor and Triton read these variables whenever they compile."""
    shared = exported(TRITON)
    if shared and (why := why_unsafe_below(Path(shared))):
        logger.warning("%s=%s is not used: another user could have written there: %s", TRITON, shared, why)
        shared = ""
    ours = {INDUCTOR: str(folder), TRITON: shared or str(folder / "triton")}
    before = {variable: os.environ.get(variable) for variable in ours}
    with TURNS.alone():
        _export(ours)
    try:
        yield
    finally:
        with TURNS.alone():
            _export(before)
            _forget_loaded()


def _export(variables: Mapping[str, str | None]) -> None:
    for variable, value in variables.items():
        os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})


def _forget_loaded() -> None:
    from torch._inductor import utils

    clear: Any = getattr(utils, "clear_caches", None) or getattr(utils, "clear_inductor_caches", lambda: None)
    clear()


def _offer_built(folder: Path) -> None:
    """Libraries that are there are loaded as they are. Asked for by their source, inductor would first precompile the
    C++ headers to build them with, for 5 s and 150 MB of the temporary folder."""
    from torch._inductor import codecache

    loader: Any = getattr(codecache, "CppPythonBindingsCodeCache", None)
    if hasattr(loader, "cache") and hasattr(loader, "_load_library"):
        for library in folder.glob("*/*.main.so"):
            key = library.name.removesuffix(".main.so")
            loader.cache[key] = partial(loader._load_library, str(library), key)


def _forget_probes() -> None:
    """Which vector instructions the compiler can build for, found by building: a kept file needs those libraries."""
    from torch._inductor import cpu_vec_isa

    kinds = [kind for kind in vars(cpu_vec_isa).values() if isinstance(kind, type)]
    for probe in (probe for kind in (cpu_vec_isa, *kinds) for probe in vars(kind).values()):
        if hasattr(probe, "cache_clear"):
            probe.cache_clear()


def _of_the_compiler(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _say(report: RunReport, line: str) -> None:
    logger.warning("%s", line)
    report.note(line)
