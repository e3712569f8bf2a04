"""The compile cache: a folder of inductor's code for each target, so that later processes do not compile it again.

Each folder is a `TORCHINDUCTOR_CACHE_DIR`. Besides inductor's files it holds the result of
`torch.compiler.save_cache_artifacts` after the last run that compiled, for `onediff-guard compiled export`: one line of
JSON with its target, then the artifacts. Nothing here fails a run: errors are lines in the report and the log.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from ...precision.machine import Platform, first_line, platform_of
from ...precision.process_state import PROCESS_GATE
from ...trust import atomic_files
from ...trust.foreign import Foreign, parse_as
from ...trust.message import Message, for_file_name, shown
from ...trust.owners import why_unsafe_below
from ..errors import BadCompiled

if TYPE_CHECKING:
    from ...precision.policy import Plan
    from ...precision.report import RunReport
    from ..run.handle import PipelineHandle
    from .backends import CompileOptions
    from .block import Tell

logger = logging.getLogger(__name__)

SUFFIX = ".compiled"  # suffix of a target's folder
_MAX_HEADER = 2**16  # bytes of the JSON line
INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
SAVED, IMPORTED = "artifacts", "imported"  # files in a target's folder; the next run loads the imported one
_ASKED_AGAIN = 0.5  # seconds between two chances to interrupt a run that waits
_TURN = threading.RLock()  # reentrant: a warm-up runs inside another run
_Text = Annotated[str, Field(max_length=1000)]


@dataclass(frozen=True)
class Target:
    """The model, plan and machine that code was compiled for."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=False)  # accepts a JSON object, not only an instance

    model: _Text  # the variant's name
    config: _Text  # hash of the denoiser's or the VAE's config
    dtype: _Text
    plan: _Text  # the rest of the plan and the compile options that the code depends on
    machine: Platform

    @property
    def name(self) -> str:
        """The name of its folder, without the suffix."""
        facts = json.dumps(asdict(self), sort_keys=True)
        words = (for_file_name(text, limit=60) for text in (self.model, self.machine.architecture, self.dtype))
        return f"{'-'.join(words)}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def in_words(self) -> str:
        machine = self.machine
        return f"{self.model}, {self.dtype}, {self.plan}; {machine.device}, torch {machine.torch}, {machine.python}"


def target_of(handle: PipelineHandle, plan: Plan, options: CompileOptions) -> Target:
    """Return the target of a model's denoiser, or of its VAE's decoder if the plan is for decoding. Inductor itself
    distinguishes sizes and LoRAs."""
    model, of_vae = handle.store.model, plan.component.value == "vae_decode"
    read = model.vae_config if of_vae else model.denoiser_config
    config = {name: value for name, value in read.items() if not name.startswith("_")}
    of_what = "VAE decoder" if of_vae else f"{'' if plan.overflow_protection else 'no '}overflow protection"
    layout = "channels last" if options.channels_last else ""
    parts = [of_what, f"half accumulation {plan.accumulation}", layout, options.in_words("inductor")]
    return Target(
        model=model.variant.name,
        config=hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16],
        dtype=plan.numerics,
        plan=", ".join(filter(None, parts)),
        machine=platform_of(handle.store.placement.device, handle.architecture.name),
    )


class _ArchiveHeader(Foreign):
    kind: Literal["onediff-guard compiled code"]
    format: Literal[2]
    target: Target = Field(alias="for")
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]  # hash of the artifacts


def read(file: Path) -> tuple[Target, bytes]:
    """Read a file's target and its artifacts, without running them. Raises BadCompiled, OSError."""
    if file.exists() and not file.is_file():  # opening a pipe would wait for a writer
        raise BadCompiled("'{}' cannot be used as compiled code: {}.", shown(file.name, 100), "it is not a file")
    return parse(file.read_bytes(), file.name)


def parse(data: bytes, name: str) -> tuple[Target, bytes]:
    """Return the target and the artifacts in a file's bytes. name: for messages. Raises BadCompiled."""
    line, _, artifacts = data.partition(b"\n")
    try:
        if len(line) > _MAX_HEADER:
            raise ValueError(f"its first line has more than {_MAX_HEADER:,} bytes")
        header = parse_as(_ArchiveHeader, line)
        if hashlib.sha256(artifacts).hexdigest() != header.sha256:
            raise ValueError("it is damaged or incomplete")
    except ValueError as error:
        raise BadCompiled("'{}' cannot be used as compiled code: {}.", shown(name, 100), error) from None
    return header.target, artifacts


def write(file: Path, target: Target, artifacts: bytes) -> None:
    """Write the file, whole or not at all. Raises OSError."""
    digest = hashlib.sha256(artifacts).hexdigest()
    header = {"kind": "onediff-guard compiled code", "format": 2, "for": asdict(target), "sha256": digest}
    atomic_files.write_whole(file, json.dumps(header).encode() + b"\n" + artifacts)


@contextmanager
def compile_cache(
    compile_cache_dir: Path | None, target: Target, report: RunReport, tell: Tell = lambda _: None
) -> Generator[None]:
    """Have inductor use a target's folder inside; the user's `TORCHINDUCTOR_CACHE_DIR` if it is exported.

    The variables are the process's, so runs of other threads that compile with inductor wait.
    compile_cache_dir: the folder of all targets; None: inductor's default.
    tell: gets a line if this run has to wait; may raise, to interrupt.
    """
    with _own_turn(tell), ExitStack() as held:
        limit = atomic_files.limit_here(partial(_say, report))
        folder = _ready(compile_cache_dir, target, report) if compile_cache_dir and limit else None
        used = folder
        if why := _why_unsafe(folder):
            _say(report, f"compiled code is neither loaded nor kept, since another user can write to its folder: {why}")
            used, folder = Path(held.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))), None
        if used:
            held.enter_context(
                _exported({INDUCTOR: str(used), TRITON: (folder and exported(TRITON)) or f"{used}/triton"})
            )
        if folder:
            _load_imported(folder, target, report)
        from .block import graphs_compiled, graphs_from_cache

        anew = graphs_compiled() - graphs_from_cache()
        try:
            yield
        finally:
            if folder and graphs_compiled() - graphs_from_cache() > anew:
                _save(folder, target, limit, report)


