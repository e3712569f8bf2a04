"""The result of a headless run, from any host, and its progress reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...trust.foreign import Foreign, Unreadable, fitting
from ..errors import RunFailedError
from ..files import file_entries

MAX_LINE = 2000  # most characters of a stage's summary


# The fields of a stage's report that a comparison needs. Reports of other people's servers are untrusted.


class StepReport(Foreign):
    seconds: float
    stage: str
    outcome: str


class PlanReport(Foreign):
    component: str
    dtype: str
    guarded: bool


class EarlierReport(Foreign):
    """A stage within another, for instance the image encoder before the sampler."""

    steps: list[StepReport] | tuple[StepReport, ...]


class StageReport(EarlierReport):
    plan: PlanReport
    before: list[EarlierReport] | tuple[EarlierReport, ...] = []
    protection: str | None = None


@dataclass(frozen=True)
class RunResult:
    outputs: dict[str, dict[str, Any]]  # node id -> its `ui` dictionary, as in ComfyUI's history
    results: dict[str, tuple[Any, ...]] = field(repr=False)  # node id -> its outputs; empty for a server's run
    files: list[Path]  # written files, in the order of the nodes
    seconds: float  # from submission to the last file
    guards: tuple[str, ...] = ()  # summaries of the guards that `--guard` inserted on a server

    def summaries(self) -> list[str]:
        """Return one line per guarded stage, as written by this pack's nodes and by inserted guards."""
        lines = [line for ui in self.outputs.values() if "onediff_guard" in ui for line in _listed(ui, "text")]
        return [line[:MAX_LINE] for line in (*lines, *self.guards) if isinstance(line, str)]

    def stages(self) -> list[dict[str, Any]]:
        """Return the reports of all guarded stages, in the order of the nodes. Raises RunFailedError if a server's
        reports cannot be from this pack's nodes."""
        listed = [report for ui in self.outputs.values() for report in _listed(ui, "onediff_guard")]
        reports = [report for report in listed if isinstance(report, dict) and "steps" in report]
        try:
            fitting(list[StageReport], reports)
        except Unreadable as error:
            raise RunFailedError(f"The report of a stage has an unknown format: {error}.") from None
        return reports

    def files_of(self, node: str) -> list[Path]:
        """Return the files that one node wrote."""
        writers = [writer for writer, ui in self.outputs.items() for entry in file_entries(ui)]
        return [file for writer, file in zip(writers, self.files, strict=True) if writer == node]


def _listed(ui: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = ui.get(key)
    return found if isinstance(found, (list, tuple)) else ()


@dataclass(frozen=True)
class RunProgress:
    node: str  # label of the running node
    value: float | None = None  # steps done, if the node counts them
    maximum: float | None = None


ProgressCallback = Callable[[RunProgress], None]


def no_progress(progress: RunProgress) -> None:
    """Report nothing."""


@contextmanager
def printed_progress(stream: TextIO) -> Iterator[ProgressCallback]:
    """Print each node as it starts; on a terminal also its steps."""
    node, open_line = "", False

    def tell(progress: RunProgress) -> None:
        nonlocal node, open_line
        if progress.node != node:
            print(f"\n{progress.node}" if open_line else progress.node, file=stream, flush=True)
            node, open_line = progress.node, False
        if stream.isatty() and progress.maximum:
            print(f"\r  {progress.value or 0:g} of {progress.maximum:g}", end="", file=stream, flush=True)
            open_line = True

    try:
        yield tell
    finally:
        if open_line:
            print(file=stream, flush=True)


@contextmanager
def libraries_without_bars() -> Iterator[None]:
    """Disable progress bars of diffusers and transformers for weights: nodes report their own progress."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as restored:
        for library in (of_diffusers, of_transformers):
            if library.is_progress_bar_enabled():
                library.disable_progress_bar()
                restored.callback(library.enable_progress_bar)
        yield
