"""What can go wrong in a headless run, each kind with the exit code that scripts see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    BAD_INPUT = 2  # usage, workflow or an input's value; nothing ran
    NO_HOST = 3  # no server answers, or ComfyUI did not start
    RUN_FAILED = 4
    OUTPUT_FAILED = 5  # a result could not be written
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # nobody reads what is printed; a shell's code for a command that SIGPIPE ended


class HeadlessError(Exception):
    """An error whose message tells the user what was found, what was expected and what to do."""

    exit_code: ExitCode = ExitCode.RUN_FAILED


class WorkflowError(HeadlessError):
    """The workflow, one of its inputs or the way the command was called; nothing ran."""

    exit_code: ExitCode = ExitCode.BAD_INPUT


class NodeNotFoundError(WorkflowError):
    """No node of the workflow goes by that name."""


class UnknownNodesError(WorkflowError):
    """The host has no node of a type that the workflow uses."""


class HostError(HeadlessError):
    """There is no host to run on: no server, or a ComfyUI that does not start."""

    exit_code: ExitCode = ExitCode.NO_HOST


class NoAnswerError(HostError):
    """A server cannot be reached, or breaks off. busy: it is there, and says nothing for long."""

    def __init__(self, server: str, reason: str, *, busy: bool = False) -> None:
        super().__init__(
            f"No ComfyUI answers at {server} ({reason}). "
            "Start it, check the address and port, or use --comfyui DIR to have one started."
        )
        self.reason, self.busy = reason, busy


class TooLongError(HostError):
    """A server's answer is longer than any that is taken."""


class RunFailedError(HeadlessError):
    """A node raised, the time was up, or the server was lost on the way."""


class ServerLostError(RunFailedError):
    """The server did not answer any more, or forgot the run, which may have ended it."""


class OutputError(HeadlessError):
    """A result could not be written; nothing is left half-written."""

    exit_code: ExitCode = ExitCode.OUTPUT_FAILED


class InterruptedRunError(HeadlessError):
    """The run was stopped by the user, here or on the server."""

    exit_code: ExitCode = ExitCode.INTERRUPTED
