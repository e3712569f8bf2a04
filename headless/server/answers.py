"""Models of ComfyUI's answers, old (0.0.1, 2024) and new, and of its pip-installable fork: the parts that are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...trust import foreign, paths
from ...trust.foreign import Foreign, nothing_is_empty
from ...trust.message import listed, shown
from ..errors import HeadlessError, InterruptedRunError, RunFailedError
from ..workflow.graph import Graph

MAX_LINES = 50  # most lines of a refusal


def _text(value: object) -> object:
    """Return a node id as text: some nodes' errors have numbers."""
    return str(value) if type(value) is int and abs(value) < 10**18 else value


SUMMARIES = "onediff_guard_summaries"  # in a prompt's extra_data, by the pack on the server

NodeId = Annotated[str, BeforeValidator(_text), Field(max_length=1000)]
PromptId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]{0,199}$")]
OneOutput = Annotated[dict[str, Any], BeforeValidator(nothing_is_empty)]


# --- POST /prompt -----------------------------------------------------------------------------------------------------


class Problem(Foreign):
    message: str | None = None
    details: str | None = None

    def __str__(self) -> str:
        return ": ".join(shown(part, 500) for part in (self.message, self.details) if part) or "refused"


class NodeProblems(Foreign):
    errors: list[Problem] = []


class Submitted(Foreign):
    """The answer to a submitted prompt: accepted if it has a prompt_id; node_errors and error name what was refused."""

    prompt_id: PromptId | None = None
    error: Problem | str | None = None
    node_errors: dict[str, NodeProblems] | list[Any] | None = None  # an empty list if there are none

    def refusal(self, graph: Graph) -> str:
        """Return ComfyUI's validation errors, one line each."""
        by_node = self.node_errors if isinstance(self.node_errors, dict) else {}
        faults = [f"{label(graph, node_id)}: {each}" for node_id, found in by_node.items() for each in found.errors]
        told = listed(faults or [str(self.error or "")], MAX_LINES, between="\n  ", limit=1500)
        return f"ComfyUI refuses the workflow:\n  {told}"


class Uploaded(Foreign):
    """An uploaded image, with its name for LoadImage."""

    name: Annotated[str, Field(min_length=1)]
    subfolder: str | None = None
    type: Literal["input"] = "input"

    @property
    def path(self) -> str:
        """Raises trust.paths.Outside."""
        return paths.relative("/".join(part for part in (self.subfolder, self.name) if part)).as_posix()


# --- GET /queue -------------------------------------------------------------------------------------------------------


def _entry(value: object) -> object:
    """[priority, id, prompt, {"client_id": …}, …]; in the fork an object."""
    if not isinstance(value, list):
        return value
    about = value[3] if len(value) > 3 and isinstance(value[3], dict) else {}
    return {"prompt_id": value[1] if len(value) > 1 else None, "client_id": about.get("client_id")}


class QueueEntry(Foreign):
    prompt_id: str
    client_id: Any = None


Entries = list[Annotated[QueueEntry, BeforeValidator(_entry)]]


class Queue(Foreign):
    queue_running: Entries = []
    queue_pending: Entries = []

    def runs(self, prompt_id: str) -> bool:
        return any(entry.prompt_id == prompt_id for entry in self.queue_running)

    def has(self, prompt_id: str) -> bool:
        """Return whether a prompt runs or waits."""
        return self.runs(prompt_id) or any(entry.prompt_id == prompt_id for entry in self.queue_pending)

    def prompt_of(self, client_id: str) -> str | None:
        """Return the id of a client's prompt; the client may have missed the answer."""
        entries = (*self.queue_running, *self.queue_pending)
        return next((entry.prompt_id for entry in entries if entry.client_id == client_id), None)


# --- GET /history/<id> ------------------------------------------------------------------------------------------------


class Fault(Foreign):
    """The data of an execution_error or execution_interrupted message."""

    node_id: NodeId | None = None
    exception_type: str = "error"
    exception_message: str = ""


class Status(Foreign):
    status_str: str | None = None
    messages: list[str | Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = None  # text in the fork


class HistoryEntry(Foreign):
    outputs: Annotated[dict[str, OneOutput], BeforeValidator(nothing_is_empty)] = {}
    status: Status | None = None
    prompt: Any = None  # as it was queued, if it is readable

    def guards(self) -> tuple[str, ...]:
        """Return the summaries of the server's inserted guards, from the prompt's extra data."""
        extra = self.prompt[3] if isinstance(self.prompt, list) and len(self.prompt) > 3 else None
        lines = extra.get(SUMMARIES) if isinstance(extra, dict) else None
        return tuple(line for line in lines if isinstance(line, str)) if isinstance(lines, list) else ()

    def failure(self, graph: Graph, server: str) -> HeadlessError | None:
        """Return the error of a failed run; None if it succeeded. Raises Unreadable."""
        status = self.status or Status()
        texts: list[str] = []
        for message in status.messages or ():
            kind, told = message if isinstance(message, list) else (message, {})
            if kind == "execution_error" and isinstance(message, list):
                fault = foreign.fitting(Fault, told)
                error = shown(fault.exception_type.removeprefix("builtins."), 100)
                said = fault.exception_message[:2000].strip()
                return RunFailedError(f"{label(graph, fault.node_id)} failed: {error}: {said}")
            if isinstance(kind, str) and kind.startswith("execution_interrupted"):
                place = foreign.fitting(Fault, told).node_id
                return InterruptedRunError(f"The run was interrupted on the server, at {label(graph, place)}.")
            texts += [kind] if isinstance(message, str) else []
        if status.status_str == "error":
            why = listed(texts, MAX_LINES, between="; ", limit=500) or "but not why: look at its log"
            return RunFailedError(f"{server} reports that the run failed, {why}.")
        return None


# --- the websocket's events -------------------------------------------------------------------------------------------


class EventData(Foreign):
    prompt_id: str | None = None
    node: NodeId | None = None
    value: float | None = None
    max: float | None = None


class Event(Foreign):
    """A websocket event: a node starts, or its progress."""

    type: Literal["executing", "progress"]
    data: EventData


def event(text: str) -> Event | None:
    """Parse an event; None for other events and invalid ones."""
    try:
        return foreign.fitting(Event, foreign.parse(text, nan=True))
    except foreign.Unreadable:
        return None


def label(graph: Graph, node_id: str | None) -> str:
    """Return the name of a server's node for messages."""
    node = graph.nodes.get(node_id or "")
    return node.label if node else f"node {shown(node_id or 'unknown')}"
