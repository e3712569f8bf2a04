"""Runs `onediff-guard run` in its own process, and reads its output and files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from legs import Server
from PIL import Image, ImageSequence
from waiting import HANG_SECONDS

HEALTHY = "small-healthy"  # names of the small models in models/diffusers
OVERFLOWING = "small-overflowing"  # its residual stream overflows fp16
INSIDE = "small-inside"  # an activation inside a block overflows fp16
SMALL = {  # text to video, small enough for a CPU
    "OneDiffGuardLoadPipeline.backend": "eager",
    "OneDiffGuardSampleCogVideoX.width": 96,
    "OneDiffGuardSampleCogVideoX.height": 64,
    "OneDiffGuardSampleCogVideoX.frames": 9,
    "OneDiffGuardSampleCogVideoX.steps": 2,
    "OneDiffGuardDecodeLatents.tiling": False,
}


@dataclass(frozen=True)
class Ran:
    """The result of `onediff-guard run --json`."""

    code: int
    answer: dict[str, Any]  # the JSON object on stdout
    stderr: str

    @property
    def files(self) -> list[Path]:
        return [Path(name) for name in self.answer["files"]]

    def reports(self, having: str = "reruns") -> list[dict[str, Any]]:
        """Return the nodes' reports that have a key: "reruns" of computing nodes, "diagnosis" of the loader."""
        reports = (report for ui in self.answer["outputs"].values() for report in ui.get("onediff_guard", []))
        return [report for report in reports if having in report]


def start(
    server: Server, workflow: Path, folder: Path, changes: Mapping[str, Any] | None = None
) -> subprocess.Popen[str]:
    """Start `onediff-guard run --server` on a workflow. folder: for the results. changes: become --set."""
    command = [sys.executable, "-m", "comfyui_onediff_guard", "run", str(workflow)]
    command += ["--server", server.url, "--out", str(folder / "out"), "--json", "--timeout", str(HANG_SECONDS)]
    for name, value in (changes or {}).items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    return subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )


def finish(child: subprocess.Popen[str], server: Server) -> Ran:
    try:
        stdout, stderr = child.communicate(timeout=2 * HANG_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        raise AssertionError(f"onediff-guard run did not end\n{server.tail()}") from None
    assert stdout.strip(), f"nothing on stdout, exit code {child.returncode}\n{stderr}\n{server.tail()}"
    return Ran(child.returncode, json.loads(stdout), stderr)


def frames_of(file: Path) -> np.ndarray:
    """Return the frames of an animated WEBP or a video: [frames, height, width, 3], uint8."""
    if file.suffix == ".webp":
        with Image.open(file) as image:
            return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
    with av.open(str(file)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
