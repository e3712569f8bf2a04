"""Fuzzing of compiled-code files: a damaged file is rejected with a reason or read correctly."""

from __future__ import annotations

import json

import pytest
from comfyui_onediff_guard.pipelines.compile.cache import Target, parse, write
from comfyui_onediff_guard.pipelines.errors import BadCompiled
from comfyui_onediff_guard.precision.machine import Platform
from hypothesis import given, settings
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("compiled") / "whole"
    write(file, TARGET, ARTIFACTS)
    return file.read_bytes()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with changed bytes or changed header values."""
    if draw(st.booleans()):
        return draw(mutated_bytes(whole))
    header, _, artifacts = whole.partition(b"\n")
    return json.dumps(draw(mutated(json.loads(header)))).encode() + b"\n" + artifacts


@settings(max_examples=by_tier(5_000, 60))
@given(data=st.data())
def test_damaged_file_is_rejected_or_read_correctly(whole: bytes, data: st.DataObject) -> None:
    said = ""
    try:
        target, artifacts = parse(data.draw(damaged(whole)), "damaged")
        assert artifacts == ARTIFACTS and target.name and target.in_words()
    except BadCompiled as error:
        said = str(error)
    assert not said or (said.startswith("'damaged' ") and len(said) < 3000)
