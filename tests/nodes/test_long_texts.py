"""10,000 characters in any text that people or workflow files hand over: it is used or refused at once, in each
language of the page. The bound only stops what takes minutes; `pytest -s` prints the times with
ONEDIFF_GUARD_SHOW_TIMES=1."""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.comfyui_host import language as languages
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.files import resolve_prefix
from templates import api_file, ui_file
from waiting import no_hang

ROOT = Path(__file__).parents[2]
UNITS = ("/", "{", "}", "{a|", " ", "[", "]", "%", "\U0001f600", "\\", ", ", "; ", ": ", ". ", "a/", "-", "9", "/*")
UNITS += ("%a.b", "\n", "{0}", "1x", "9 x", "</", "\U0001f600 ", "(a:1.1)", "'", "\u4e2d", "\t", '"', "x.y=")
LENGTHS = (1_900, 10_000)
FREE = ("model", "lora", "architecture")  # drop-downs of which the server does not check the value


def texts() -> list[str]:
    return [(unit * length)[:length] for unit in UNITS for length in LENGTHS]


@contextmanager
def timed(times: dict[str, float], name: str) -> Generator[None]:
    """Keep the most CPU that it took."""
    since = time.process_time()
    try:
        with no_hang(name), suppress(Exception, SystemExit):
            yield
    finally:
        times[name] = max(times.get(name, 0), time.process_time() - since)


def shown(times: dict[str, float]) -> None:
    if os.environ.get("ONEDIFF_GUARD_SHOW_TIMES"):
        for name, seconds in sorted(times.items(), key=lambda each: -each[1]):
            print(f"{seconds * 1000:8.1f} ms  {name}")


def inputs_of(cls: Any) -> dict[str, tuple[Any, Any]]:
    """Each input: its type, and what it has by default."""
    types = cls.INPUT_TYPES()
    inputs = {name: each for kind in ("required", "optional") for name, each in types.get(kind, {}).items()}
    return {name: (each[0], _usual(*each)) for name, each in inputs.items()}


def _usual(kind: Any, options: dict[str, Any] | None = None) -> Any:
    return (options or {}).get("default", kind[0] if isinstance(kind, (list, tuple)) and kind else None)


@pytest.mark.parametrize("language", ["en", "zh", "ru"])
def test_nodes(language: str, model_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "page_language", lambda: language)
    model, times = model_folder(), dict[str, float]()
    said: list[str] = []
    with host.plain_folders(models=[model.parent], input=tmp_path, output=tmp_path):
        loader = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]()
        (pipeline,) = loader.load(model.name, "fp32", "eager", "none")["result"]
        for name, cls in NODE_CLASS_MAPPINGS.items():
            inputs = inputs_of(cls)
            usual = {key: pipeline if kind == "ONEDIFF_PIPELINE" else value for key, (kind, value) in inputs.items()}
            usual |= {"hub_id": "a/b", "download": False} if "hub_id" in inputs else {}
            for key in [key for key, (kind, _) in inputs.items() if kind == "STRING" or key in FREE]:
                for text in texts():
                    for method in (cls.FUNCTION, "VALIDATE_INPUTS", "IS_CHANGED"):
                        run = getattr(cls() if method == cls.FUNCTION else cls, method, None)
                        takes = inspect.signature(run).parameters if run else {}
                        if run and (key in takes or method == cls.FUNCTION):
                            given = {k: v for k, v in (usual | {key: text}).items() if k in takes or k == key}
                            with timed(times, f"{language} {name}.{key} ({method})"):
                                said.append(str(run(**given)))
    shown(times)
    assert f"{language} OneDiffGuardLoadPipeline.hub_id (load)" in times


@pytest.mark.parametrize("kind", ["api", "ui"])
def test_the_command(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of a workflow file, and of `--set`. There is no model, so nothing is computed."""
    monkeypatch.chdir(tmp_path)
    file = (api_file if kind == "api" else ui_file)("cogvideox_text_to_video")
    workflow = json.loads(file.read_text(encoding="utf-8"))
    places = [*_places(workflow)]
    times = dict[str, float]()
    for text in texts():
        for place in places:
            Path("workflow.json").write_text(json.dumps(_with(workflow, place, text)), encoding="utf-8")
            _run(times, f"{kind} {'.'.join(map(str, place))}")
        with timed(times, f"{kind} a file's prefix"):
            resolve_prefix(tmp_path, text)
        Path("workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
        for setting in ("{}", "{}=1", "3.{}=1", "{}.prompt=1", "3.prompt={}", "1.model={}", "1.hub_id={}"):
            _run(times, f"{kind} --set {setting}", "--set", setting.replace("{}", text))
    shown(times)
    assert len(times) > 20


def _run(times: dict[str, float], name: str, *more: str) -> None:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()), timed(times, name):
        cli.main(["run", "workflow.json", "--models", "none", "--json", *more])


def _places(value: Any, at: tuple[Any, ...] = (), known: set[Any] | None = None) -> Any:
    """Where a workflow has texts: of each kind of place one."""
    known = set() if known is None else known
    if isinstance(value, str):
        kind = tuple(each for each in at if not isinstance(each, int) and not str(each).isdigit())
        if kind not in known:
            known.add(kind)
            yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _places(inner, (*at, key), known)


def _with(value: Any, at: tuple[Any, ...], text: str) -> Any:
    if not at:
        return text
    copied = value.copy()
    copied[at[0]] = _with(value[at[0]], at[1:], text)
    return copied
