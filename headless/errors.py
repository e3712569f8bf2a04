"""Errors of a headless run, each kind with its exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    BAD_INPUT = 2  # wrong usage, workflow or input; nothing ran
    NO_HOST = 3  # no server answers, or ComfyUI did not start
    RUN_FAILED = 4
    OUTPUT_FAILED = 5  # a result could not be written
    INTERRUPTED = 130
    BROKEN_PIPE = 141  # stdout closed; the shell's code for a command ended by SIGPIPE


class HeadlessError(Exception):
    """An error whose message says what was found, what was expected and what to do."""

    exit_code: ExitCode = ExitCode.RUN_FAILED


class WorkflowError(HeadlessError):
    """The workflow, one of its inputs or the command line is wrong; nothing ran."""

    exit_code: ExitCode = ExitCode.BAD_INPUT


class NodeNotFoundError(WorkflowError):
    """The workflow has no node of that name."""


class UnknownNodesError(WorkflowError):
    """The host has no node of a type that the workflow uses."""


class HostError(HeadlessError):
    """No host to run on: no server answers, or ComfyUI does not start."""

    exit_code: ExitCode = ExitCode.NO_HOST


class NoAnswerError(HostError):
    """A server cannot be reached, or closes the connection. busy: it is connected but silent for long."""

    def __init__(self, server: str, reason: str, *, busy: bool = False) -> None:
        super().__init__(
            f"No ComfyUI answers at {server} ({reason}). Start it, check the address and port, or use --comfyui DIR "
            "to start one."
        )
        self.reason, self.busy = reason, busy


class TooLongError(HostError):
    """A server's answer exceeds the size limit."""


class RunFailedError(HeadlessError):
    """A node raised, the time limit passed, or the server was lost during the run."""


class ServerLostError(RunFailedError):
    """The server stopped answering, or no longer knows the run, which may have crashed it. Another try may help."""


class OutputError(HeadlessError):
    """A result could not be written; no partial file is left."""

    exit_code: ExitCode = ExitCode.OUTPUT_FAILED


class ForeignFileError(OutputError):
    """A node lists a file that is not in its output folder, or in an unknown format: it would in each run."""


class InterruptedRunError(HeadlessError):
    """The run was stopped by the user, here or on the server."""

    exit_code: ExitCode = ExitCode.INTERRUPTED
