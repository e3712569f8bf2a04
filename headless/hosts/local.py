"""The host without ComfyUI: checks a workflow, then runs the nodes that its output nodes need, one after another.

It has no queue, no cache between runs, no lists, no lazy inputs, and no node types beyond the given mapping: they need
ComfyUI.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...comfyui_host import host
from ..errors import HeadlessError, InterruptedRunError, RunFailedError
from ..files import ensure_writable, file_entries
from ..workflow import settings, ui_format
from ..workflow.graph import Graph, GraphNode
from ..workflow.schema import Schema
from ..workflow.validate import WorkflowPlan, known_schemas, plan
from .result import ProgressCallback, RunProgress, RunResult, libraries_without_bars, no_progress

logger = logging.getLogger(__name__)
_Check = Callable[..., None]  # (cause=None): raises why a run is to stop, once it is


def default_classes() -> dict[str, type]:
    """Return this pack's nodes and the closed list of core nodes."""
    from ... import nodes
    from . import core_nodes

    return {**core_nodes.NODE_CLASS_MAPPINGS, **nodes.NODE_CLASS_MAPPINGS}


def run_local(
    workflow: Graph | Mapping[str, Any],
    *,
    models: Sequence[Path],
    input_dir: Path,
    output_dir: Path,
    changes: Sequence[settings.Setting] = (),
    classes: Mapping[str, type] | None = None,
    timeout: float | None = None,
    on_progress: ProgressCallback = no_progress,
    first: bool = True,
) -> RunResult:
    """Run a workflow in this process.

    workflow: a graph, or a workflow's JSON in API or UI format.
    models: folders with models, laid out as in ComfyUI, or side by side.
    input_dir: the folder of LoadImage's images.
    output_dir: the folder of the results; created if it is missing.
    changes: inputs to set first.
    classes: node classes by type; default: this pack's and a few core nodes.
    timeout: seconds after which the run is stopped.
    on_progress: called for each node that starts.
    first: False in other ranks than rank 0: they run only the nodes that all ranks run together, and the nodes that
        these need.

    Raises WorkflowError if the workflow cannot run (nothing ran), RunFailedError if a node raised or the time limit
    passed, OutputError if a result could not be written, InterruptedRunError on Ctrl-C.
    """
    folders = host.plain_folders(
        models=[root.resolve() for root in models], input=input_dir.resolve(), output=output_dir.resolve()
    )
    with folders as interrupt:
        node_classes = default_classes() if classes is None else classes
        graph, schemas = read_local(workflow, node_classes)
        checked = plan(settings.apply(graph, changes, schemas), node_classes)
        ensure_writable(output_dir)
        started = time.perf_counter()
        with _stoppable(interrupt, timeout) as check, libraries_without_bars():
            order = checked.order if first else _together(checked, node_classes)
            outputs, results = _run(checked, order, node_classes, check, on_progress)
        files = [output_dir / entry.path for ui in outputs.values() for entry in file_entries(ui)]
    return RunResult(outputs, results, files, time.perf_counter() - started)


def _together(checked: WorkflowPlan, classes: Mapping[str, type]) -> Sequence[str]:
    """Return the nodes that all ranks run together, and the nodes that they need, in the order of the plan."""
    needed: set[str] = set()
    for node_id in reversed(checked.order):
        node = checked.graph.nodes[node_id]
        together = getattr(classes[node.class_type], "TOGETHER", False)  # or the name of the input that decides
        if node_id in needed or (node.inputs.get(together) if isinstance(together, str) else together):
            needed |= {node_id, *(link.node for link in node.links().values())}
    return [node_id for node_id in checked.order if node_id in needed]


def read_local(
    workflow: Graph | Mapping[str, Any], classes: Mapping[str, type] | None = None
) -> tuple[Graph, dict[str, Schema]]:
    """Return a workflow's graph and the schemas of its node types. Raises WorkflowError if it is invalid, or needs
    nodes of a ComfyUI. classes: as of `run_local`."""
    classes = default_classes() if classes is None else classes
    types, named = ui_format.types_in(workflow)
    schemas = known_schemas(types | (named & classes.keys()), classes)
    return ui_format.graph_of(workflow, schemas), schemas


@contextmanager
def _stoppable(interrupt: Any, timeout: float | None) -> Iterator[_Check]:
    """Let Ctrl-C, and a timeout, stop the running node between two steps. A second Ctrl-C stops at once. What it yields
    raises why the run is to stop, once it is. Ctrl-C in the last node ends the command too."""
    reasons: list[HeadlessError] = []

    def check(cause: BaseException | None = None) -> None:
        if reasons:
            raise reasons[0] from cause

    def ask(reason: HeadlessError) -> None:
        reasons.append(reason)
        interrupt()

    def on_signal(_number: int, _frame: object) -> None:
        if reasons:
            raise KeyboardInterrupt
        logger.warning("Stopping after the current step; press Ctrl-C again to stop at once.")
        ask(InterruptedRunError("Interrupted: no further node ran."))

    with ExitStack() as restored:
        if threading.current_thread() is threading.main_thread():
            restored.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, on_signal))
        if timeout:
            late = RunFailedError(f"Stopped: the run did not finish within {timeout:g} s.")
            timer = threading.Timer(timeout, ask, [late])
            timer.daemon = True
            timer.start()
            restored.callback(timer.cancel)
        yield check
    if reasons and isinstance(reasons[0], InterruptedRunError):  # too late to stop a node
        raise reasons[0]


def _run(
    plan: WorkflowPlan, order: Sequence[str], classes: Mapping[str, type], check: _Check, on_progress: ProgressCallback
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[Any, ...]]]:
    """Run nodes one after another. Returns their `ui` dictionaries and their outputs, by node id."""
    import torch

    outputs: dict[str, dict[str, Any]] = {}
    results: dict[str, tuple[Any, ...]] = {}
    with torch.inference_mode():  # as in ComfyUI, so that nodes behave the same
        for node_id in order:
            node = plan.graph.nodes[node_id]
            check()
            on_progress(RunProgress(node.label))
            returned = _call(node, classes[node.class_type], _arguments(plan, node, results), check)
            if isinstance(returned, dict):
                if returned.get("ui"):
                    outputs[node_id] = dict(returned["ui"])
                returned = returned.get("result")
            results[node_id] = tuple(returned or ())
            given, promised = len(results[node_id]), len(plan.schemas[node.class_type].outputs)
            if given != promised:
                raise RunFailedError(f"{node.label} gave {given} outputs, but its type declares {promised}.")
    return outputs, results


def _call(node: GraphNode, node_class: Any, arguments: Mapping[str, Any], check: _Check) -> Any:
    try:
        return getattr(node_class(), node_class.FUNCTION)(**arguments)
    except HeadlessError:
        raise
    except host.Interrupted as error:
        check(error)
        raise InterruptedRunError(f"{node.label} was interrupted: nothing more was written.") from error
    except Exception as error:
        check(error)
        raise RunFailedError(f"{node.label} failed: {type(error).__name__}: {error}") from error


def _arguments(plan: WorkflowPlan, node: GraphNode, results: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    graph = plan.graph
    hidden = {
        "UNIQUE_ID": node.id,
        "PROMPT": graph.to_api(),
        "EXTRA_PNGINFO": {"workflow": graph.workflow} if graph.workflow else {},
    }
    linked = {name: results[link.node][link.slot] for name, link in node.links().items()}
    asked = plan.schemas[node.class_type].hidden
    return {**node.inputs, **linked, **{name: hidden[kind] for name, kind in asked.items() if kind in hidden}}
