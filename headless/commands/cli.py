"""The console command: a table of subcommands, and errors turned into exit codes."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ...trust.message import Told
from ..errors import ExitCode, HeadlessError
from ..terminal import NobodyReadsError, cleaned_output


@dataclass(frozen=True)
class Subcommand:
    name: str
    help: str
    module: Callable[[], Any]  # has add_arguments(parser) and main(args) -> int; imported only when it is used


SUBCOMMANDS = tuple(
    Subcommand(name, does, lambda name=name: import_module(f".{name}", __package__))
    for name, does in {
        "run": "run a workflow: in this process, on a server, or in a ComfyUI checkout",
        "batch": "run the jobs of a file over many GPUs, machines or servers, resumed by the same command",
        "compare": "run a workflow in several precisions, and put them side by side",
        "doctor": "say what would run here or on another card, and why",
        "selftest": "check on this card what every run takes for granted, in a minute",
        "probe": "measure a model over a few steps, draw it, and recommend how to run it",
        "profile": "list, show, export and import what runs taught about models",
        "compiled": "list, export, import and clear code that was compiled for later runs",
    }.items()
)


def main(argv: Sequence[str] | None = None, subcommands: Sequence[Subcommand] = SUBCOMMANDS) -> int:
    """The exit code; see `ExitCode`."""
    with cleaned_output():
        try:
            code = _main(list(sys.argv[1:] if argv is None else argv), subcommands)
            sys.stdout.flush()
            return code
        except NobodyReadsError:
            return int(ExitCode.NOBODY_READS)


def _main(arguments: list[str], subcommands: Sequence[Subcommand]) -> int:
    args = _parser(arguments, subcommands).parse_args(arguments)
    logging.basicConfig(level=logging.INFO if args.verbose else logging.WARNING, format="%(message)s")
    try:
        with _stopped_alike():
            return args.main(args)
    except HeadlessError as error:
        _complain(str(error), args.verbose)
        return int(error.exit_code)
    except KeyboardInterrupt:
        _complain("Interrupted.", verbose=False)
        return int(ExitCode.INTERRUPTED)
    except Told as error:
        _complain(str(error), args.verbose)
        return int(ExitCode.RUN_FAILED)
    except Exception as error:  # noqa: BLE001 - a script gets an exit code, not a traceback
        _complain(f"Unexpected {type(error).__name__}: {error}. Run with --verbose to see where.", args.verbose)
        return int(ExitCode.RUN_FAILED)


@contextmanager
def _stopped_alike() -> Iterator[None]:
    """Every polite request to end is Ctrl-C: one way to stop, with clean-up. What `nohup` has us ignore stays so, and
    at the end all is as it was. Signals are the main thread's: in another, the caller has them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # SIGHUP: the terminal is gone. SIGBREAK: the same on Windows
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
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


class _Parser(argparse.ArgumentParser):
    """Help and usage without the colours of Python 3.14, which are escape sequences."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.color = False


def _parser(arguments: Sequence[str], subcommands: Sequence[Subcommand]) -> argparse.ArgumentParser:
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    parser = _Parser(
        prog="onediff-guard",
        description="Workflows without a browser, and why they run as they do.",
        epilog="Exit codes: 0 done, 2 bad input, 3 no server, 4 the run failed, 5 no output, 130 interrupted, "
        "141 broken pipe (stdout closed).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in subcommands:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        subparser.add_argument("--verbose", "-v", action="store_true", help="tell more, and show tracebacks")
        if command.name == chosen:
            module = command.module()
            module.add_arguments(subparser)
            subparser.set_defaults(main=module.main)
    return parser


def _complain(message: str, verbose: bool) -> None:
    if verbose:
        traceback.print_exc()
    print(f"onediff-guard: {message}", file=sys.stderr)