def kept_folders(compile_cache_dir: Path) -> list[Path]:
    """Return the targets' folders, the last used first."""
    return sorted(compile_cache_dir.glob(f"*{SUFFIX}"), key=atomic_files.last_used, reverse=True)


def exportable(folder: Path) -> tuple[Target, bytes]:
    """Return the target of a folder and the artifacts in it. Raises BadCompiled, OSError."""
    return read(folder / IMPORTED if (folder / IMPORTED).exists() else folder / SAVED)


def keep_imported(compile_cache_dir: Path, target: Target, artifacts: bytes) -> None:
    """Keep artifacts from another machine, for the next run to load. Raises OSError."""
    folder = compile_cache_dir / f"{target.name}{SUFFIX}"
    folder.mkdir(0o700, parents=True, exist_ok=True)
    write(folder / IMPORTED, target, artifacts)


def exported(variable: str = INDUCTOR) -> str:
    """Return the cache folder that the user exported; "" if the variable is unset or was set by inductor itself."""
    value, temporary = os.environ.get(variable, ""), Path(tempfile.gettempdir()).absolute()
    own = temporary in Path(value).parents and Path(value).relative_to(temporary).parts[0].startswith("torchinductor_")
    return "" if own else value


def room_in_words(compile_cache_dir: Path) -> str:
    """Return in words where compiled code is kept, and how many GB of the limit it takes."""
    if own := exported():
        return f"inductor's own folder, as you exported {INDUCTOR}={own}"
    try:
        limit = atomic_files.limit_of(os.environ)
        sizes = [atomic_files.size_of(folder) for folder in kept_folders(compile_cache_dir)]
    except ValueError as error:
        return f"{atomic_files.LIMIT_VARIABLE} is not used: {error}"
    except OSError as error:
        return f"{compile_cache_dir} cannot be read: {error}"
    used = f"{compile_cache_dir}, {len(sizes)} kept, {sum(sizes) / 1e9:.2g} of {limit:g} GB"
    return used if limit else f"off ({atomic_files.LIMIT_VARIABLE}=0)"


def _ready(compile_cache_dir: Path, target: Target, report: RunReport) -> Path | None:
    """Return a target's folder, made if missing; None if the user exported another, or it cannot be made."""
    if own := exported():
        report.note(f"compiled code is kept in {INDUCTOR}={own}, as you exported it")
        return None
    folder = compile_cache_dir / f"{target.name}{SUFFIX}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        os.utime(folder)
    except OSError as error:
        _say(report, f"compiled code cannot be kept in {compile_cache_dir}: {error}")
        return None
    return folder


def _why_unsafe(folder: Path | None) -> str:
    """Return who else can write to the folders that code is loaded from; "" if nobody. Inductor's default is in the
    system's temporary folder, where other users can create it beforehand."""
    from torch._inductor.runtime.runtime_utils import default_cache_dir

    used = [str(folder or os.environ.get(INDUCTOR) or default_cache_dir()), exported(TRITON)]
    return next(filter(None, (why_unsafe_below(Path(place)) for place in used if place)), "")


def _load_imported(folder: Path, target: Target, report: RunReport) -> None:
    import torch

    file = folder / IMPORTED
    if not file.exists():
        return
    try:
        found, artifacts = read(file)
        if found != target or torch.compiler.load_cache_artifacts(artifacts) is None:
            raise ValueError("it is for another target or PyTorch version")
        file.replace(folder / SAVED)
    except FileNotFoundError:  # another process has loaded it into this folder
        return
    except Exception as error:  # noqa: BLE001 - whatever PyTorch raises: the run compiles then
        _say(report, f"imported compiled code was discarded: {first_line(error)}")
        with suppress(OSError):
            atomic_files.delete(file)


def _save(folder: Path, target: Target, limit: float, report: RunReport) -> None:
    """Save all code that this process compiled or found so far, and delete the oldest folders beyond `limit` GB."""
    import torch

    save = getattr(torch.compiler, "save_cache_artifacts", None)  # since PyTorch 2.7
    try:
        if save and (saved := save()):
            write(folder / SAVED, target, saved[0])
        atomic_files.drop_oldest(kept_folders(folder.parent), folder, limit)
    except OSError as error:
        _say(report, f"compiled code cannot be kept in {folder}: {error}")


@contextmanager
def _own_turn(tell: Tell) -> Generator[None]:
    with PROCESS_GATE.release():
        while not _TURN.acquire(timeout=_ASKED_AGAIN):
            tell(Message("waiting until another run has compiled"))
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def _exported(variables: Mapping[str, str]) -> Generator[None]:
    """Set variables inside. Inductor and Triton read them each time that they compile."""
    before = {variable: os.environ.get(variable) for variable in variables}
    with PROCESS_GATE.exclusive():
        os.environ.update(variables)
    try:
        yield
    finally:
        with PROCESS_GATE.exclusive():
            for variable, value in before.items():
                os.environ.pop(variable, None) if value is None else os.environ.update({variable: value})


def _say(report: RunReport, line: str) -> None:
    logger.warning("%s", line)
    report.note(line)
