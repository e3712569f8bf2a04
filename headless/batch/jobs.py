"""Jobs of a file: each line is a workflow with settings, or a matrix of them. Jobs are created lazily.

The file is untrusted: all lines are checked before the first job runs, and the workflows that it names must be in one
folder.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, JsonValue

from ...trust import paths
from ...trust.foreign import BOM, Foreign, Unreadable, parse_as
from ...trust.message import listed
from ..errors import RunFailedError, WorkflowError
from ..workflow import settings
from ..workflow.graph import Graph, GraphNode, Link, read_json
from ..workflow.schema import SEED_NAMES, Schema
from ..workflow.settings import Setting
from .content import CacheKey, JobImage, cache_key_of, content_of, images_of

MAX_LINE = 8 * 2**20  # bytes
EXAMPLE = '{"workflow": "cogvideox.json", "set": ["4.seed=7"]}'
REMEMBERED = 16  # checked workflows that are cached; a file names few
MAX_JOBS = 10_000_000  # per line
MAX_SEED = 2**64 - 1
PRECISION, FOLLOWS = "precision", "inherit"
FRAMES = ("frames", "length", "num_frames", "video_frames")  # names of inputs for the number of frames

T = TypeVar("T")
_Some = Annotated[list[T], Field(min_length=1)]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
_Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[1-9][0-9]{0,4})?$")]

Read = Callable[[Mapping[str, Any]], tuple[Graph, dict[str, Schema]]]  # as `read_local`


class Seeds(Foreign):
    model_config = ConfigDict(extra="forbid")
    first: _Seed = 0
    count: Annotated[int, Field(ge=1, le=MAX_JOBS)]


class Matrix(Foreign):
    """The varied inputs. Every value of each is combined with every value of the others."""

    model_config = ConfigDict(extra="forbid")
    precisions: _Some[str] = []
    sizes: _Some[_Size] = []  # "WIDTHxHEIGHT" or "WIDTHxHEIGHTxFRAMES", in pixels
    inputs: dict[str, _Some[JsonValue]] = {}  # any other input: NODE.INPUT → its values
    prompts: _Some[str] = []
    seeds: _Some[_Seed] | Seeds = []


class JobLine(Foreign):
    model_config = ConfigDict(extra="forbid")
    workflow: Annotated[str, Field(min_length=1, max_length=1000)] | dict[str, JsonValue]  # a file name, or itself
    changes: list[Annotated[str, Field(max_length=MAX_LINE)]] = Field(default=[], alias="set")
    matrix: Matrix = Matrix()
    name: Annotated[str, Field(max_length=200)] = ""


@dataclass(frozen=True)
class Job:
    name: str
    graph: Graph = field(repr=False)  # with all settings applied
    content: str  # content hash, which names the folder of its outputs
    cache_key: CacheKey
    images: Mapping[str, JobImage] = field(default_factory=dict)  # that the content hash covers, by name
    attempts: int = 0  # attempts that killed their worker
    refusals: Mapping[str, str] = field(default_factory=dict)  # names of workers that do not accept it → the reason


@dataclass(frozen=True)
class Unmade:
    """A combination of a matrix that cannot be a job, and the reason."""

    name: str
    error: str
    content: str = "no job"


class JobsFile:
    """A file of jobs. Each iteration reads it again; its jobs are not kept.

    file: one JSON object per line.
    workflows: the folder of the workflows that lines name.
    input_dir: the folder of the workflows' images; None: not on this machine.
    read: converts a workflow's JSON to a graph, with the schemas of the host that will run it.
    """

    def __init__(self, file: Path, *, workflows: Path, input_dir: Path | None, read: Read) -> None:
        self.file, self.workflows, self.input_dir, self._read = file, workflows, input_dir, read
        self._read_file = lru_cache(REMEMBERED)(lambda path: read(read_json(path)))

    def count(self) -> int:
        """Return the number of jobs. Checks every line, and the first job of each in full.

        Raises WorkflowError if the file cannot be read, or a line is wrong: it names the line and the reason.
        """
        total = 0
        for number, line in self._lines():
            jobs, made = self._read_line(number, line)
            if isinstance(first := next(made), Unmade):
                raise WorkflowError(first.error)
            total += jobs
        if not total:
            raise WorkflowError(f"{self.file} holds no jobs: write one JSON object per line, such as {EXAMPLE}.")
        return total

    def __iter__(self) -> Iterator[Job | Unmade]:
        """Raises RunFailedError for a wrong line: since `count` found none, the file has changed."""
        try:
            for number, line in self._lines():
                yield from self._read_line(number, line)[1]
        except WorkflowError as error:
            raise RunFailedError(
                f"The jobs file changed while the batch ran: {error} Finished jobs are complete. Correct the file and "
                "run the same command to continue."
            ) from None

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield non-empty lines with their numbers, from 1, without byte order marks."""
        try:
            if not self.file.is_file():  # it is read twice: no pipe
                raise WorkflowError(
                    f"There is no jobs file {self.file}. Expected one JSON object per line, such as {EXAMPLE}."
                )
            with self.file.open("rb") as stream:
                for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE + 1), b""), 1):
                    if len(line) > MAX_LINE:
                        raise WorkflowError(f"{self.file} has a line of more than {MAX_LINE:,} bytes: line {number}.")
                    if line := line.removeprefix(BOM).strip():
                        yield number, line
        except OSError as error:
            raise WorkflowError(f"Cannot read the jobs {self.file}: {error.strerror or error}.") from error

    def _read_line(self, number: int, text: bytes) -> tuple[int, Iterator[Job | Unmade]]:
        """Return a line's number of jobs, and its jobs."""
        where = f"{self.file.name}, line {number}"
        try:
            line = parse_as(JobLine, text)
            named = line.workflow
            graph, schemas = self._read_file(self._path(named)) if isinstance(named, str) else self._read(named)
            changes = [*map(Setting.parse, line.changes)]
            axes = axes_of(line.matrix, settings.apply(graph, changes, schemas), schemas)
        except Unreadable as error:
            raise WorkflowError(f"{where}: {error}. Expected an object such as {EXAMPLE}.") from None
        except WorkflowError as error:
            raise type(error)(f"{where}: {error}") from None
        jobs = math.prod(len(axis.values) for axis in axes)

        def made(place: int, chosen: Iterable[Setting]) -> Job | Unmade:
            name = f"{line.name or f'line {number}'}{f' #{place}' if jobs > 1 else ''}"
            try:
                changed = settings.apply(graph, chosen, schemas, changes)
                images = images_of(changed, schemas, self.input_dir)
                return Job(name, changed, content_of(changed, images), cache_key_of(changed), images)
            except WorkflowError as error:
                return Unmade(name, f"{where}: {error}")

        return jobs, itertools.starmap(made, enumerate(combinations(axes), 1))

    def _path(self, named: str) -> Path:
        try:
            return paths.inside(self.workflows, named)
        except paths.Outside as fault:
            raise WorkflowError(
                f"{fault}. Workflows are read from {self.workflows} only: put it there, or name its folder with "
                "--workflows."
            ) from None


