"""Fixtures for the headless tests: small nodes, a stand-in server, a console, and batches of toy jobs."""

# ruff: noqa: N802 - ComfyUI's names

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from comfyui_onediff_guard.headless.batch import ray_pool
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.hosts import core_nodes, local
from comfyui_onediff_guard.headless.hosts.local import run_local
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.server import api, follow
from comfyui_onediff_guard.headless.server.follow import run_on_server
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all tests here
from fake_comfy import FakeComfy, Noise
from waiting import wait_until


class Picky:
    """Checks its own inputs: even numbers only."""

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "go"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",), "number": ("INT", {"min": 0, "max": 10})}}

    @classmethod
    def VALIDATE_INPUTS(cls, number: int, images: object = "not linked") -> bool | str:
        assert images is None, "linked inputs arrive as None"
        return True if number % 2 == 0 else f"number {number} is odd, use {number + 1}"

    def go(self, images: torch.Tensor, number: int) -> tuple[torch.Tensor]:
        return (images * number,)


class Broken:
    RETURN_TYPES = ()
    FUNCTION = "go"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",)}}

    def go(self, images: torch.Tensor) -> tuple[()]:
        raise RuntimeError("the GPU is on fire")


STAND_INS: dict[str, type] = {"Noise": Noise, "Picky": Picky, "Broken": Broken, **core_nodes.NODE_CLASS_MAPPINGS}


def noise(**inputs: Any) -> dict[str, Any]:
    return {"class_type": "Noise", "inputs": {"width": 32, "seed": 1, "kind": "uniform", "text": "cat", **inputs}}


@pytest.fixture
def workflow() -> dict[str, Any]:
    """Noise into SaveImage, in API format."""
    return {
        "1": noise() | {"_meta": {"title": "Some Noise"}},
        "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "pictures/noise"}},
    }


@pytest.fixture
def classes() -> dict[str, type]:
    return dict(STAND_INS)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunResult]:
    """`run_local` with the stand-ins and with folders below tmp_path."""

    def run_it(workflow: dict[str, Any], **options: Any) -> RunResult:
        folders = {"models": [], "input_dir": tmp_path / "input", "output_dir": tmp_path / "out"}
        return run_local(workflow, classes=STAND_INS, **folders, **options)

    return run_it


@pytest.fixture
def comfy() -> Iterator[FakeComfy]:
    with FakeComfy() as server:
        yield server


@pytest.fixture
def others() -> list[Any]:
    """The queue of a shared server: more workflows of other users than the client reads."""
    large = {"extra_pnginfo": {"workflow": "x" * 250_000}}
    return [[number, f"others-{number}", {}, {"client_id": "somebody", **large}, []] for number in range(1, 100)]


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """console(*arguments of onediff-guard) → (exit code, stdout, stderr)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        capsys.readouterr()  # discard what building a model printed
        code = cli.main([*map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def here(tmp_path: Path, workflow: dict[str, Any], classes: dict[str, type], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with workflow.json; the stand-in nodes are the only known nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "default_classes", lambda: classes)
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    return tmp_path


@pytest.fixture
def there(
    comfy: Any, workflow: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunResult]:
    """Run the workflow on the stand-in server, with short pauses."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(follow, "RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(api, "PAUSE_SECONDS", 0.01)

    def run(**options: Any) -> RunResult:
        return run_on_server(
            options.pop("workflow", workflow), url=options.pop("url", comfy.url), output_dir=tmp_path / "out", **options
        )

    return run


@pytest.fixture
def jobs_file(tmp_path: Path) -> Callable[..., Any]:
    """jobs_file(lines) → a JobsFile of toy jobs."""
    import toy_jobs
    from comfyui_onediff_guard.headless.batch.jobs import JobsFile

    def make(*lines: dict[str, Any] | str, **options: Any) -> JobsFile:
        file = tmp_path / "jobs.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        return JobsFile(file, **{"workflows": tmp_path, "input_dir": None, "read": toy_jobs.read, **options})

    return make


RAY = """\
import sys
from comfyui_onediff_guard.headless.batch.ray_pool import connected
with connected(None, workers=4) as ray:
    print(ray.get_runtime_context().gcs_address, file=sys.__stdout__, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray that tests share, except those that test its start and its end."""
    _skip_without_ray()
    from batch_runs import batch_environment

    with batch_environment() as environment:
        for variable in ("ONEDIFF_GUARD_COMPILED", "ONEDIFF_GUARD_PROFILES"):
            environment[variable] = str(tmp_path_factory.mktemp("kept"))
        command, pipe = [sys.executable, "-c", RAY], subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as ray:
            assert ray.stdout
            address = ray.stdout.readline().strip()
            assert address, "no Ray starts here"
            yield address


@pytest.fixture
def toy_batch(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """toy_batch(lines, *options) → a batch command on toy jobs with its own Ray; both end with the test."""
    _skip_without_ray()
    import toy_jobs
    from batch_runs import Batch, batch_environment

    numbers, made = itertools.count(), list[Batch]()
    (tmp_path / "models").mkdir()
    with batch_environment() as environment:

        def make(lines: list[dict[str, Any]], *options: str, log: Path | None = None) -> Batch:
            jobs = toy_jobs.write_jobs(tmp_path / f"jobs{next(numbers)}.jsonl", lines)
            made.append(Batch(jobs, tmp_path / "out", options, environment, log=log))
            return made[-1]

        yield make
        for each in made:
            each.end()


@pytest.fixture
def joined_batch(toy_batch: Callable[..., Any], ray_address: str) -> Iterator[Callable[..., Any]]:
    """Like toy_batch, but on the shared Ray, on which no worker is left at the end."""
    made = []

    def make(lines: list[dict[str, Any]], *options: str, **more: Any) -> Any:
        made.append(toy_batch(lines, "--ray", ray_address, *options, **more))
        made[-1].environment |= ray_pool.LOOPBACK  # else Ray takes 127.0.0.1 for the machine's other address
        return made[-1]

    yield make
    workers = {start["pid"] for each in made for start in each.starts()}
    wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the batch's workers are gone")


def _skip_without_ray() -> None:
    if not find_spec("ray"):  # importing it would change this process
        pytest.skip("Ray is not installed: pip install '.[scale]'")
