"""Tests that need ComfyUI's classes: runs each file of inside/ in a ComfyUI process, for each checkout."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import legs
import pytest
import second_device
from waiting import HANG_SECONDS

HERE = Path(__file__).resolve().parent / "inside"
CARD, STREAMED = ("--second-device",), ("--second-device", "--novram", "--async-offload")
ON_BOTH = {"": (), ", card": CARD}
OPTIONS = {  # ComfyUI's options by file and name of the variant; all other files run on the CPU
    "guard_controlnets": ON_BOTH,
    "guard_families": ON_BOTH | {", streamed to the card": STREAMED},
    "guard_vae": ON_BOTH,
    "guard_video_vae": ON_BOTH,
    "probe": ON_BOTH,
    "memory": {"": CARD},
    "memory_driven_out": {"": ("--disable-smart-memory", *CARD)},
    "layout": {"": CARD, ", channels last": ("--force-channels-last", *CARD)},
    "flags": {"": ("--reserve-vram", "2", "--fp32-vae", "--fast", "fp16_accumulation")},
}
SHARED = ("hidden", "in_comfyui", "model_nodes", "native_models", "native_layouts", "native_newer", "native_table")
SHARED += ("simulated_card", "further_image_layouts", "further_video_layouts")
FILES = sorted(file.stem for file in HERE.glob("*.py") if file.stem not in SHARED)
PARTS = {f"{name}{mode}": (name, options) for name in FILES for mode, options in OPTIONS.get(name, {"": ()}).items()}
SAME_BITS = {"MKL_CBWR": "COMPATIBLE"}  # otherwise MKL's products depend on the memory address of a weight
SUMMARY = re.compile(r"^=* ?(\d+ (?:failed|passed|skipped|error).*) in [\d.]+s", re.MULTILINE)


@pytest.mark.parametrize("part", PARTS)
def test_file_passes_inside_comfyui(leg: legs.Leg, tmp_path: Path, part: str) -> None:
    name, options = PARTS[part]
    on_card = CARD[0] in options
    if on_card and (why := second_device.why_not()):
        pytest.skip(why)
    pack = legs.install_pack(tmp_path / "custom_nodes")
    command = [leg.python, HERE / "in_comfyui.py", leg.checkout, pack, HERE / f"{name}.py", *options]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    if folder := os.environ.get("ONEDIFF_GUARD_TABLES"):
        environment["ONEDIFF_GUARD_TABLES"] = str(Path(folder).resolve())
    done = subprocess.run(
        list(map(str, command)),
        cwd=tmp_path,
        env=environment | {"PYTHONUTF8": "1"} | (SAME_BITS if on_card else {}),
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=3 * HANG_SECONDS,
    )
    print(done.stdout[-16000:])  # names each test: after a crash, the last one caused it
    assert done.returncode == 0, done.stderr[-4000:]
    ended = SUMMARY.search(done.stdout)
    assert ended, f"pytest did not finish: {done.stderr[-4000:]}"
    if "passed" not in ended[1]:
        pytest.skip(f"{ended[1]}: {done.stdout[-400:]}")