@dataclass(frozen=True)
class Axis:
    """Inputs that vary together."""

    inputs: Sequence[tuple[str, str]]  # node and name of each
    values: Sequence[Any]  # each one value for all inputs, or a tuple with one per input

    def settings(self, value: Any) -> Iterator[Setting]:
        values = value if isinstance(value, tuple) else itertools.repeat(value)
        for (node, name), each in zip(self.inputs, values, strict=False):
            yield Setting(node, name, json.dumps(each))


def combinations(axes: Sequence[Axis]) -> Iterator[tuple[Setting, ...]]:
    """Yield the settings of each combination; the last axis varies fastest. There may be millions of values, which
    `itertools.product` would keep in memory."""
    *slow, fast = axes or [Axis((), (None,))]
    for chosen in itertools.product(*(axis.values for axis in slow)):
        for value in fast.values:
            pairs = zip((*slow, fast), (*chosen, value), strict=True)
            yield tuple(setting for axis, each in pairs for setting in axis.settings(each))


def axes_of(matrix: Matrix, graph: Graph, schemas: Mapping[str, Schema]) -> list[Axis]:
    """Return the axes of a matrix for a workflow. Those that need a new compilation (precision, size) come first, to
    change least often.

    Raises WorkflowError if an axis matches no input of the workflow, or several, or if there are too many jobs.
    """

    def having(name: str) -> list[GraphNode]:
        """Return the nodes with an unlinked input of this name."""
        return [
            node
            for node in graph.nodes.values()
            if name in schemas[node.class_type].inputs_with(node.inputs)
            and not isinstance(node.inputs.get(name, Link("", 0)), Link)
        ]

    axes: list[Axis] = []
    if matrix.precisions:
        nodes = [node for node in having(PRECISION) if node.inputs[PRECISION] != FOLLOWS]
        if not nodes:
            raise WorkflowError('The workflow sets no precision that "precisions" could vary: remove "precisions".')
        axes.append(Axis([(node.id, PRECISION) for node in nodes], matrix.precisions))
    if matrix.sizes:
        tall = having("height")
        node, _ = _only("sizes", [(node, "width") for node in having("width") if node in tall])
        frames = [name for name in FRAMES if name in graph.nodes[node].inputs][:1]
        sizes = [tuple(map(int, size.split("x"))) for size in matrix.sizes]
        if not frames and any(len(size) == 3 for size in sizes):
            raise WorkflowError(f"{graph.nodes[node].label} has no frames: write its sizes as WIDTHxHEIGHT.")
        axes.append(Axis([(node, name) for name in ("width", "height", *frames)], sizes))
    for name, values in matrix.inputs.items():
        setting = Setting.parse(f"{name}=")
        setting.found_in(graph, schemas)
        axes.append(Axis([(setting.node, setting.input)], values))
    seeds = matrix.seeds
    if isinstance(seeds, Seeds):
        seeds = range(seeds.first, seeds.first + seeds.count)
    for axis, names, values in (("prompts", ("prompt",), matrix.prompts), ("seeds", sorted(SEED_NAMES), seeds)):
        if values:
            axes.append(Axis([_only(axis, [(node, name) for name in names for node in having(name)])], values))
    if (jobs := math.prod(len(axis.values) for axis in axes)) > MAX_JOBS:
        raise WorkflowError(f"The matrix makes {jobs:,} jobs; one line can make at most {MAX_JOBS:,}.")
    return axes


def _only(axis: str, found: Sequence[tuple[GraphNode, str]]) -> tuple[str, str]:
    """Return the only input that matches an axis."""
    if len(found) != 1:
        raise WorkflowError(
            f'"{axis}" needs exactly one node of the workflow with such an input. Found: '
            f"{listed(node.label for node, _ in found) or 'none'}. Name the inputs to vary instead: "
            f'"inputs": {{"NODE.INPUT": [...]}}.'
        )
    ((node, name),) = found
    return node.id, name
