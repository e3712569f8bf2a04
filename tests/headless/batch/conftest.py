"""What the tests of batches share: toy jobs, and a file of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import toy_jobs
from batch_runs import Batch, surroundings
from comfyui_onediff_guard.headless.batch.jobs import JobsFile


@pytest.fixture
def jobs_file(tmp_path: Path) -> Callable[..., JobsFile]:
    """jobs_file(lines) → the file of them, of toys."""

    def make(*lines: Mapping[str, Any] | str, **options: Any) -> JobsFile:
        file = tmp_path / "jobs.jsonl"
        if all(isinstance(line, str) for line in lines):
            file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            toy_jobs.write_jobs(file, [line for line in lines if not isinstance(line, str)])
        return JobsFile(file, **{"workflows": tmp_path, "input_dir": None, "read": toy_jobs.read, **options})

    return make


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Callable[..., Batch]]:
    """batch(lines, *options) → a command on toy jobs, under a Ray of its own; it is gone at the end."""
    if not find_spec("ray"):  # importing it would change this process
        pytest.skip("Ray is not installed: pip install '.[scale]'")
    numbers, made = itertools.count(), list[Batch]()
    (tmp_path / "models").mkdir()
    with surroundings() as environment:

        def make(lines: list[dict[str, Any]], *options: str, **more: Any) -> Batch:
            jobs = toy_jobs.write_jobs(tmp_path / f"jobs{next(numbers)}.jsonl", lines)
            found = Batch(jobs, tmp_path / "out", options, {**environment, **more.pop("environment", {})}, **more)
            made.append(found)
            return found

        yield make
        for each in made:
            if each.process and each.process.poll() is None:
                each.process.terminate()
                each.process.communicate()
