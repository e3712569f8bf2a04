"""Two processes use the same folders at the same time: all results are right and all files complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.precision.overrides import read_all
from tiers import by_tier

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


def run_processes(code: str, arguments: list[list[str]]) -> list[Any]:
    """JSON output of processes that start together and begin when all are ready."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "support")}
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
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return [json.loads(text) for text in printed]


def test_processes_sharing_a_profile_folder_get_the_same_results(
    model_folder: Callable[..., Path], tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    model, shared, times = str(model_folder("svd", "inside")), tmp_path / "profiles", by_tier(20, 2)
    (alone,) = run_processes(RUNS, [[model, str(tmp_path / "own"), str(times)]])
    printed = run_processes(RUNS, [[model, str(shared), str(times)]] * 2)
    assert all(set(each["frames"]) <= set(alone["frames"]) for each in printed), "frames differ from those of one alone"
    (profile,) = [profile for _, profile in read_all(shared)]
    (own,) = [profile for _, profile in read_all(tmp_path / "own")]
    assert profile == own
    assert [path.suffix for path in shared.iterdir()] == [".json"], "something is left behind"
    figure("Two processes with one profile folder: runs with other frames than a process alone", f"0 of {2 * times}")
