"""Code that inductor compiled is reused by the next process."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from comfyui_onediff_guard.pipelines.compile.cache import INDUCTOR, TRITON, exportable, keep_imported
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE

CHILD = """
import hashlib, json, subprocess, sys
from pathlib import Path

commands = []
start = subprocess.Popen.__init__

def recorded(self, args, *more, **named):
    commands.append([args] if isinstance(args, str) else list(map(str, args)))
    start(self, args, *more, **named)

subprocess.Popen.__init__ = recorded
import torch
from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.precision.policy import Precision

model, compiled = map(Path, sys.argv[1:3])
handle = load(
    model, COGVIDEOX, precision=Precision("fp32"), backend=sys.argv[3], offload="none",
    placement=PlainPlacement(), compiled=compiled,
)
with torch.inference_mode():
    (positive, negative), _ = encode_prompts(handle, ["a red kite", ""])
    settings = SampleSettings(64, 48, frames=9, steps=2, seed=3, guidance_scale=6.0)
    latents, report = sample(handle, positive, negative, settings)
asked = ({"--version"}, {"-v"})  # of the compiler's version
print(json.dumps({
    "graphs": report.graphs, "kept": report.graphs_kept, "notes": report.notes, "text": report.text(),
    "built": [c for c in commands if "g++" in c[0] and set(c[1:]) not in asked],
    "files": [name.partition(".compile.")[2] for name in sys.modules if "_guard.pipelines.compile." in name],
    "latents": hashlib.sha256(latents.numpy().tobytes()).hexdigest(),
}))
"""


@pytest.fixture(scope="module")
def run(model_folder, fresh_python, tmp_path_factory):
    """run(folder) → what a new process did that sampled with this folder of compiled code. Its /tmp is new too, or
    `temporary`, which keeps the headers that inductor precompiled."""

    def sampled(folder: Path, temporary: Path | None = None, backend: str = "inductor") -> dict:
        environment = {LIMIT_VARIABLE: "2", "TMPDIR": str(temporary or tmp_path_factory.mktemp("tmp"))}
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(INDUCTOR, raising=False)  # torch exports it as soon as it compiles
            patch.delenv(TRITON, raising=False)
            output = fresh_python(CHILD, str(model_folder("2b")), str(folder), backend, **environment)
        return json.loads(output.splitlines()[-1])

    return sampled


@pytest.fixture(scope="module")
def first(run, tmp_path_factory):
    """(folder, what the process that filled it did, its /tmp: this process's, which may already have the headers)."""
    folder, temporary = tmp_path_factory.mktemp("kept") / "compiled", Path(tempfile.gettempdir())
    return folder, run(folder, temporary), temporary


def test_a_second_process_compiles_nothing(run, first):
    folder, cold, _ = first
    assert cold["graphs"] == 1 and cold["kept"] == 0 and cold["built"]
    (kept,) = folder.iterdir()
    files = set(kept.rglob("*.so"))
    warm = run(folder)
    assert files and set(kept.rglob("*.so")) == files
    assert (warm["graphs"], warm["kept"], warm["notes"]) == (1, 1, cold["notes"])
    assert "1 graph, from the cache of earlier runs" in warm["text"] and "newly compiled" not in warm["text"]
    assert warm["latents"] == cold["latents"]


def test_imported_artifacts_are_used_in_another_folder(run, first, tmp_path):
    """Except libraries of the C++ compiler, which PyTorch does not save."""
    folder, cold, temporary = first
    (kept,) = folder.iterdir()
    keep_imported(tmp_path / "elsewhere", *exportable(kept))
    imported = run(tmp_path / "elsewhere", temporary)
    assert (imported["graphs"], imported["kept"], imported["notes"]) == (1, 1, cold["notes"])
    assert imported["latents"] == cold["latents"]


def test_eager_run_does_not_touch_compile_cache(run, tmp_path):
    eager = run(tmp_path / "compiled", backend="eager")
    files = ["auto_compile", "backends", "block"]
    assert sorted(eager["files"]) == files, "neither the cache nor its code"
    assert eager["graphs"] is None and not (tmp_path / "compiled").exists()
