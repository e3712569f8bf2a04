"""The local host: it checks the whole workflow first, then runs only the needed nodes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from at_once import HANG_SECONDS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.errors import (
    HeadlessError,
    InterruptedRunError,
    RunFailedError,
    UnknownNodesError,
    WorkflowError,
)
from comfyui_onediff_guard.headless.hosts.result import RunProgress, RunResult
from PIL import Image

Run = Callable[..., RunResult]


def test_run_returns_files_outputs_and_results(run: Run, workflow: dict[str, Any], tmp_path: Path) -> None:
    seen: list[RunProgress] = []
    result = run(workflow, on_progress=seen.append)
    assert [path.name for path in result.files] == [f"noise_0000{n}_.png" for n in (1, 2, 3)]
    assert all(path.is_file() and path.parent == tmp_path / "out" / "pictures" for path in result.files)
    assert result.outputs["2"]["images"][0] == {
        "filename": "noise_00001_.png",
        "subfolder": "pictures",
        "type": "output",
    }
    assert result.results["1"][0].shape == (3, 16, 32, 3)
    assert result.results["2"] == ()
    assert result.summaries() == ["1: 32 px, cat"]
    assert [progress.node for progress in seen] == ["node 1 (Some Noise)", "node 2 (SaveImage)"]


def test_nodes_run_in_inference_mode_and_only_if_needed(
    run: Run, workflow: dict[str, Any], classes: dict[str, type]
) -> None:
    workflow["3"] = {"class_type": "Noise", "inputs": {"width": 99999}}  # invalid
    result = run(workflow)
    assert "3" not in result.results
    assert result.results["1"][0].is_inference()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"width": 4}, r"node 1 \(Noise\): input 'width' is 4, must be at least 8"),
        ({"width": 65}, "input 'width' is 65, must be at most 64"),
        ({"width": "wide"}, "input 'width' is 'wide', expected a whole number"),
        ({"width": 8.5}, "input 'width' is 8.5, expected a whole number"),
        ({"width": True}, "input 'width' is True, expected a whole number"),
        ({"gain": float("nan")}, "inputs.gain.* is nan: input should be a finite number"),
        ({"gain": 10**400}, "input 'gain' is 1000"),
        ({"gain": "1e400"}, "input 'gain' is '1e400', expected a number"),
        ({"width": "+-5"}, "input 'width' is '\\+-5', expected a whole number"),
        ({"width": "9" * 5000}, "input 'width' is '9999.*…', expected a whole number"),
        ({"kind": "purple"}, "input 'kind' is 'purple', expected one of 'uniform', 'nan'"),
        ({"wdith": 8}, "has no input 'wdith'. Its inputs: width, seed"),
        ({"mask": 3}, "input 'mask' needs a link to a node that outputs MASK, found the value 3"),
    ],
)
def test_invalid_input_value_is_reported_before_run(
    run: Run, workflow: dict[str, Any], inputs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    del workflow["1"]["_meta"]
    workflow["1"]["inputs"] |= inputs
    with pytest.raises(WorkflowError, match=message):
        run(workflow)
    assert not (tmp_path / "out").exists()


def test_all_faults_are_reported_together(run: Run, workflow: dict[str, Any]) -> None:
    del workflow["1"]["inputs"]["seed"]
    workflow["1"]["inputs"]["width"] = 1
    workflow["2"]["inputs"]["images"] = ["1", 1]
    with pytest.raises(WorkflowError) as error:
        run(workflow)
    text = str(error.value)
    assert "input 'seed' (INT) is missing" in text
    assert "must be at least 8" in text
    assert "input 'images' takes IMAGE, but node 1 (Some Noise) outputs STRING" in text


def test_link_to_missing_output_is_rejected(run: Run, workflow: dict[str, Any]) -> None:
    workflow["2"]["inputs"]["images"] = ["1", 2]
    with pytest.raises(WorkflowError, match=r"linked to output 2 of node 1 \(Some Noise\), which has 2"):
        run(workflow)


def test_numbers_given_as_text_are_accepted(run: Run, workflow: dict[str, Any]) -> None:
    workflow["1"]["inputs"] |= {"width": "16", "gain": "0.5", "seed": 3.0}
    assert run(workflow).results["1"][0].shape[2] == 16


@pytest.mark.parametrize(("number", "fault"), [(12, None), (3, "number 3 is odd, use 4")])
def test_validate_inputs_overrides_declared_range(
    run: Run, workflow: dict[str, Any], number: int, fault: str | None
) -> None:
    workflow["3"] = {"class_type": "Picky", "inputs": {"images": ["1", 0], "number": number}}
    workflow["2"]["inputs"]["images"] = ["3", 0]
    if fault is None:
        run(workflow)  # although 12 is over the declared maximum, as in ComfyUI
    else:
        with pytest.raises(WorkflowError, match=fault):
            run(workflow)


def test_unknown_node_types_are_listed_with_server_hint(run: Run, workflow: dict[str, Any]) -> None:
    workflow["8"] = {"class_type": "VHS_VideoCombine", "inputs": {}}
    workflow["9"] = {"class_type": "KSampler", "inputs": {}}
    with pytest.raises(
        UnknownNodesError, match=r"Node type KSampler, VHS_VideoCombine needs ComfyUI.*--server"
    ) as error:
        run(workflow)
    assert error.value.exit_code == 2


def test_workflow_without_output_node_is_rejected(run: Run, workflow: dict[str, Any]) -> None:
    del workflow["2"]
    with pytest.raises(WorkflowError, match="no output node"):
        run(workflow)


def test_failing_node_is_named(run: Run, workflow: dict[str, Any]) -> None:
    workflow["2"] = {"class_type": "Broken", "inputs": {"images": ["1", 0]}}
    with pytest.raises(RunFailedError, match=r"node 2 \(Broken\) failed: RuntimeError: the GPU is on fire"):
        run(workflow)
    assert not torch.is_inference_mode_enabled()


def patient_node(started: threading.Event, steps: int) -> type:
    """Waits for host.interrupt(), as a sampler does between two steps. Without steps, Ctrl-C is pressed in it."""

    class Wait:
        RETURN_TYPES = ()
        FUNCTION = "go"
        OUTPUT_NODE = True
        INPUT_TYPES = classmethod(lambda cls: {"required": {}})

        def go(self) -> None:
            if not steps:
                signal.raise_signal(signal.SIGINT)
            with host.Progress(steps, None) as progress:
                started.set()
                for step in range(steps):
                    time.sleep(0.01)
                    progress.update(step, "waiting")

    return Wait


@pytest.mark.parametrize(
    ("cause", "error"),
    [("signal", InterruptedRunError), ("timeout", RunFailedError), ("late signal", InterruptedRunError)],
)
def test_ctrl_c_or_timeout_stops_run_between_steps(cause: str, error: type[HeadlessError], tmp_path: Path) -> None:
    from comfyui_onediff_guard.headless.hosts.local import run_local

    started = threading.Event()
    handler = signal.getsignal(signal.SIGINT)
    if cause == "signal":

        def press_ctrl_c() -> None:
            started.wait(HANG_SECONDS)
            signal.raise_signal(signal.SIGINT)

        threading.Thread(target=press_ctrl_c, daemon=True).start()
    with pytest.raises(error):
        run_local(
            {"1": {"class_type": "Wait", "inputs": {}}},
            models=[],
            input_dir=tmp_path,
            output_dir=tmp_path,
            classes={"Wait": patient_node(started, 0 if cause == "late signal" else 10_000)},
            timeout=0.3 if cause == "timeout" else None,
        )
    assert signal.getsignal(signal.SIGINT) is handler


def test_ui_format_gives_same_result_as_api_format(run: Run, workflow: dict[str, Any]) -> None:
    ui = {
        "nodes": [
            {"id": 1, "type": "Noise", "widgets_values": [32, 1, "fixed", "uniform", "cat", 1.0]},
            {
                "id": 2,
                "type": "SaveImage",
                "inputs": [{"name": "images", "type": "IMAGE", "link": 1}],
                "widgets_values": ["pictures/noise"],
            },
        ],
        "links": [[1, 1, 0, 2, 0, "IMAGE"]],
    }
    result, expected = run(ui), run(workflow)
    assert torch.equal(result.results["1"][0], expected.results["1"][0])
    with Image.open(result.files[0]) as picture:
        assert '"links": [[1, 1, 0, 2, 0, "IMAGE"]]' in picture.info["workflow"]
        assert '"class_type": "Noise"' in picture.info["prompt"]
