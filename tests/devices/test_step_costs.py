"""Costs that guard, scaled layers, step cache and offload add to a sampling step, counted on the second device."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import second_device
import step_costs

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")

# Kernels of a step of the small model: diffusers alone; added by the guard; added by guard and learned scales
KERNELS = {"2b": (169, 13, 64), "wan": (530, 31, 111), "cogview3": (166, 13, 66), "cogview4": (384, 24, 118)}
PER_CALL = 40  # bytes that the guard copies to the host per denoiser call, at most


@pytest.mark.parametrize("model", KERNELS)
def test_step_costs_stay_within_recorded_limits(model: str) -> None:
    command = [sys.executable, step_costs.__file__, model]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    _waits(found)
    _copies(found)
    _kernels(found, *KERNELS[model])


def _waits(found: dict[str, Any]) -> None:
    """The host waits once per call for the guard, and for nothing else."""
    own = found["diffusers"]["a step"]
    for way in ("guard", "offload model", "guard and learned scales"):
        step = found[way]["a step"]
        assert step["waits"] == pytest.approx(own["waits"] + own["calls"]), (way, found[way]["places"])
        assert step["waits in the denoiser"] == own["waits in the denoiser"], (way, found[way]["places"])
    assert found["step cache"]["a step"]["waits"] <= found["guard"]["a step"]["waits"], found["step cache"]["places"]
    in_groups, theirs = found["offload group"], found["diffusers, offload group"]
    assert in_groups["a step"]["waits"] < theirs["a step"]["waits"], in_groups["places"]


def _copies(found: dict[str, Any]) -> None:
    """Weights are not moved, and unchanged ones are never copied back."""
    own = found["diffusers"]["a step"]
    for way in ("guard", "step cache", "offload model", "guard and learned scales"):
        step, run = found[way]["a step"], found[way]["a run"]
        assert step["bytes to the device"] <= own["bytes to the device"], way
        assert step["bytes to the host"] <= PER_CALL * own["calls"], way
        assert run["bytes to the device"] < 2**18 and run["bytes to the host"] < 2**14, "prompt and latents"
    assert found["offload group"]["a step"]["bytes to the host"] <= PER_CALL * own["calls"]


def _kernels(found: dict[str, Any], own: int, guard: int, scaled: int) -> None:
    step = {way: found[way]["a step"]["kernels"] for way in found}
    assert step["diffusers"] == pytest.approx(own, abs=1)
    assert step["guard"] - step["diffusers"] <= 1.05 * guard
    assert step["guard and learned scales"] - step["diffusers"] <= 1.05 * scaled
