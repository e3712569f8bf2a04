"""Result files: whole or not at all, counted as ComfyUI does, inside the output folder."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless import files
from comfyui_onediff_guard.headless.errors import OutputError, WorkflowError
from comfyui_onediff_guard.headless.files import FileEntry, resolve_prefix, write_counted, write_named, write_together


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_files_are_counted_on_across_types(tmp_path: Path) -> None:
    (tmp_path / "a_00041_.webp").touch()
    (tmp_path / "ab_00099_.png").touch()
    assert write_counted(tmp_path, "a", ".png", b"1").name == "a_00042_.png"
    assert write_counted(tmp_path, "a", ".png", b"2").name == "a_00043_.png"
    assert write_counted(tmp_path, "a_00001", ".png", b"3").name == "a_00001_00001_.png"


def test_writers_in_parallel_never_share_a_name(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda n: write_counted(tmp_path, "a", ".bin", bytes([n])), range(64)))
    assert len(set(paths)) == 64
    assert sorted(path.read_bytes()[0] for path in paths) == list(range(64))
    assert len(names(tmp_path)) == 64


def test_names_are_kept_where_they_are_free(tmp_path: Path) -> None:
    written = [write_named(tmp_path / "new", "v_00007_.mp4", b"").name for _ in range(3)]
    assert written == ["v_00007_.mp4", "v_00008_.mp4", "v_00009_.mp4"]
    assert [write_named(tmp_path, "plain.png", b"").name for _ in range(2)] == ["plain.png", "plain_00001_.png"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int
) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(code, os.strerror(code))

    if step == "fsync":
        monkeypatch.setattr(files.os, "fsync", fail)
    else:
        monkeypatch.setattr(Path, "replace", fail)
    expected = "the disk is full" if code == errno.ENOSPC else "Permission denied"
    with pytest.raises(OutputError, match=f"{expected}.*Nothing was left half-written") as error:
        write_counted(tmp_path, "a", ".png", b"data")
    assert error.value.exit_code == 5
    assert names(tmp_path) == []


def test_files_that_belong_together_have_one_number(tmp_path: Path) -> None:
    def write(*suffixes: str) -> list[str]:
        return [path.name for path in write_together(tmp_path, "a", dict.fromkeys(suffixes, b"1"))]

    assert write(".png", ".json") == ["a.png", "a.json"]
    assert write(".png", ".webp", ".json") == ["a_00001_.png", "a_00001_.webp", "a_00001_.json"]
    assert write(".json") == ["a_00002_.json"]


def test_of_files_that_belong_together_all_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="the disk is full"):
        write_together(tmp_path, "a", {".png": b"1", ".webp": b"2", ".json": b"3"})
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Cannot write"):
        files.ensure_writable(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("prefix", "folder", "stem", "subfolder"),
    [
        ("ComfyUI", "", "ComfyUI", ""),
        ("video/ComfyUI", "video", "ComfyUI", "video"),
        ("a\\b\\c", "a/b", "c", "a/b"),
        ("%width%x%height%", "", "64x32", ""),
    ],
)
def test_prefixes(tmp_path: Path, prefix: str, folder: str, stem: str, subfolder: str) -> None:
    place = resolve_prefix(tmp_path, prefix, width=64, height=32)
    assert place == files.Prefix(tmp_path / folder, stem, subfolder)


@pytest.mark.parametrize("prefix", ["../x", "a/../../x", "/etc/x", "\\x", "..\\x", "a\\..\\..\\x"])
def test_prefixes_that_lead_out(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(WorkflowError, match="out of the output folder"):
        resolve_prefix(tmp_path, prefix)


def test_a_link_out_of_the_folder_is_no_way_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    try:
        (out / "link").symlink_to(tmp_path, target_is_directory=True)
    except OSError:
        pytest.skip("no right to make symbolic links here")
    with pytest.raises(WorkflowError, match="leads out of the output folder"):
        resolve_prefix(out, "link/x")


@pytest.mark.parametrize(("subfolder", "filename"), [("..", "a"), ("/etc", "a"), ("", "../a"), ("", "/a")])
def test_entries_that_lead_out(subfolder: str, filename: str) -> None:
    with pytest.raises(OutputError, match="outside the output folder"):
        _ = FileEntry(filename, subfolder).folder


def test_entries_are_found_under_any_key() -> None:
    ui = {"images": [{"filename": "a"}], "gifs": ({"filename": "b", "type": "temp"},), "text": ["x"], "animated": True}
    assert [(entry.filename, entry.type) for entry in files.file_entries(ui)] == [("a", "output"), ("b", "temp")]
