"""The host without ComfyUI: checks a workflow, then runs what its output nodes need, one node after another.

No queue, no cache between runs, no lists, no lazy inputs, no node types beyond the mapping it is given: who needs
them runs ComfyUI.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import HeadlessError, InterruptedRunError, RunFailedError
from ..files import ensure_writable, file_entries
from ..progress import libraries_without_bars
from ..workflow import settings, ui_format
from ..workflow.graph import Graph, Link, Node, from_api, is_ui_format
from ..workflow.schema import Schema
from ..workflow.validate import Plan, known_schemas, plan
from .result import Progress, ProgressCallback, RunResult, no_progress

logger = logging.getLogger(__name__)


def default_classes() -> dict[str, type]:
    """This pack's nodes and the closed list of core nodes."""
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

    Args:
        workflow: a graph, or a workflow's JSON in API or UI format.
        models: folders that are searched for models: laid out as ComfyUI's, or simply side by side.
        input_dir: where LoadImage looks.
        output_dir: where results go; made if it isn't there.
        changes: inputs to set first.
        classes: node classes by type; default this pack's and a few core ones.
        timeout: seconds after which the run is stopped.
        on_progress: told each node that starts.
        first: False in those of several processes that only help with what all compute together: that is run, and what
            it needs.

    Raises:
        WorkflowError: the workflow can't run; nothing ran.
        RunFailedError: a node raised, or the time was up.
        OutputError: a result could not be written.
        InterruptedRunError: Ctrl-C.
    """
    from ...comfyui_host import host

    folders = host.plain_folders(
        models=[root.resolve() for root in models], input=input_dir.resolve(), output=output_dir.resolve()
    )
    with folders as interrupt:
        node_classes = default_classes() if classes is None else classes
        graph = _read(workflow, node_classes)
        graph = settings.apply(graph, changes, known_schemas(graph.class_types(), node_classes))
        checked = plan(graph, node_classes)
        ensure_writable(output_dir)
        started = time.perf_counter()
        with _stoppable(interrupt, timeout) as stop, libraries_without_bars():
            order = checked.order if first else _together(checked, node_classes)
            outputs, results = _Runner(checked, node_classes, stop, on_progress).run(order)
        entries = [entry for ui in outputs.values() for entry in file_entries(ui) if entry.type != "input"]
        files = [output_dir / entry.path for entry in entries]
    return RunResult(outputs, results, files, time.perf_counter() - started)


def _together(checked: Plan, classes: Mapping[str, type]) -> Sequence[str]:
    """The nodes that all of several processes run, and those that they need, in the order of the plan."""
    nodes = checked.graph.nodes
    needed: set[str] = set()
    for node_id in reversed(checked.order):
        if node_id in needed or _is_together(nodes[node_id], classes):
            needed |= {node_id, *(value.node for value in nodes[node_id].inputs.values() if isinstance(value, Link))}
    return [node_id for node_id in checked.order if node_id in needed]


def _is_together(node: Node, classes: Mapping[str, type]) -> bool:
    together = getattr(classes[node.class_type], "TOGETHER", False)
    return bool(node.inputs.get(together)) if isinstance(together, str) else together


def read_local(workflow: Graph | Mapping[str, Any]) -> tuple[Graph, dict[str, Schema]]:
    """A workflow, and the schemas of its node types.

    Raises:
        WorkflowError: it is none, or has node types that need a ComfyUI.
    """
    classes = default_classes()
    graph = _read(workflow, classes)
    return graph, known_schemas(graph.class_types(), classes)


def _read(workflow: Graph | Mapping[str, Any], classes: Mapping[str, type]) -> Graph:
    if isinstance(workflow, Graph):
        return workflow
    if is_ui_format(workflow):
        return ui_format.convert(workflow, known_schemas(ui_format.class_types(workflow), classes))
    return from_api(workflow)


@dataclass
class _Stop:
    """Why a run is to stop, once it is."""

    reason: HeadlessError | None = None


@contextmanager
def _stoppable(interrupt: Any, timeout: float | None) -> Iterator[_Stop]:
    """Let Ctrl-C, and a timeout, stop the running node between two steps. A second Ctrl-C stops at once."""
    stop = _Stop()

    def ask(reason: HeadlessError) -> None:
        stop.reason = stop.reason or reason
        interrupt()

    def on_signal(_number: int, _frame: object) -> None:
        if stop.reason is not None:
            raise KeyboardInterrupt
        logger.warning("Stopping after the current step; press Ctrl-C again to stop at once.")
        ask(InterruptedRunError("Interrupted: nothing more was written."))

    in_main_thread = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGINT, on_signal) if in_main_thread else None
    timer = threading.Timer(
        timeout or 0, ask, [RunFailedError(f"Stopped: the run was not done after {timeout or 0:g} s.")]
    )
    timer.daemon = True
    if timeout:
        timer.start()
    try:
        yield stop
    finally:
        timer.cancel()
        if in_main_thread:
            signal.signal(signal.SIGINT, previous)


@dataclass
class _Runner:
    plan: Plan
    classes: Mapping[str, type]
    stop: _Stop
    on_progress: ProgressCallback
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def run(self, order: Sequence[str]) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[Any, ...]]]:
        import torch

        with torch.inference_mode():  # as ComfyUI does, so that nodes behave here as there
            for node_id in order:
                self._raise_if_stopped()
                self.on_progress(Progress(self.plan.graph.nodes[node_id].label))
                self._run_node(node_id)
        return self.outputs, self.results

    def _raise_if_stopped(self, cause: BaseException | None = None) -> None:
        if self.stop.reason is not None:
            raise self.stop.reason from cause

    def _run_node(self, node_id: str) -> None:
        from ...comfyui_host import host

        node = self.plan.graph.nodes[node_id]
        node_class = self.classes[node.class_type]
        arguments = self._arguments(node_id)
        try:
            returned = getattr(node_class(), node_class.FUNCTION)(**arguments)
        except HeadlessError:
            raise
        except host.Interrupted as error:
            self._raise_if_stopped(error)
            raise InterruptedRunError(f"{node.label} was interrupted: nothing more was written.") from error
        except Exception as error:
            self._raise_if_stopped(error)
            raise RunFailedError(f"{node.label} failed: {type(error).__name__}: {error}") from error
        if isinstance(returned, dict):
            if returned.get("ui"):
                self.outputs[node_id] = dict(returned["ui"])
            returned = returned.get("result")
        result = tuple(returned or ())
        expected = self.plan.schemas[node.class_type].outputs
        if len(result) != len(expected):
            raise RunFailedError(f"{node.label} gave {len(result)} outputs, its type promises {len(expected)}.")
        self.results[node_id] = result

    def _arguments(self, node_id: str) -> dict[str, Any]:
        graph = self.plan.graph
        node = graph.nodes[node_id]
        arguments = {
            name: self.results[value.node][value.slot] if isinstance(value, Link) else value
            for name, value in node.inputs.items()
        }
        for name, kind in self.plan.schemas[node.class_type].hidden.items():
            if kind == "UNIQUE_ID":
                arguments[name] = node_id
            elif kind == "PROMPT":
                arguments[name] = graph.to_api()
            elif kind == "EXTRA_PNGINFO":
                arguments[name] = {"workflow": graph.workflow} if graph.workflow else {}
        return arguments
