"""Small models, each built once per test run and shared by all its processes. Copy a model before you change it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

VARIABLE = "ONEDIFF_GUARD_SHARED_MODELS"  # the folder of the test run, created by its first process


def built(build: Callable[..., object], *arguments: str, **options: object) -> Path:
    """Return the path of `build(path, *arguments, **options)`. The first process builds it, others wait."""
    from filelock import FileLock

    name = "-".join([*arguments, *(f"{key}-{value}" for key, value in options.items())]) or "model"
    root = Path(os.environ[VARIABLE])
    path, record = root / build.__name__ / name, root / "records" / f"{build.__name__} {name}.json"
    if path.exists():
        return path
    record.parent.mkdir(exist_ok=True)
    path.parent.mkdir(exist_ok=True)
    with FileLock(record.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=root) as temporary:
        if not path.exists():
            build(whole := Path(temporary) / name, *arguments, **options)
            for file in _files(whole):
                file.chmod(0o444)
            record.write_text(json.dumps([str(path), _state(whole)]))
            whole.replace(path)
    return path


def copied(folder: Path, to: Path) -> Path:
    """A writable copy."""
    return shutil.copytree(folder, to, copy_function=shutil.copyfile, dirs_exist_ok=True)


def changed() -> list[str]:
    """Files changed since they were built: root can write to read-only files."""
    found = []
    for record in Path(os.environ[VARIABLE]).glob("records/*.json"):
        path, before = json.loads(record.read_text())
        now = _state(Path(path))
        found += [f"{path}/{name}" for name in {*before, *now} if before.get(name) != now.get(name)]
    return sorted(found)


def model_folder(variant: str = "2b", overflow: str = "none") -> Path:
    """A small model of any family. overflow: of its builder, or "inside", see overflows.py."""
    return built(small_model, variant, overflow)


def svd_file(**layout: int) -> Path:
    """Stable Video Diffusion in a single file. layout: differences from svd_layout.TINY."""
    return built(small_svd_file, **layout) / "svd_xt.safetensors"


def small_model(path: Path, variant: str, overflow: str) -> Path:
    from overflows import overflow_inside
    from small_families import BUILDERS
    from small_wan import build_wan

    if overflow == "inside":
        return overflow_inside(copied(model_folder(variant), path))
    wan = {"wan": build_wan, "wan-ti2v": partial(build_wan, ti2v=True), "wan-two": partial(build_wan, two=True)}
    options = {} if overflow == "none" else {"overflow": overflow}  # Stable Video Diffusion's has no overflow
    return {**BUILDERS, **wan}[variant](path, **options)


def small_svd_file(path: Path, **layout: Any) -> None:
    import svd_layout

    path.mkdir()
    svd_layout.write(path / "svd_xt.safetensors", svd_layout.Layout(**layout))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def _state(path: Path) -> dict[str, list[int]]:
    """Size and modification time of each file."""
    stats = {file.relative_to(path).as_posix(): file.stat() for file in _files(path)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
