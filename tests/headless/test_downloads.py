"""Result files that a server hands out: whole under their own names, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from comfyui_onediff_guard.headless.errors import HeadlessError, OutputError, RunFailedError
from comfyui_onediff_guard.headless.hosts.result import RunResult
from comfyui_onediff_guard.headless.server import api as server

RunThere = Callable[..., RunResult]


def test_files_that_are_there_already_stay(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    mine = tmp_path / "out" / "sub" / "a_00001_.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    assert [path.name for path in there().files] == ["a_00002_.png"]
    assert mine.read_bytes() == b"mine"


def test_a_download_that_fails(comfy: Any, there: RunThere) -> None:
    comfy.files.clear()
    with pytest.raises(RunFailedError, match=r"does not hand out its result sub/a_00001_\.png: HTTP 404"):
        there()


def test_a_download_that_breaks_off_is_fetched_again(comfy: Any, there: RunThere, tmp_path: Path) -> None:
    tries: list[str] = []

    def answer(request: web.Request) -> web.StreamResponse | None:
        if request.path == "/view":
            tries.append(request.path)
        return web.Response(status=502) if request.path == "/view" and len(tries) < 3 else None

    comfy.first = answer
    assert there().files[0].read_bytes() == b"picture"
    assert len(tries) == 3
    comfy.files["a_00001_.png"] = b"another"
    comfy.first = lambda request: web.Response(status=503) if request.path == "/view" else None
    with pytest.raises(
        RunFailedError, match=r"broke off its result sub/a_00001_\.png after 0 bytes, 3 times \(HTTP 503"
    ):
        there()
    assert [path.name for path in (tmp_path / "out" / "sub").iterdir()] == ["a_00001_.png"]


@pytest.mark.parametrize(
    ("constant", "value", "error", "message"),
    [
        ("MAX_FILE_BYTES", 6, RunFailedError, "hands out more than 6 bytes"),
        ("FREE_BYTES", 2**80, OutputError, "does not fit the disk"),
    ],
)
def test_a_file_that_is_too_large(
    comfy: Any,
    there: RunThere,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    constant: str,
    value: int,
    error: type[HeadlessError],
    message: str,
) -> None:
    monkeypatch.setattr(server, constant, value)
    with pytest.raises(error, match=message):
        there()
    assert list((tmp_path / "out" / "sub").iterdir()) == []
