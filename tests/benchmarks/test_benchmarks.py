"""The benchmarks run, on small models, and what they compute is what was published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import activations
import pytest
import torch
from denoisers import MODELS, build
from floor import tflop
from networks import NETWORKS

META = torch.device("meta")
STEPS = {  # 10⁹ parameters, 10¹² operations of a step
    "cogvideox-2b": (1.69, 240),
    "cogvideox-5b": (5.57, 664),
    "cogvideox-1.5-5b": (5.57, 2958),
    "cogview3-plus": (2.85, 52),
    "svd-xt": (1.52, 160),
}
PARAMETERS = {  # 10⁹, as published
    "cogvideox-2b": 1.69,
    "cogvideox-5b": 5.57,
    "cogview3-plus": 2.85,
    "cogview4": 6.37,
    "svd-xt": 1.52,
    "sdxl": 2.57,
    "flux": 11.90,
    "qwen-image": 20.43,
    "wan-14b": 14.29,
}
DECODES = {  # GB in half and in fp32
    "CogVideoX, 49 frames 720×480": (15.8, 31.7),
    "the same in tiles": (4.0, 8.0),
    "SVD-XT, 25 frames 1024×576": (30.2, 60.4),
    "the same, 8 frames at once": (9.7, 19.4),
}
GPU = ("--small", "--rounds", "2", "--seconds", "100000")
STAGES = ("steps", "fp16", "stream", "offload", "end_to_end", "rerun", "attention")
RUNS = {  # the script, and what it is about
    "gpu, of transformers": (*GPU, "--models", "cogvideox-2b", "--stage", *STAGES),
    "gpu, of UNets": (*GPU, "--models", "svd-xt", "--stage", "layout"),
    "everything_wide": ("--rounds", "2", "--blocks", "1", "--heads", "1", "--size", "deep"),
    "wide_bytes": ("--networks", "cogvideox-2b", "svd-xt", "--size", "tiny"),
    "activations": ("--networks", "cogvideox-2b", "svd-xt", "--decodes", "--size", "cut"),
}


def ran(root: Path, name: str, *options: str) -> Any:
    command = [sys.executable, str(root / "scripts" / "benchmarks" / f"{name}.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def figures(value: Any) -> list[float]:
    if isinstance(value, dict | list):
        return [each for part in (value.values() if isinstance(value, dict) else value) for each in figures(part)]
    return [value] if isinstance(value, float) else []


def errors(value: Any) -> list[str]:
    if isinstance(value, dict):
        found = [value["error"]] if isinstance(value.get("error"), str) else []
        return found + [each for part in value.values() for each in errors(part)]
    return [each for part in value for each in errors(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_writes_its_figures(root: Path, tmp_path: Path, name: str) -> None:
    done = ran(root, name.partition(",")[0], *RUNS[name], "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = tmp_path.glob("*.json")
    made = json.loads(file.read_text(encoding="utf-8"))
    assert len(figures(made)) > 5 and not errors(made), errors(made)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA card")
def test_full_size_without_a_card_is_refused(root: Path) -> None:
    done = ran(root, "gpu")
    assert done.returncode == 1 and "No CUDA card" in done.stderr and "--small" in done.stderr


@pytest.mark.parametrize("name", STEPS)
def test_a_full_step_has_the_operations_known_for_it(name: str) -> None:
    model = MODELS[name]
    module = build(model, model.sizes["full"], META, torch.bfloat16)
    parameters, operations = STEPS[name]
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(parameters, abs=0.01)
    assert sum(tflop(model, model.sizes["full"]).values()) == pytest.approx(operations, rel=0.01)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_as_large_as_published(name: str) -> None:
    module = NETWORKS[name].make("full", META, torch.float16)
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(PARAMETERS[name], abs=0.006)


@pytest.mark.parametrize("name", DECODES)
def test_a_decode_takes_what_was_counted_of_it(name: str) -> None:
    found = activations.decode_of(activations.DECODES[name])
    assert (found["half"], found["fp32"]) == pytest.approx(DECODES[name], rel=0.03)
