"""What a ComfyUI answers, old (0.0.1, 2024) and new, and its pip-installable fork: as far as anything here reads it."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...trust import foreign, paths
from ...trust.foreign import Foreign, nothing_is_empty
from ...trust.text import shown
from ..errors import HeadlessError, InterruptedRunError, RunFailedError
from ..workflow.graph import Graph

MAX_LINES = 50  # of what was refused
END_EVENTS = frozenset({"execution_success", "execution_error", "execution_interrupted"})


def _text(value: object) -> object:
    """Node ids are text, and numbers in some nodes' errors."""
    return str(value) if type(value) is int and abs(value) < 10**18 else value


NodeId = Annotated[str, BeforeValidator(_text), Field(max_length=1000)]
PromptId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.:-]{0,199}$")]
OneOutput = Annotated[dict[str, Any], BeforeValidator(nothing_is_empty)]


# --- POST /prompt -----------------------------------------------------------------------------------------------------


class Problem(Foreign):
    message: str | None = None
    details: str | None = None

    def __str__(self) -> str:
        return " ".join(shown(part, 500) for part in (self.message, self.details) if part)


class NodeProblems(Foreign):
    errors: list[Problem] = []


class Submitted(Foreign):
    """Taken, where it has a prompt_id; in part or not at all, where it has node_errors or an error."""

    prompt_id: PromptId | None = None
    error: Problem | str | None = None
    node_errors: dict[str, NodeProblems] | list[Any] | None = None  # a list where there are none

    def refusal(self, graph: Graph) -> str:
        """ComfyUI's validation errors in words, one line each."""
        lines: list[str] = []
        by_node = self.node_errors if isinstance(self.node_errors, dict) else {}
        for node_id, fault in by_node.items():
            for problem in fault.errors:
                if len(lines) == MAX_LINES:
                    break
                message, details = shown(problem.message or "refused", 500), shown(problem.details or "", 1000)
                lines.append(f"{label(graph, node_id)}: {message}: {details}")
        more = sum(len(fault.errors) for fault in by_node.values()) - len(lines)
        lines += [f"and {more} more"] if more else []
        whole = self.error if isinstance(self.error, Problem) else shown(self.error or "", 1000)
        return "ComfyUI refuses the workflow:\n" + "\n".join(f"  {line}" for line in lines or [str(whole)])


class Uploaded(Foreign):
    """An image that the server has now, and the name that LoadImage takes for it."""

    name: Annotated[str, Field(min_length=1)]
    subfolder: str | None = None
    type: Literal["input"] = "input"

    @property
    def path(self) -> str:
        """Raises trust.paths.Outside."""
        return paths.relative("/".join(part for part in (self.subfolder, self.name) if part)).as_posix()


# --- GET /queue -------------------------------------------------------------------------------------------------------


class ForkItem(Foreign):
    """The fork's entry, an object."""

    prompt_id: str


Item = Annotated[list[Any], Field(min_length=2)] | ForkItem  # [priority, id, prompt, {"client_id": …}, …]


FIRST_RUNNING = re.compile(rb'\s*{\s*"queue_running":\s*\[\s*\[\s*[-+.\w]+,\s*"([\w.:-]{1,200})"')  # its prompt's id


class Queue(Foreign):
    queue_running: list[Item] = []
    queue_pending: list[Item] = []

    def find(self, prompt_id: str | None, client_id: str) -> tuple[str, str]:
        """Where a client's prompt stands ("running", "pending", "gone"), and its id, which the client may not know."""
        for state, items in (("running", self.queue_running), ("pending", self.queue_pending)):
            for item in items:
                found = item.prompt_id if isinstance(item, ForkItem) else item[1]
                about = item[3] if isinstance(item, list) and len(item) > 3 else None
                mine = isinstance(about, dict) and about.get("client_id") == client_id
                if isinstance(found, str) and (found == prompt_id if prompt_id is not None else mine):
                    return state, found
        return "gone", prompt_id or ""


# --- GET /history/<id> ------------------------------------------------------------------------------------------------


class Fault(Foreign):
    """What an execution_error or an execution_interrupted says."""

    node_id: NodeId | None = None
    exception_type: str = "error"
    exception_message: str = ""


class Status(Foreign):
    status_str: str | None = None
    messages: list[str | Annotated[list[Any], Field(min_length=2, max_length=2)]] | None = None  # text in the fork

    def told(self, kind: str) -> Fault | None:
        """What the last message of this kind says."""
        said = [message[1] for message in self.messages or () if not isinstance(message, str) and message[0] == kind]
        return foreign.fitting(Fault, said[-1]) if said else None

    @property
    def texts(self) -> list[str]:
        return [message for message in self.messages or () if isinstance(message, str)]


class HistoryEntry(Foreign):
    """What came of a run."""

    outputs: Annotated[dict[str, OneOutput], BeforeValidator(nothing_is_empty)] = {}
    status: Status | None = None

    def failure(self, graph: Graph, server: str) -> HeadlessError | None:
        """Why the run failed, where it did. Raises Unreadable."""
        status = self.status or Status()
        if any(text.startswith("execution_interrupted") for text in status.texts):
            return InterruptedRunError("The run was interrupted on the server.")
        if fault := status.told("execution_error"):
            kind = shown(fault.exception_type.removeprefix("builtins."), 100)
            message = fault.exception_message[:2000].strip()
            return RunFailedError(f"{label(graph, fault.node_id)} failed: {kind}: {message}")
        if fault := status.told("execution_interrupted"):
            return InterruptedRunError(f"The run was interrupted on the server, at {label(graph, fault.node_id)}.")
        if status.status_str == "error":
            why = "; ".join(shown(text, 500) for text in status.texts[:MAX_LINES]) or "but not why: look at its log"
            return RunFailedError(f"{server} says that the run failed, {why}.")
        return None


# --- the websocket's events -------------------------------------------------------------------------------------------


class EventData(Foreign):
    prompt_id: str | None = None
    node: NodeId | None = None
    value: float | None = None
    max: float | None = None


class Event(Foreign):
    type: str
    data: EventData

    @property
    def ends(self) -> bool:
        """Whether it says that a run is over."""
        return self.type in END_EVENTS or (self.type == "executing" and self.data.node is None)


KNOWN_EVENTS = END_EVENTS | {"executing", "progress"}


class _Kind(Foreign):
    type: str


def event(text: str) -> Event | None:
    """An event that tells of a run; None for others, and for what is no event."""
    try:
        value = foreign.parse(text, nan=True)
        return foreign.fitting(Event, value) if foreign.fitting(_Kind, value).type in KNOWN_EVENTS else None
    except foreign.Unreadable:
        return None


def label(graph: Graph, node_id: str | None) -> str:
    """How messages name a node that a server names."""
    node = graph.nodes.get(node_id or "")
    return node.label if node else f"node {shown(node_id or 'unknown')}"
