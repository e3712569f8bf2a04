"""Every family on the second device, with every offload mode, and with overflow in fp16.

Results are bit-equal to the CPU's, no access is unordered, and no memory stays in use.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import device_matrix
import pytest
import second_device

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")

SAME_BITS = {"MKL_CBWR": "COMPATIBLE"}  # otherwise MKL's products depend on the address of a weight


TOGETHER = (("2b",), ("wan-two",), ("svd",), ("5b-i2v", "1.5", "cogview3", "cogview4", "wan", "wan-ti2v"))


@pytest.mark.parametrize("models", TOGETHER, ids=" ".join)
def test_family_is_bit_equal_to_cpu(tmp_path: Path, models: tuple[str, ...]) -> None:
    """models: run in one process."""
    result = tmp_path / "result.json"
    command = [sys.executable, device_matrix.__file__, "second", str(result), *models]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | SAME_BITS)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(result.read_text())
    assert len(rows) == sum(len(device_matrix.SECOND[model]) for model in models)
    for leg, row in rows.items():
        assert "error" not in row, (leg, row["error"])
        assert len(row["runs"]) == 2, leg
        assert all(run["latents"] == run["frames"] == 0 for run in row["runs"]), (leg, row["runs"])
        assert not row["hazards"], (leg, row["hazards"])
        assert any(run["cached"] for run in row["runs"]) == leg.endswith("step cache"), (leg, row["runs"])
        assert row["left"] == 0, leg
        if row["runs"][0]["plan"] == "fp16":
            assert not any(run["reruns"] for run in row["runs"]), (leg, row["runs"])


def test_every_family_is_assigned_to_a_process() -> None:
    assert sorted(itertools.chain(*TOGETHER)) == sorted(device_matrix.MODELS)
