"""`onediff-guard batch`: run the jobs of a file on the GPUs of a Ray cluster, or on running ComfyUIs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

from ..batch.batch_run import BatchRun, BatchStats, JobQueue
from ..batch.jobs import JobsFile, Read
from ..batch.outputs import PARKED, Outputs
from ..batch.ray_pool import RayPool, Setup, connected, require
from ..batch.worker_pool import WorkerPool
from ..errors import RunFailedError, WorkflowError
from ..hosts.chosen import DEFAULT_INPUT, DEFAULT_MODELS, Host, seconds
from ..hosts.local import read_local, run_local
from .answer import Answer

DEFAULT_OUTPUT = Path("output") / "batch"
MAX_WORKERS = 10_000
SHOWN = 20  # most faults in the summary
LOCAL = Host(read_local, run_local)  # the host of Ray workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("jobs", type=Path, metavar="JOBS.jsonl", help="one JSON object per line: workflow, what to set")
    out = f"output: a folder for each job, named by the hash of its content (default: {DEFAULT_OUTPUT.as_posix()})"
    parser.add_argument("--out", type=Path, default=DEFAULT_OUTPUT, metavar="DIR", help=out)
    workflows = "folder of the workflows that the lines name (default: the folder of JOBS.jsonl)"
    parser.add_argument("--workflows", type=Path, metavar="DIR", help=workflows)
    models = "models, as for `run`, on every machine; may be repeated"
    parser.add_argument("--models", type=Path, action="append", default=[], metavar="DIR", help=models)
    parser.add_argument("--input", type=Path, metavar="DIR", help="images that workflows name, as for `run`")
    ray = "address of a running Ray, for example 10.0.0.1:6379 or auto (default: start one)"
    parser.add_argument("--ray", metavar="ADDRESS", help=ray)
    server = "run on this ComfyUI, without Ray; may be repeated, for ComfyUIs with the same nodes and models"
    parser.add_argument("--server", action="append", default=[], metavar="URL", help=server)
    guard = "with --server: guard ComfyUI's own models in the workflows, without changing the files"
    parser.add_argument("--guard", action="store_true", help=guard)
    workers = "number of Ray workers (default: one per GPU; without a GPU, one)"
    parser.add_argument("--workers", type=_count(MAX_WORKERS), metavar="N", help=workers)
    attempts = "give up a job after its worker died N times (default: 3)"
    parser.add_argument("--attempts", type=_count(100), default=3, metavar="N", help=attempts)
    parser.add_argument("--retry", action="store_true", help="retry jobs that an earlier run gave up")
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop a job after this many seconds")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def main(args: argparse.Namespace) -> Answer:
    stats = _run(args)
    error = None
    if missing := max(0, stats.jobs - stats.over):
        error = RunFailedError(
            f"The jobs file became shorter while the batch ran: {missing:,} of {stats.jobs:,} jobs did not run. Write "
            "them into it again, and run the same command."
        )
    elif bad := stats.failed + stats.parked_before:
        error = RunFailedError(
            f"{bad:,} of {stats.jobs:,} jobs failed; {args.out / PARKED} says why. To retry them, run the same "
            "command with --retry."
        )
    faults = [f"  {fault['name']} ({fault['content']}): {fault['error']}" for fault in stats.faults[:SHOWN]]
    return Answer([stats.summary(), *faults, args.out], {"folder": args.out, **stats.facts()}, error)


def _run(args: argparse.Namespace) -> BatchStats:
    _check(args)
    outputs = Outputs(args.out.resolve())
    jobs = _jobs(args)
    stats = BatchStats(jobs.count(), sys.stderr)
    outputs.ensure()
    queue = JobQueue(jobs, outputs, stats, retry=args.retry)
    if not queue.fill():
        return stats
    try:
        with _pool(args, outputs, stats) as pool:
            BatchRun(queue, pool, outputs, stats, args.attempts).run()
    except KeyboardInterrupt:
        stats.say("Stopping. Finished jobs are complete; run the same command to continue.")
        raise
    return stats


def _check(args: argparse.Namespace) -> None:
    """Raise WorkflowError if options conflict, or Ray is not installed."""
    if not args.server:
        if args.guard:
            raise WorkflowError("--guard works only with --server: this pack's pipelines are always guarded.")
        require()
        return
    for name in ("ray", "models", "workers"):
        if getattr(args, name):
            raise WorkflowError(f"--{name} does not work with --server: the servers have their own models and GPUs.")


def _jobs(args: argparse.Namespace) -> JobsFile:
    read: Read = LOCAL.read
    input_dir = args.input or (None if args.server else DEFAULT_INPUT)
    if args.server:
        from ..batch.server_pool import reader

        read = reader(args.server, args.timeout, guard=args.guard)
    folder = args.workflows or args.jobs.parent
    return JobsFile(args.jobs, workflows=folder, input_dir=input_dir, read=read)


@contextmanager
def _pool(args: argparse.Namespace, outputs: Outputs, stats: BatchStats) -> Generator[WorkerPool]:
    if args.server:
        from ..batch.server_pool import ServerPool

        pool = ServerPool(args.server, outputs, stats.say, input_dir=args.input, timeout=args.timeout)
        with closing(pool):
            yield pool
        return
    with connected(args.ray, args.workers, verbose=args.verbose) as ray, outputs.token() as token:
        setup = Setup(
            models=tuple(folder.resolve() for folder in args.models or [DEFAULT_MODELS]),
            input_dir=(args.input or DEFAULT_INPUT).resolve(),
            output_dir=outputs.folder,
            token=token,
            timeout=args.timeout,
            run=LOCAL.run,
        )
        with closing(RayPool(ray, setup, args.workers)) as actors:
            yield actors


def _count(most: int) -> Callable[[str], int]:
    """Return an argument type: a number from 1 to `most`."""

    def count(text: str) -> int:
        if not (text.isdecimal() and 1 <= int(text[:9]) <= most):
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1 to {most:,}")
        return int(text)

    return count
