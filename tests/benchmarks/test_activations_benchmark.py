"""What published networks take beside their weights, against the figures that a review counted by fake tensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import activations
import pytest

DECODES = {  # GB in half and in fp32
    "CogVideoX, 49 frames 720×480": (15.8, 31.7),
    "the same in tiles": (4.0, 8.0),
    "SVD-XT, 25 frames 1024×576": (30.2, 60.4),
    "the same, 8 frames at once": (9.7, 19.4),
}


@pytest.mark.parametrize("name", DECODES)
def test_a_decode_takes_what_was_counted_of_it(name: str) -> None:
    found = activations.decode_of(activations.DECODES[name])
    assert (found["half"], found["fp32"]) == pytest.approx(DECODES[name], rel=0.03)


def test_it_writes_what_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--networks", "cogvideox-2b", "svd-xt", "--decodes", "--size", "cut", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["activations.py", *given])
    activations.main()
    (file,) = tmp_path.iterdir()
    video, svd = json.loads(file.read_text(encoding="utf-8"))["steps_gigabytes"].values()
    assert 0 < video["half"] < video["fp16, stream wide"] < video["rerun in fp32"]
    assert "fp16, stream wide" not in svd and 0 < svd["half"] < svd["fp16, every layer wide"]
