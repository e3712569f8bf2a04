"""The host that a command's options name, opened once for any number of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..errors import WorkflowError
from ..workflow.graph import Graph
from ..workflow.schema import Schema
from .result import RunResult

DEFAULT_INPUT = Path("input")
DEFAULT_MODELS = Path("models")
MOST_GPUS = 64  # per machine
MAX_SECONDS = 30 * 24 * 3600  # the system's timers are limited to about 49 days


@dataclass(frozen=True)
class Host:
    """This process, a running ComfyUI, or a checkout that was started."""

    read: Callable[..., tuple[Graph, dict[str, Schema]]]  # (workflow) -> its graph, and the schemas of its node types
    run: Callable[..., RunResult]  # as `run_local`: (workflow, output_dir=, changes=, timeout=, on_progress=)


def add_arguments(parser: argparse.ArgumentParser, *, output: Path, results: str = "results") -> None:
    """Add the arguments of every command that runs a workflow. output: the default of --out, for `results`."""
    parser.add_argument("workflow", type=Path, metavar="WORKFLOW.json", help="a workflow in API or UI format")
    form = "NODE.INPUT=VALUE"
    change = "set an input; NODE is an id, or a unique title or class id; may be repeated"
    parser.add_argument("--set", dest="changes", action="append", default=[], metavar=form, help=change)
    out = f"{results} (default: {output.as_posix()})"
    parser.add_argument("--out", type=Path, default=output, metavar="DIR", help=out)
    models = "model folder, arranged like ComfyUI's or with all models side by side (default: models); may be repeated"
    parser.add_argument("--models", type=Path, action="append", default=[], metavar="DIR", help=models)
    images = "folder of LoadImage's images (default: input); with --server, those of the workflow are uploaded"
    parser.add_argument("--input", type=Path, metavar="DIR", help=images)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    host = parser.add_mutually_exclusive_group()
    host.add_argument("--server", metavar="URL", help="run on this ComfyUI, for example http://127.0.0.1:8188")
    host.add_argument("--comfyui", type=Path, metavar="DIR", help="start this ComfyUI checkout, run there, and stop it")
    guard = "with --server or --comfyui: guard ComfyUI's own models in the workflow, without changing its file"
    parser.add_argument("--guard", action="store_true", help=guard)
    gpus = "compute each step on N GPUs together, or on all with 'auto', with one process per GPU"
    parser.add_argument("--gpus", type=_gpus, default="1", metavar="N", help=f"{gpus} (default: 1)")
    timeout = "stop after this many seconds, including upload and download on a server"
    parser.add_argument("--timeout", type=seconds, metavar="S", help=timeout)


@contextmanager
def opened(args: argparse.Namespace) -> Generator[Host]:
    """Open the host that these arguments name; a checkout is stopped at the end.

    Raises WorkflowError if options conflict, or the checkout's folder contains no ComfyUI; HostError if the checkout
    does not start.
    """
    if args.gpus != "1" and (args.server or args.comfyui):
        raise WorkflowError(
            "--gpus does not work with --server or --comfyui: it needs one process of its own per GPU. Remove that "
            "option, and give the models with --models."
        )
    if args.guard and not (args.server or args.comfyui):
        raise WorkflowError("--guard works only with --server or --comfyui: this pack's pipelines are always guarded.")
    if args.server:
        if args.models:
            raise WorkflowError("--models does not work with --server: the server has its own model folders.")
        from ..server.follow import read_for_server, run_on_server

        yield Host(
            partial(read_for_server, url=args.server, timeout=args.timeout, guard=args.guard),
            partial(run_on_server, url=args.server, input_dir=args.input, guard=args.guard),
        )
    elif args.comfyui:
        from .checkout import started

        with started(args.comfyui, models=args.models, input_dir=args.input) as running:
            yield Host(
                partial(running.read, timeout=args.timeout, guard=args.guard), partial(running.run, guard=args.guard)
            )
    else:
        from .local import read_local, run_local

        run, folders = run_local, {"models": args.models or [DEFAULT_MODELS], "input_dir": args.input or DEFAULT_INPUT}
        if args.gpus != "1":
            from .ranks import chosen_number, run_over_ranks

            size = chosen_number(args.gpus)
            run = partial(run_over_ranks, size=size) if size > 1 else run_local
        yield Host(read_local, partial(run, **folders))


def _gpus(text: str) -> str:
    if text != "auto" and not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_GPUS):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected 'auto', or a number from 1 to {MOST_GPUS}")
    return text if text == "auto" else str(int(text))


def seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:  # also false for NaN
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds, above 0 and at most {MAX_SECONDS:,}")
    return seconds
