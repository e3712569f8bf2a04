"""The console command: a table of subcommands, and errors turned into exit codes."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...trust.message import Told
from ..errors import ExitCode, HeadlessError, InterruptedRunError, RunFailedError, WorkflowError
from ..terminal import cleaned_output, drop_output
from .answer import Answer


@dataclass(frozen=True)
class Subcommand:
    name: str
    help: str
    module: Callable[[], Any]  # has add_arguments(parser) and main(args) -> Answer; imported only if it is used


SUBCOMMANDS = tuple(
    Subcommand(name, does, lambda name=name: import_module(f".{name}", __package__))
    for name, does in {
        "run": "run a workflow: in this process, on a server, or in a ComfyUI checkout",
        "batch": "run the jobs of a file over many GPUs, machines or servers, resumed by the same command",
        "compare": "run a workflow in several precisions and compare the results",
        "doctor": "show what would run here or on another card, and why",
        "selftest": "check in a minute whether this card computes correctly",
        "probe": "measure a model over a few steps, draw the result, and recommend settings",
        "profile": "list, show, export and import profiles, which store what runs learned about models",
        "compiled": "list, export, import and clear compiled code that is kept for later runs",
    }.items()
)


def main(argv: Sequence[str] | None = None, subcommands: Sequence[Subcommand] = SUBCOMMANDS) -> int:
    """Run a command. Returns the exit code; see `ExitCode`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    with cleaned_output():
        args = _parser(arguments, subcommands).parse_args(arguments)
        logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
        try:
            code = _printed(_answer(args), args)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # the reader is gone (`| head`)
            code = ExitCode.BROKEN_PIPE
        except OSError as error:  # for instance a full disk
            code = ExitCode.OUTPUT_FAILED
            with suppress(OSError):
                print(f"onediff-guard: Cannot print the result: {error}.", file=sys.stderr)
        drop_output()
        return int(code)


def _answer(args: argparse.Namespace) -> Answer:
    try:
        with _stopped_alike():
            return args.main(args)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - a script gets an exit code, not a traceback
        if args.verbose:
            traceback.print_exc()
        return Answer(error=_in_words(error))


def _printed(answer: Answer, args: argparse.Namespace) -> int:
    """Print an answer. Returns the exit code."""
    for line in [answer.as_json()] if getattr(args, "json", False) else answer.lines:
        print(line)
    if answer.error is None:
        return int(answer.exit_code)
    print(f"onediff-guard: {answer.error}", file=sys.stderr)
    return int(answer.error.exit_code)


def _in_words(error: BaseException) -> HeadlessError:
    if isinstance(error, HeadlessError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return InterruptedRunError("Interrupted.")
    if isinstance(error, Told):  # a ValueError among them is about the input
        return WorkflowError(str(error)) if isinstance(error, ValueError) else RunFailedError(str(error))
    if isinstance(error, ImportError):
        said = f"{error}. `onediff-guard doctor` lists missing and broken packages, and says what to do."
        return RunFailedError(said)
    return RunFailedError(f"Unexpected {type(error).__name__}: {error}. Run with --verbose to see where.")


@contextmanager
def _stopped_alike() -> Iterator[None]:
    """Treat SIGTERM, SIGHUP and SIGBREAK as Ctrl-C, so that clean-up runs. Signals that `nohup` ignores stay ignored.
    At the end all handlers are restored. In other threads than the main one, signals are left to the caller."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # SIGHUP, on Windows SIGBREAK: the terminal was closed
    before = {kind: signal.getsignal(kind) for name in names if (kind := getattr(signal, name, None))}
    for kind, handler in before.items():
        if kind is not signal.SIGINT and handler is not signal.SIG_IGN:
            signal.signal(kind, _interrupt)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)


def _interrupt(_number: int, _frame: object) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs with it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


class _Parser(argparse.ArgumentParser):
    """A parser without the colours of Python 3.14, which are escape sequences."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.color = False


def _parser(arguments: Sequence[str], subcommands: Sequence[Subcommand]) -> argparse.ArgumentParser:
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _Parser(
        prog="onediff-guard",
        description="Run ComfyUI workflows without a browser, and see which precision they use and why.",
        epilog="Exit codes: 0 done, 2 bad input, 3 no server, 4 the run failed, 5 no output, 130 interrupted, "
        "141 broken pipe (stdout closed).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in subcommands:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        subparser.add_argument("--verbose", "-v", action="store_true", help="print more, and show tracebacks")
        if command.name == chosen:
            module = command.module()
            module.add_arguments(subparser)
            subparser.set_defaults(main=module.main)
    return parser
