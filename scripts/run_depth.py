"""Measure how much of the package a sampling run enters: `python scripts/run_depth.py`.

Prints the files that the first run of a small CogVideoX enters after its prompt is encoded, and those of a later run,
with the number of function calls in each; the deepest stack of the package's own frames; and the number of modules that
NaN Guard (MODEL) loads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
ELSEWHERE = tuple(f"{ROOT}{os.sep}{name}" for name in ("tests", "scripts", ".venv"))
LOADED = """import sys, comfyui_onediff_guard.comfyui_host.native_guards
print(sum(name.startswith("comfyui_onediff_guard") for name in sys.modules))"""


def ours(frame: FrameType) -> str:
    """Return a frame's file, relative to the root; "" if it is not in the package."""
    file = frame.f_code.co_filename
    return file[len(str(ROOT)) + 1 :] if file.startswith(f"{ROOT}{os.sep}") and not file.startswith(ELSEWHERE) else ""


def entered() -> Iterator[tuple[Counter[str], list[str]]]:
    """Yield the entered files and the deepest stack of the first run, which reads the weights, and of a later run."""
    from comfyui_onediff_guard.pipelines.models.folder import family_of
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.policy import Precision

    model = import_module("shared_models").model_folder("2b")
    options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
    handle = load(model, family_of(model), precision=Precision.FP16, **options)
    positive, negative = encode_prompts(handle, ["a red kite", "grey"])[0]
    for _ in range(2):
        files, deepest = Counter[str](), list[str]()

        def called(
            frame: FrameType, event: str, _: object, files: Counter[str] = files, deepest: list[str] = deepest
        ) -> None:
            if event != "call" or not (file := ours(frame)):
                return
            files[file] += 1
            stack, at = [], frame
            while at:
                stack += [f"{ours(at)}: {at.f_code.co_name}"] if ours(at) else []
                at = at.f_back
            deepest[:] = max(deepest, stack, key=len)

        sys.setprofile(called)
        try:
            sample(handle, positive, negative, SampleSettings(64, 48, steps=2, seed=3, frames=5, guidance_scale=5.0))
        finally:
            sys.setprofile(None)
        yield files, deepest


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(import_module("shared_models").VARIABLE, folder)
        runs = [*entered()]
    for which, (files, deepest) in zip(("first", "later"), runs, strict=True):
        print(f"A {which} run: {len(files)} files, {len(deepest)} frames")
        for file, calls in sorted(files.items()):
            print(f"{calls:6} {file}")
        print("\n".join(deepest))
    loaded = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, cwd="/").stdout
    print(f"NaN Guard (native) loads {loaded.strip()} modules")


if __name__ == "__main__":
    main()
