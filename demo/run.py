"""One run of the demo: the shipped workflow on the small model, as `onediff-guard run` runs it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..comfyui_host.host import PROFILES_VARIABLE
from ..headless.workflow.settings import Setting
from .files import FPS, writing
from .outcome import PLAIN, PROTECTED, Case, Outcome

WORKFLOW = Path(__file__).resolve().parents[1] / "workflows" / "api" / "cogvideox_text_to_video.json"
PROMPT = "a slow river of colour moves through the night"
SIZES = {"width": 256, "height": 160, "frames": 25}


def run(case: Case, models: Path, output: Path) -> Outcome:
    from ..headless.hosts.local import run_local
    from ..headless.workflow.graph import read_json

    print(f"Running {WORKFLOW.name} in {case.title} ...", flush=True)
    workflow = read_json(WORKFLOW)
    settings = [*changes(case), Setting("Encode Prompt", "prompt", PROMPT)]
    with tempfile.TemporaryDirectory(prefix=".run-", dir=output) as folder, _nothing_learned_before(folder):
        result = run_local(workflow, models=[models], input_dir=output, output_dir=Path(folder), changes=settings)
        with writing(output):
            video = output / f"{case.video}.mp4"
            os.replace(result.files[0], video)
    decoder = next(node for node, spec in workflow.items() if spec["class_type"] == "OneDiffGuardDecodeLatents")
    return Outcome(case, result.results[decoder][0].float().cpu(), video, result.stages(), result.seconds)


@contextmanager
def _nothing_learned_before(folder: str) -> Generator[None]:
    """Each demo begins where a first run does."""
    before = os.environ.get(PROFILES_VARIABLE)
    os.environ[PROFILES_VARIABLE] = str(Path(folder) / "profiles")
    try:
        yield
    finally:
        if before is None:
            del os.environ[PROFILES_VARIABLE]
        else:
            os.environ[PROFILES_VARIABLE] = before


def changes(case: Case) -> list[Setting]:
    """What a case sets in the shipped workflow."""
    values: dict[str, Any] = {
        "Load Pipeline.model": case.model,
        "Load Pipeline.precision": case.precision,
        "Load Pipeline.backend": "eager",
        **{f"Sample CogVideoX.{name}": value for name, value in SIZES.items()},
        "Sample CogVideoX.steps": 8,
        "Sample CogVideoX.scheduler": "DDIM",
        "Sample CogVideoX.seed": 1,
        "NaN Guard.on_failure": "off" if case is PLAIN else "rerun",
        "NaN Guard.scope": "learned",
        "Decode Latents.tiling": False,
        "Decode Latents.precision": "fp32",  # the same in all; fp16 convolutions take minutes on many CPUs
        "Create Video.fps": FPS,
    }
    return [
        Setting(*name.split("."), text=value if isinstance(value, str) else json.dumps(value))
        for name, value in values.items()
    ]


def command(output: Path) -> str:
    """The demo's run, as a command of its own."""
    settings = [*changes(PROTECTED), Setting("Encode Prompt", "prompt", "a red balloon")]
    sets = " ".join(f'--set "{change.node}.{change.input}={change.text}"' for change in settings)
    return f'onediff-guard run "{WORKFLOW}" --models "{output / "models"}" {sets}'
