"""Write everything that users and programs rely on to a folder: `python scripts/golden.py OUT`. Compare two folders
with `diff -r`.

nodes.json: every node with its inputs, options and outputs, without texts. api/: the graph of every shipped workflow.
help/: the help of every command. profiles.json, report.json, report.txt: the profile and report of a run in which a
block overflows, without times and sizes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
TEXTS = ("tooltip", "placeholder")  # texts of an input
# measured values in reports and profiles
MEASURED = ("seconds", "rerun_seconds", "text", "memory", "begin", "torch", "driver", "verified", "largest")
COMMANDS = ("", "run", "batch", "compare", "demo", "doctor", "selftest", "probe")
COMMANDS += ("profile", "profile list", "profile show", "profile export", "profile import")
COMMANDS += ("compiled", "compiled list", "compiled export", "compiled import", "compiled clear")


def write(file: Path, value: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, indent=1, sort_keys=True, default=str)
    file.write_text(text.rstrip() + "\n", encoding="utf-8")


def without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {name: without(each, names) for name, each in value.items() if not str(name).startswith(names)}
    return [without(each, names) for each in value] if isinstance(value, list | tuple) else value


def nodes() -> dict[str, Any]:
    from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS

    attributes = ("RETURN_TYPES", "RETURN_NAMES", "FUNCTION", "CATEGORY", "OUTPUT_NODE", "INPUT_IS_LIST")
    return {
        name: {"inputs": without(node.INPUT_TYPES(), TEXTS)} | {each: getattr(node, each, None) for each in attributes}
        for name, node in NODE_CLASS_MAPPINGS.items()
    }


def graphs() -> dict[str, Any]:
    from comfyui_onediff_guard.headless.hosts import core_nodes
    from comfyui_onediff_guard.headless.workflow import schema, ui_format
    from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS

    known = import_module("comfyui_nodes").NODE_CLASS_MAPPINGS | core_nodes.NODE_CLASS_MAPPINGS | NODE_CLASS_MAPPINGS
    schemas = {name: schema.from_class(name, node) for name, node in known.items()}
    files = sorted((ROOT / "workflows").glob("*.json"))
    return {file.stem: ui_format.convert(json.loads(file.read_text("utf-8")), schemas).to_api() for file in files}


def command(*words: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "comfyui_onediff_guard", *words],
        env=os.environ | {"COLUMNS": "120"} | environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    return done.stdout + (done.stderr if done.returncode else "")


def overflowing() -> tuple[dict[str, Any], list[Any]]:
    """Return the report and the profiles of a run of a small CogVideoX in which one block overflows fp16."""
    from comfyui_onediff_guard.pipelines.models.folder import family_of
    from comfyui_onediff_guard.pipelines.run.handle import load
    from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
    from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
    from comfyui_onediff_guard.precision.policy import Precision

    shared_models, small_runs = import_module("shared_models"), import_module("small_runs")
    with tempfile.TemporaryDirectory() as folder:
        os.environ[shared_models.VARIABLE] = folder
        model, profiles = shared_models.model_folder("2b", "inside"), Path(folder) / "profiles"
        options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
        handle = load(model, family_of(model), precision=Precision.FP16, profiles=profiles, **options)
        handle = replace(handle, policy=GuardPolicy(scope=Scope.LEARNED))
        _, report = small_runs.sampled(handle, "2b", steps=4)
        kept = [json.loads(file.read_text("utf-8")) for file in sorted(profiles.rglob("*.json"))]
    return report.as_dict(), kept


def main(out: Path) -> None:
    write(out / "nodes.json", nodes())
    for name, graph in graphs().items():
        write(out / "api" / f"{name}.json", graph)
    for words in COMMANDS:
        write(out / "help" / f"{words or 'all'}.txt", command(*words.split(), "--help"))
    report, kept = overflowing()
    write(out / "report.json", without(report, MEASURED))
    write(out / "report.txt", re.sub(r"[\d.e+-]+ (s|MB|GB)\b", r"N \1", report["text"]))
    write(out / "profiles.json", without(kept, MEASURED))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
