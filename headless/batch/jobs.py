"""The jobs of a file, one line after another, each made when there is room for it.

The file is somebody else's: what it says is checked before the first job runs, and the workflows that it names lie in
one folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue

from ...trust import paths
from ...trust.foreign import BOM, Foreign, Unreadable, parse_as
from ..errors import WorkflowError
from ..workflow import settings
from ..workflow.graph import Graph, read_json
from ..workflow.schema import Schema
from ..workflow.settings import Setting
from .content import CacheKey, cache_key_of, content_of
from .matrix import Axis, Matrix, axes_of, combinations, count

MAX_LINE = 8 * 2**20  # bytes
EXAMPLE = '{"workflow": "cogvideox.json", "set": ["4.seed=7"]}'
REMEMBERED = 16  # workflows, read and checked; a file names few

Read = Callable[[Mapping[str, Any]], tuple[Graph, dict[str, Schema]]]  # as `read_local`


class Line(Foreign):
    model_config = ConfigDict(extra="forbid")
    workflow: Annotated[str, Field(min_length=1, max_length=1000)] | dict[str, JsonValue]  # a file's name, or itself
    changes: list[Annotated[str, Field(max_length=MAX_LINE)]] = Field(default=[], alias="set")
    matrix: Matrix = Matrix()
    name: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True)
class Job:
    name: str
    graph: Graph = field(repr=False)  # with every setting made
    content: str  # hash; its outputs lie under it
    cache_key: CacheKey
    attempts: int = 0  # that ended with their worker
    refusals: Mapping[str, str] = field(default_factory=dict)  # why, by the names of workers that do not take it


@dataclass(frozen=True)
class Unmade:
    """A combination of a matrix that is no job, and why."""

    name: str
    error: str
    content: str = "no job"


@dataclass(frozen=True)
class _Prepared:
    """A line whose workflow was read."""

    name: str
    graph: Graph
    schemas: Mapping[str, Schema]
    axes: Sequence[Axis]

    def job(self, place: int, chosen: Iterable[Setting], input_dir: Path | None) -> Job:
        graph = settings.apply(self.graph, chosen, self.schemas)
        content = content_of(graph, self.schemas, input_dir)
        return Job(self.name_of(place), graph, content, cache_key_of(graph))

    def name_of(self, place: int) -> str:
        return f"{self.name} #{place}" if count(self.axes) > 1 else self.name


class JobsFile:
    """A file of jobs. It is read as often as it is asked, and held nowhere.

    Args:
        file: one JSON object a line.
        workflows: the folder of the workflows that lines name.
        input_dir: where the images lie that workflows name; None: nowhere here.
        read: makes a graph of a workflow's JSON, with the schemas of the host that will run it.
    """

    def __init__(self, file: Path, *, workflows: Path, input_dir: Path | None, read: Read) -> None:
        self.file, self.workflows, self.input_dir, self._read = file, workflows, input_dir, read
        self._read_file = lru_cache(REMEMBERED)(lambda path: read(read_json(path)))

    def count(self) -> int:
        """How many jobs it holds. Every line is checked for it, the first job of each in full.

        Raises:
            WorkflowError: the file cannot be read, or which line is wrong and why; nothing ran.
        """
        jobs = 0
        for number, line in self._lines():
            with self._of_line(number):
                prepared = self._prepared(number, line)
                prepared.job(1, next(combinations(prepared.axes)), self.input_dir)
            jobs += count(prepared.axes)
        if not jobs:
            raise WorkflowError(f"{self.file} holds no jobs: write one JSON object a line, such as {EXAMPLE}.")
        return jobs

    def __iter__(self) -> Iterator[Job | Unmade]:
        """Raises WorkflowError, as `count` does."""
        for number, line in self._lines():
            with self._of_line(number):
                prepared = self._prepared(number, line)
            for place, chosen in enumerate(combinations(prepared.axes), 1):
                try:
                    with self._of_line(number):
                        job = prepared.job(place, chosen, self.input_dir)
                except WorkflowError as error:
                    job = Unmade(prepared.name_of(place), str(error))
                yield job

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not empty, with their numbers from 1."""
        try:
            if not self.file.is_file():  # it is read twice, which a pipe is not
                raise WorkflowError(
                    f"Found no file of jobs at {self.file}. Expected one JSON object a line: {EXAMPLE}."
                )
            with self.file.open("rb") as stream:
                for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), b""), 1):
                    if len(line) > MAX_LINE:
                        raise WorkflowError(f"{self.file} has a line of more than {MAX_LINE:,} bytes: line {number}.")
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise WorkflowError(f"Cannot read the jobs {self.file}: {error.strerror or error}.") from error

    def _prepared(self, number: int, text: bytes) -> _Prepared:
        try:
            line = parse_as(Line, text.removeprefix(BOM))
        except Unreadable as error:
            raise WorkflowError(f"{error}. Expected an object such as {EXAMPLE}.") from None
        graph, schemas = self._workflow(line.workflow)
        graph = settings.apply(graph, map(Setting.parse, line.changes), schemas)
        return _Prepared(line.name or f"line {number}", graph, schemas, axes_of(line.matrix, graph, schemas))

    def _workflow(self, named: str | Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
        if not isinstance(named, str):
            return self._read(named)
        try:
            path = paths.inside(self.workflows, named)
        except paths.Outside as fault:
            raise WorkflowError(
                f"{fault}. Workflows are read from {self.workflows} only: put it there, or name its folder with "
                "--workflows."
            ) from None
        return self._read_file(path)

    @contextmanager
    def _of_line(self, number: int) -> Iterator[None]:
        """Say of a line what is wrong with it."""
        try:
            yield
        except WorkflowError as error:
            raise type(error)(f"{self.file.name}, line {number}: {error}") from None
