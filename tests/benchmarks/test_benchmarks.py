"""The benchmarks run on small models and write their figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

GPU_STAGES = "steps fp16 stream offload end_to_end rerun attention layout"
RUNS = {
    "gpu": f"--small --models cogvideox-2b svd-xt --rounds 2 --seconds 100000 --stage {GPU_STAGES}",
    "all_layers_scaled": "--rounds 2 --blocks 1 --heads 1 --size deep",
    "scaled_bytes": "--networks cogvideox-2b svd-xt --size tiny",
    "activations": "--networks cogvideox-2b svd-xt --decodes --size cut",
}


@pytest.mark.parametrize("name", RUNS)
def test_benchmark_writes_figures_without_errors(root: Path, tmp_path: Path, name: str) -> None:
    figures: list[float] = []
    errors: list[str] = []

    def collect_errors(found: dict[str, Any]) -> dict[str, Any]:
        errors.extend(value for key, value in found.items() if key == "error" and isinstance(value, str))
        return found

    def collect_figure(text: str) -> float:
        figures.append(float(text))
        return figures[-1]

    script = root / "scripts" / "benchmarks" / f"{name}.py"
    command = [sys.executable, str(script), *RUNS[name].split(), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (file,) = tmp_path.glob("*.json")
    json.loads(file.read_text(encoding="utf-8"), object_hook=collect_errors, parse_float=collect_figure)
    assert len(figures) > 5 and not errors, errors
