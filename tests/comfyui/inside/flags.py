"""What is said of flags that a real ComfyUI was started with: --reserve-vram 2 --fp32-vae --fast fp16_accumulation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, reload
from pathlib import Path

import pytest
from in_comfyui import OURS, import_ours

import_ours()
host, flags = import_module(f"{OURS}.comfyui_host.host"), import_module(f"{OURS}.comfyui_host.flags")
report, diagnosis = import_module(f"{OURS}.nodes.report"), import_module(f"{OURS}.pipelines.insight.diagnosis")
WISHES = {"--lowvram": "group", "--novram": "sequential", "--highvram": "none", "--gpu-only": "none"}


def test_the_report_names_what_it_was_started_with(tmp_path: Path) -> None:
    model = import_module("small_families").BUILDERS["2b"](tmp_path / "2b")
    handle = import_module("moving").opened(model, "none", host.placement())
    shown = report.with_surroundings(diagnosis.diagnose_pipeline(handle))
    assert {flag["given"]: flag["effect"] for flag in shown.as_dict()["comfyui"]["flags"]} == {
        "--reserve-vram 2": flags.HONOURED,
        "--fp32-vae": flags.NO_EFFECT,
        "--fast fp16_accumulation": flags.HONOURED,
    }
    lines = shown.text().splitlines()
    assert any("no effect: choose precision 'fp32' at Decode Latents" in line for line in lines)
    assert max(map(len, lines)) <= 96


@pytest.fixture
def _arguments() -> Iterator[None]:
    """ComfyUI's, put back."""
    before = sys.argv[1:]
    yield
    sys.argv[1:] = before
    reload(import_module("comfy.cli_args"))


@pytest.mark.usefixtures("_arguments")
@pytest.mark.parametrize("flag", WISHES)
def test_the_offload_that_it_asks_for(flag: str) -> None:
    """ComfyUI's parser reads each anew, since one excludes another."""
    sys.argv[1:] = [flag]
    reload(import_module("comfy.cli_args"))
    assert [each.given for each in host.flags()] == [flag]
    assert host.memory_wish() == WISHES[flag]
