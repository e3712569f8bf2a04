"""What a headless run gives back, whichever host it ran on, and how it tells about its progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ...trust.foreign import Foreign, Unreadable, fitting
from ..errors import RunFailedError
from ..files import file_entries

MAX_LINE = 2000  # characters of a stage's summary


# What a stage's report has to hold for runs to be compared: other people's servers send them too.


class StepReport(Foreign):
    seconds: float
    stage: str
    outcome: str


class PlanReport(Foreign):
    component: str
    dtype: str
    guarded: bool


class EarlierReport(Foreign):
    """A stage within another, the image's encoder before the sampler for instance."""

    steps: list[StepReport] | tuple[StepReport, ...]


class StageReport(EarlierReport):
    plan: PlanReport
    before: list[EarlierReport] | tuple[EarlierReport, ...] = []
    protection: str | None = None


@dataclass(frozen=True)
class RunResult:
    outputs: dict[str, dict[str, Any]]  # node id -> its `ui` dictionary, as in ComfyUI's history
    results: dict[str, tuple[Any, ...]] = field(repr=False)  # node id -> its outputs; empty for a server's run
    files: list[Path]  # what was written, in the order of the nodes
    seconds: float  # from submission to the last file
    guards: tuple[str, ...] = ()  # what guards said that `--guard` had a server put in

    def summaries(self) -> list[str]:
        """One line for each guarded stage, as this pack's nodes and inserted guards put them."""
        lines = [line for ui in self.outputs.values() if "onediff_guard" in ui for line in _listed(ui, "text")]
        return [line[:MAX_LINE] for line in (*lines, *self.guards) if isinstance(line, str)]

    def stages(self) -> list[dict[str, Any]]:
        """The reports of all guarded stages, in the order of the nodes. Raises RunFailedError: a server tells of
        stages that no node of this pack can have had."""
        listed = [report for ui in self.outputs.values() for report in _listed(ui, "onediff_guard")]
        reports = [report for report in listed if isinstance(report, dict) and "steps" in report]
        try:
            fitting(list[StageReport], reports)
        except Unreadable as error:
            raise RunFailedError(f"The report of a stage is not what this pack's nodes write: {error}.") from None
        return reports

    def files_of(self, node: str) -> list[Path]:
        """What one node wrote."""
        writers = [writer for writer, ui in self.outputs.items() for entry in file_entries(ui)]
        return [file for writer, file in zip(writers, self.files, strict=True) if writer == node]


def _listed(ui: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = ui.get(key)
    return found if isinstance(found, (list, tuple)) else ()


@dataclass(frozen=True)
class RunProgress:
    node: str  # label of the node that runs
    value: float | None = None  # steps done, where the node counts any
    maximum: float | None = None


ProgressCallback = Callable[[RunProgress], None]


def no_progress(progress: RunProgress) -> None:
    """Tell nobody."""


@contextmanager
def printed_progress(stream: TextIO) -> Iterator[ProgressCallback]:
    """Prints each node as it starts, and on a terminal its steps too."""
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
    """diffusers and transformers draw none while they read or write weights: nodes tell their own progress."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with ExitStack() as restored:
        for library in (of_diffusers, of_transformers):
            if library.is_progress_bar_enabled():
                library.disable_progress_bar()
                restored.callback(library.enable_progress_bar)
        yield
