"""Runs native_in_comfyui.py in a checkout's interpreter, and reads what it found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import legs
import pytest
import second_device
import torch
from legs import Leg
from safetensors.torch import load_file
from waiting import HANG_SECONDS

HERE = Path(__file__).resolve().parent
Ran = dict[str, Any]  # "case/name" → tensor or fact
FAMILIES = (  # of ComfyUI's own models
    *("sd15", "sdxl", "flux", "flux2", "qwen_image", "lumina2", "z_image"),
    *("svd", "wan", "wan22", "cogvideox", "ltxv", "ltx2", "ltx2_sound", "hunyuan_video", "hunyuan_video_15"),
    *("minimax_h3", "ace"),
)


CARD = ("--second-device",)
WHOLE = {"CPU": (), "card": CARD}
CARDS = WHOLE | {"weights streamed to the card": (*CARD, "--novram", "--async-offload")}
SAME_BITS = {"MKL_CBWR": "COMPATIBLE"}  # else MKL's products hang on where in memory a weight happens to lie


def run(cases: str, folder: Path, *options: str, leg: Leg) -> Ran:
    """cases: a module beside this one. options: of main.py, or CARD. leg: what the fixture of this name gives.

    On the second device, nothing may be unordered, and no weights may be left there.
    """
    on_card = CARD[0] in options
    if on_card and (why := second_device.why_not()):
        pytest.skip(why)
    pack = legs.install_pack(folder / "custom_nodes")
    command = [leg.python, HERE / "native_in_comfyui.py", leg.checkout, pack, folder, cases, *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment | {"PYTHONUTF8": "1"} | (SAME_BITS if on_card else {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=3 * HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    ran = {**load_file(folder / "tensors.safetensors"), **json.loads((folder / "facts.json").read_text("utf-8"))}
    if on_card:
        assert not ran["card/hazards"]
        assert ran["card/left"] <= 4096, "a constant or two that ComfyUI keeps"
    return ran


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest, as a share of the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
