"""Two processes at the same time on the folders that they share: every result is right, every file is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.precision.overrides import read_all
from tiers import drawn

RUNS = """
import hashlib, json, sys
from dataclasses import replace
from pathlib import Path
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
from generations import Generation
from small_runs import opened

model, profiles, times = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
frames, outcomes = set(), []
for _ in range(times):
    handle = replace(opened(model, "none", "fp16", profiles=profiles), policy=GuardPolicy(scope=Scope.LEARNED))
    generation = Generation(handle, "svd", seed=3)
    generation.whole()
    report = generation.reports["denoiser"].as_dict()
    frames.add(hashlib.sha256(generation.frames.numpy().tobytes()).hexdigest())
    outcomes.append(report["outcomes"])
print(json.dumps({"frames": sorted(frames), "outcomes": outcomes}))
"""


def at_once(code: str, arguments: list[list[str]]) -> list[Any]:
    """What processes told that were started together, and begin when all are ready."""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (here, here.parent / "support")))}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *each],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for each in arguments
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(text) for text in told]


def test_runs_that_learn_into_one_folder(
    model_folder: Callable[..., Path], tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    model, shared, times = str(model_folder("svd", "inside")), tmp_path / "profiles", drawn(20, 2)
    (alone,) = at_once(RUNS, [[model, str(tmp_path / "own"), str(times)]])
    told = at_once(RUNS, [[model, str(shared), str(times)]] * 2)
    assert all(set(each["frames"]) <= set(alone["frames"]) for each in told), "other frames than those of one alone"
    (profile,) = [profile for _, profile in read_all(shared)]
    (own,) = [profile for _, profile in read_all(tmp_path / "own")]
    assert profile == own
    assert [path.suffix for path in shared.iterdir()] == [".json"], "something is left behind"
    figure(
        "two processes that save overrides to one folder: runs whose frames differ from a single process's",
        f"0 of {2 * times}",
    )
