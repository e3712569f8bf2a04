"""Fuzzing of compiled-code files: a damaged file is rejected with a reason or read correctly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfyui_onediff_guard.pipelines.compile.cache import Target, parse, write
from comfyui_onediff_guard.pipelines.errors import BadCompiled
from comfyui_onediff_guard.precision.machine import Platform
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes
from tiers import by_tier

TARGET = Target(
    "CogVideoX-5B",
    "0" * 16,
    "bf16",
    "no overflow protection",
    Platform("cpu", "a CPU", "2.13", "", "cpython-311", "Linux"),
)
ARTIFACTS = b"graph\n" * 40
ALL, SMALLER = 5_000, 60


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with changed bytes or changed header values."""
    if draw(st.booleans()):
        return draw(mutated_bytes(whole))
    header, _, artifacts = whole.partition(b"\n")
    return json.dumps(draw(mutated(json.loads(header)))).encode() + b"\n" + artifacts


def test_damaged_file_is_rejected_or_read_correctly(tmp_path: Path, figure: Any) -> None:
    write(tmp_path / "whole", TARGET, ARTIFACTS)

    @settings(max_examples=by_tier(ALL, SMALLER), suppress_health_check=list(HealthCheck))
    @given(damaged((tmp_path / "whole").read_bytes()))
    def one(data: bytes) -> None:
        said = ""
        try:
            target, artifacts = parse(data, "damaged")
            assert artifacts == ARTIFACTS and target.name and target.in_words()
        except BadCompiled as error:
            said = str(error)
        assert not said or (said.startswith("'damaged' ") and len(said) < 3000)

    one()
    figure("damaged files of compiled code, each rejected by name or read correctly", by_tier(ALL, SMALLER))
