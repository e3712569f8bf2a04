"""Damaged and hostile archives of compiled code: refused with a reason, and nothing written outside."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.compile.code import check, pack, read_target, unpack
from comfyui_onediff_guard.pipelines.compile.target import Target
from comfyui_onediff_guard.pipelines.errors import BadCompiled
from comfyui_onediff_guard.precision.machine import Platform
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated, mutated_bytes
from tiers import drawn

TARGET = Target(
    "CogVideoX-5B",
    "0" * 16,
    "bf16",
    "narrow stream",
    Platform("cpu", "a CPU", "2.13", "", "cpython-311", "Linux x86_64"),
)
FILES = {
    "ab/kernel.main.so": b"\x7fELF" + bytes(500),
    "fxgraph/cd/entry": b"graph" * 40,
    "triton/EF/k.json": b'{"a": "x"}',
}
ALL, SMALLER = 5_000, 60
NAMES = (
    "../out.so",
    "/tmp/out.so",
    "C:out.so",
    "a\\..\\..\\out.so",
    "a/b/../../../out",
    "con",
    "",
    ".",
    "é",
    "x" * 300,
)


def _whole(place: Path) -> bytes:
    """An archive."""
    for name, content in FILES.items():
        (place / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "code" / name).write_bytes(content)
    pack(place / "code", TARGET, place / "whole.zip")
    return (place / "whole.zip").read_bytes()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bytes changed, or a manifest and names changed in an archive that is whole otherwise."""
    if draw(st.booleans()):
        return draw(mutated_bytes(whole))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        entries = [(name, archive.read(name)) for name in archive.namelist()]
    manifest = draw(mutated(json.loads(entries[0][1])))
    entries[0] = (entries[0][0], json.dumps(manifest).encode())
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(entries) - 1))
        name = draw(st.sampled_from((*NAMES, *FILES, "manifest.json")) | st.text(max_size=10))
        entries[at] = (name, entries[at][1])
        if isinstance(files := manifest.get("files") if isinstance(manifest, dict) else None, dict) and files:
            files[name] = next(iter(files.values()))
            entries[0] = (entries[0][0], json.dumps(manifest).encode())
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in entries:
            info = zipfile.ZipInfo(name.encode(errors="replace").decode() or "empty")
            info.external_attr = draw(st.sampled_from([0, 0o120777 << 16, 0o40755 << 16, 0o644 << 16]))
            archive.writestr(info, content)
    return made.getvalue()


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_any_damaged_archive_is_refused_or_unpacked_inside(tmp_path: Path, figure: Any) -> None:
    whole, file, work = _whole(tmp_path), tmp_path / "damaged.zip", tmp_path / "in" / "work"
    work.mkdir(parents=True)
    file.touch()
    before = _outside(tmp_path)

    @settings(max_examples=drawn(ALL, SMALLER), suppress_health_check=list(HealthCheck))
    @given(damaged(whole))
    def one(data: bytes) -> None:
        file.write_bytes(data)
        said = [_said(attempt) for attempt in (partial(read_target, file), partial(check, file))]
        said.append(_said(partial(unpack, file, TARGET, work)))
        assert all(not text or (text.startswith("'damaged.zip' ") and len(text) < 3000) for text in said)
        written = {path.relative_to(work).as_posix(): path.read_bytes() for path in work.rglob("*") if path.is_file()}
        assert all(content in FILES.values() for content in written.values()), "only what is whole"
        assert _outside(tmp_path) == before and list((tmp_path / "in").iterdir()) == [work]
        _clear(work)

    one()
    figure("damaged archives of compiled code, each refused by name, nothing written elsewhere", drawn(ALL, SMALLER))


def _outside(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if not path.is_relative_to(place / "in")}


def _said(attempt: Callable[[], object]) -> str:
    try:
        attempt()
    except BadCompiled as error:
        return str(error)
    return ""


def _clear(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
