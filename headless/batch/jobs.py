"""The jobs of a file, one line after another, each made when there is room for it.

A line is `{"workflow": …, "set": [...], "matrix": {...}, "name": …}`. The file is somebody else's: what it says is
checked before the first job runs, and the workflows that it names lie in one folder.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import ConfigDict, Field, JsonValue

from ...trust import paths
from ...trust.foreign import Foreign, Unreadable, parse_as
from ...trust.text import shown
from ..errors import WorkflowError
from ..workflow import settings
from ..workflow.graph import Graph, read_json
from ..workflow.schema import Schema
from ..workflow.settings import Setting
from .content import content_of
from .matrix import Matrix, Product, product
from .pipeline_cache import CacheKey, cache_key_of

MAX_LINE = 8 * 2**20  # bytes
EXAMPLE = '{"workflow": "cogvideox.json", "set": ["4.seed=7"]}'
REMEMBERED = 16  # workflows, read and checked; a file names few

Read = Callable[[Mapping[str, Any]], tuple[Graph, dict[str, Schema]]]  # as `read_local`


class Line(Foreign):
    """One line of a file of jobs."""

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


@dataclass(frozen=True)
class _Prepared:
    """A line whose workflow was read."""

    name: str
    graph: Graph
    schemas: Mapping[str, Schema]
    product: Product

    def name_of(self, place: int) -> str:
        return f"{self.name} #{place + 1}" if len(self.product) > 1 else self.name


class JobsFile:
    """A file of jobs. It is read as often as it is asked, and held nowhere.

    Args:
        file: one JSON object a line.
        workflows: the folder of the workflows that lines name.
        input_dir: where the images lie that workflows name; None: nowhere here.
        read: makes a graph of a workflow's JSON, with the schemas of the host that will run it.
    """

    def __init__(self, file: Path, *, workflows: Path, input_dir: Path | None, read: Read) -> None:
        self.file, self.workflows, self.input_dir = file, workflows, input_dir
        self._read = read
        self._known: OrderedDict[Path, tuple[Graph, dict[str, Schema]]] = OrderedDict()

    def count(self) -> int:
        """How many jobs it holds. Every line is checked for it, the first job of each in full.

        Raises:
            WorkflowError: the file cannot be read, or which line is wrong and why; nothing ran.
        """
        jobs = 0
        for number, line in self._lines():
            with _of_line(self.file, number):
                prepared = self._prepared(number, line)
                self._job(prepared, 0)
            jobs += len(prepared.product)
        if not jobs:
            raise WorkflowError(f"{self.file} holds no jobs: write one JSON object a line, such as {EXAMPLE}.")
        return jobs

    def __iter__(self) -> Iterator[Job | Unmade]:
        """Raises WorkflowError, as `count` does."""
        for number, line in self._lines():
            with _of_line(self.file, number):
                prepared = self._prepared(number, line)
            for place in range(len(prepared.product)):
                yield self._made(prepared, place, number)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Lines that are not empty, with their numbers from 1."""
        try:
            if not self.file.is_file():  # it is read twice, which a pipe is not
                raise WorkflowError(
                    f"Found no file of jobs at {self.file}. Expected one JSON object a line: {EXAMPLE}."
                )
            with self.file.open("rb") as stream:
                for number, line in enumerate(iter(lambda: _line(stream, self.file), b""), 1):
                    if line.strip():
                        yield number, line
        except OSError as error:
            raise WorkflowError(f"Cannot read the jobs {self.file}: {error.strerror or error}.") from error

    def _prepared(self, number: int, text: bytes) -> _Prepared:
        try:
            line = parse_as(Line, text.removeprefix(b"\xef\xbb\xbf"))
        except Unreadable as error:
            raise WorkflowError(f"{error}. Expected an object such as {EXAMPLE}.") from None
        graph, schemas = self._workflow(line.workflow)
        changes = tuple(Setting.parse(change) for change in line.changes)
        changed = settings.apply(graph, changes, schemas)
        return _Prepared(line.name or f"line {number}", changed, schemas, product(line.matrix, changed, schemas))

    def _made(self, prepared: _Prepared, place: int, number: int) -> Job | Unmade:
        try:
            return self._job(prepared, place)
        except WorkflowError as error:
            return Unmade(prepared.name_of(place), f"{self.file.name}, line {number}: {error}")

    def _job(self, prepared: _Prepared, place: int) -> Job:
        graph = settings.apply(prepared.graph, prepared.product[place], prepared.schemas)
        return Job(
            name=prepared.name_of(place),
            graph=graph,
            content=content_of(graph, prepared.schemas, self.input_dir),
            cache_key=cache_key_of(graph),
        )

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
        if path not in self._known:
            self._known[path] = self._read(read_json(path))
        self._known.move_to_end(path)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return self._known[path]


def _line(stream: BinaryIO, file: Path) -> bytes:
    line = stream.readline(MAX_LINE + 1)
    if len(line) > MAX_LINE:
        raise WorkflowError(
            f"{file} has a line of more than {MAX_LINE:,} bytes: {shown(line[:40].decode(errors='replace'))}."
        )
    return line


@contextmanager
def _of_line(file: Path, number: int) -> Iterator[None]:
    """Say of a line what is wrong with it."""
    try:
        yield
    except WorkflowError as error:
        raise type(error)(f"{file.name}, line {number}: {error}") from None
