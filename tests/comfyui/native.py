"""Runs native_in_comfyui.py in a checkout's interpreter, and reads what it found."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import legs
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


def run(cases: str, folder: Path, *options: str, leg: Leg) -> Ran:
    """cases: a module beside this one. options: of ComfyUI's main.py. leg: that the fixture of this name gives."""
    pack = legs.install_pack(folder / "custom_nodes")
    command = [leg.python, HERE / "native_in_comfyui.py", leg.checkout, pack, folder, cases, *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment | {"PYTHONUTF8": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=3 * HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-8000:]
    return {**load_file(folder / "tensors.safetensors"), **json.loads((folder / "facts.json").read_text("utf-8"))}


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest, as a share of the largest value."""
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()
