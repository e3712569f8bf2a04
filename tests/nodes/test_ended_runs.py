"""Reports of NaN Guard (native) on complete runs and on runs that ended early."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.comfyui_host.native_network import ComfyNetwork
from comfyui_onediff_guard.comfyui_host.runs import Settings, guarded_run
from comfyui_onediff_guard.precision.guard import GuardPolicy, GuardStopped, OnFailure, Scope
from comfyui_onediff_guard.precision.policy import Component

FINE, TOO_LARGE, BROKEN = 1.0, 1e4, float("nan")  # inputs; the network multiplies them by 64
STOP = {"on_failure": OnFailure.STOP}
OFF = {"on_failure": OnFailure.OFF}
INTERRUPT, ERROR = host.Interrupted("by the user"), torch.OutOfMemoryError("of the test")


def report_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, calls: Iterable[Any], *, steps: int, **policy: Any
) -> dict[str, Any]:
    """calls: the input of each call, or the error that it raises."""
    outputs: list[dict[str, Any]] = []
    monkeypatch.setattr(host, "send_report", lambda _id, output, _type: outputs.append(output))
    monkeypatch.setenv(host.PROFILES_VARIABLE, str(tmp_path))
    network = torch.nn.Linear(64, 2, bias=False).half().requires_grad_(False)
    network.weight.fill_(1.0)

    def attempt(x: torch.Tensor, raised: list[BaseException]) -> torch.Tensor:
        if raised:
            raise raised[0]
        return network(x.to(network.weight.dtype))

    comfy_network = ComfyNetwork(
        "Tiny", Component.DENOISER, network, torch.float16, torch.device("cpu"), attempt, attempt, attempt
    )
    calls, caught = [*calls], None
    try:
        with guarded_run(Settings(GuardPolicy(scope=Scope.STEP, **policy), node_id="7"), steps) as run:
            for each in calls:
                value, raised = (1.0, [each]) if isinstance(each, BaseException) else (each, [])
                run.call(comfy_network, torch.full((1, 64), value).half(), raised)
    except (GuardStopped, host.Interrupted, torch.OutOfMemoryError) as error:
        caught = error
    errors = [each for each in calls if isinstance(each, BaseException)]
    assert isinstance(caught, GuardStopped) or [caught] == (errors or [None]), "the error that ended the run is raised"
    (output,) = outputs
    return output["onediff_guard"][0]


@pytest.mark.parametrize(
    ("calls", "steps", "policy", "ended", "cells", "summary"),
    [
        ([FINE] * 3, 3, {}, False, ["half"] * 3, "3 steps, all fine."),
        ([FINE] * 4, 2, {}, False, ["half"] * 2, "2 steps, all fine."),
        ([FINE] * 3, 4, {}, False, ["half"] * 3, "3 calls, all fine."),
        ([FINE, TOO_LARGE], 2, OFF, False, ["half", "failed"],
         "2 steps, 1 with NaN, infinite or clipped values: the result is broken; "
         "set the NaN Guard's on_failure to 'rerun'."),
        ([FINE, FINE, TOO_LARGE], 4, STOP, True, ["half", "half", "failed"],
         "3 calls, 1 with NaN, infinite or clipped values; ended by the NaN Guard at call 3."),
        ([TOO_LARGE], 1, STOP, True, ["failed"],
         "1 call, 1 with NaN, infinite or clipped values; ended by the NaN Guard at call 1."),
        ([TOO_LARGE, BROKEN], 4, {}, True, ["rerun", "failed"],
         "2 calls, 1 recomputed in fp32, 1 with NaN, infinite or clipped values; ended by the NaN Guard at call 2."),
        ([FINE, FINE, FINE, INTERRUPT], 4, {}, True, ["half"] * 3, "3 calls; stopped after call 3."),
        ([FINE, FINE, FINE, FINE, INTERRUPT], 4, {}, True, ["half"] * 4, "4 calls; stopped after call 4."),
        ([INTERRUPT], 4, {}, True, [], "; stopped at call 1."),
        ([FINE, TOO_LARGE, ERROR], 4, {}, True, ["half", "rerun"],
         "2 calls, 1 recomputed in fp32; ended by an error after call 2."),
        ([ERROR], 4, {}, True, [], "; ended by an error at call 1."),
    ],
)  # fmt: skip
def test_report_says_how_run_ended_and_which_calls_failed(
    calls: list[Any],
    steps: int,
    policy: dict[str, Any],
    ended: bool,
    cells: list[str],
    summary: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    report = report_of(monkeypatch, tmp_path, calls, steps=steps, **policy)
    assert report["summary"].endswith(summary)
    assert (report["ended"], report["cells"]) == (ended, cells)
    assert report["outcomes"].get("non-finite", 0) == cells.count("failed")
