"""Result files: complete or absent, numbered as in ComfyUI, inside the output folder."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.headless import files
from comfyui_onediff_guard.headless.errors import OutputError, WorkflowError
from comfyui_onediff_guard.headless.files import FileEntry, resolve_prefix, write_counted, write_together
from comfyui_onediff_guard.trust import atomic_files


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_named(folder: Path, name: str, data: bytes) -> Path:
    with files.arriving(folder, name) as file:
        file.write(data)
    return file.path


def test_file_counter_continues_across_types(tmp_path: Path) -> None:
    (tmp_path / "a_00041_.webp").touch()
    (tmp_path / "ab_00099_.png").touch()
    assert write_counted(tmp_path, "a", ".png", b"1").name == "a_00042_.png"
    assert write_counted(tmp_path, "a", ".png", b"2").name == "a_00043_.png"
    assert write_counted(tmp_path, "a_00001", ".png", b"3").name == "a_00001_00001_.png"


def test_parallel_writers_get_distinct_names(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda n: write_counted(tmp_path, "a", ".bin", bytes([n])), range(64)))
    assert len(set(paths)) == 64
    assert sorted(path.read_bytes()[0] for path in paths) == list(range(64))
    assert len(names(tmp_path)) == 64


def test_file_keeps_its_name_unless_taken(tmp_path: Path) -> None:
    written = [write_named(tmp_path / "new", "v_00007_.mp4", b"").name for _ in range(3)]
    assert written == ["v_00007_.mp4", "v_00008_.mp4", "v_00009_.mp4"]
    assert [write_named(tmp_path, "plain.png", b"").name for _ in range(2)] == ["plain.png", "plain_00001_.png"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, {"fsync": "fsync", "replace": "link"}[step], fail)
    if step == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    expected = "the disk is full" if code == errno.ENOSPC else "Permission denied"
    with pytest.raises(OutputError, match=f"{expected}.*No incomplete file was left") as error:
        write_counted(tmp_path, "a", ".png", b"data")
    assert error.value.exit_code == 5
    assert names(tmp_path) == []


def test_files_are_written_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert [write_named(tmp_path, "a.png", b"1").read_bytes() for _ in range(2)] == [b"1", b"1"]
    assert names(tmp_path) == ["a.png", "a_00001_.png"]


def test_old_temporary_files_are_removed(tmp_path: Path) -> None:
    stale, others = tmp_path / f".onediff-guard-{'a' * 32}.tmp", [".onediff-guard-mine.tmp", f".{'a' * 32}.tmp"]
    for name in (stale.name, *others):
        (tmp_path / name).touch()
    atomic_files._remove_stale.cache_clear()
    files.ensure_writable(tmp_path)
    assert stale.exists(), "it may be in use"
    for name in names(tmp_path):
        os.utime(tmp_path / name, (0, 0))
    atomic_files._remove_stale.cache_clear()
    files.ensure_writable(tmp_path)
    assert set(names(tmp_path)) == set(others)


def test_file_written_in_parts_appears_when_complete(tmp_path: Path) -> None:
    with files.arriving(tmp_path, "a.bin") as file:
        file.write(b"wrong")
        file.start_again()
        file.write(b"ri")
        file.write(b"ght")
        assert file.size == 5 and "a.bin" not in names(tmp_path)
    assert file.path.read_bytes() == b"right" and names(tmp_path) == ["a.bin"]

    def break_off() -> None:
        with files.arriving(tmp_path, "b.bin") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("name", ["a_" + "9" * 240 + "_.png", "a_99999999999_.png", "_00001_", "[a-_00002_.png", "*"])
def test_names_that_resemble_counters_are_not_overwritten(tmp_path: Path, name: str) -> None:
    first, second = (write_named(tmp_path, name[-250:], bytes([n])) for n in range(2))
    assert first.name == name and first.read_bytes() == b"\0"
    assert second.read_bytes() == b"\1" and len(names(tmp_path)) == 2


def test_grouped_files_share_one_number(tmp_path: Path) -> None:
    def write(*suffixes: str) -> list[str]:
        return [path.name for path in write_together(tmp_path, "a", dict.fromkeys(suffixes, b"1"))]

    assert write(".png", ".json") == ["a.png", "a.json"]
    assert write(".png", ".webp", ".json") == ["a_00001_.png", "a_00001_.webp", "a_00001_.json"]
    assert write(".json") == ["a_00002_.json"]


def test_failed_write_of_grouped_files_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, successes = os.fsync, iter(range(2))

    def full(descriptor: int) -> None:
        if next(successes, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="the disk is full"):
        write_together(tmp_path, "a", {".png": b"1", ".webp": b"2", ".json": b"3"})
    assert names(tmp_path) == []


def test_folder_below_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="Cannot write"):
        files.ensure_writable(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("prefix", "folder", "stem"),
    [
        ("ComfyUI", "", "ComfyUI"),
        ("video/ComfyUI", "video", "ComfyUI"),
        ("a\\b\\c", "a/b", "c"),
        ("%width%x%height%", "", "64x32"),
        *((empty, "", "") for empty in ("", ".", "./")),
    ],
)
def test_prefix_resolves_to_folder_and_stem(tmp_path: Path, prefix: str, folder: str, stem: str) -> None:
    assert resolve_prefix(tmp_path, prefix, width=64, height=32) == (tmp_path / folder, stem)


@pytest.mark.parametrize(
    "prefix",
    ["../x", "a/../../x", "/etc/x", "\\x", "..\\x", "a\\..\\..\\x", "a\0b", "x" * 250, "日" * 84, "a/" * 600, "\ud800"],
)
def test_prefix_outside_output_folder_is_rejected(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(WorkflowError, match="stay in the output folder"):
        resolve_prefix(tmp_path, prefix)


def test_prefix_through_symlink_out_of_folder_is_rejected(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    try:
        (out / "link").symlink_to(tmp_path, target_is_directory=True)
    except OSError:
        pytest.skip("no right to make symbolic links here")
    with pytest.raises(WorkflowError, match="through a link: choose one inside the output folder"):
        resolve_prefix(out, "link/x")


@pytest.mark.parametrize(
    ("subfolder", "filename"), [("..", "a"), ("/etc", "a"), ("", "../a"), ("", "/a"), ("", ""), ("", ".")]
)
def test_entry_outside_output_folder_is_rejected(tmp_path: Path, subfolder: str, filename: str) -> None:
    with pytest.raises(OutputError, match="outside the output folder"):
        FileEntry(filename, subfolder).folder_in(tmp_path)


def test_entries_are_found_under_any_key() -> None:
    ui = {"images": [{"filename": "a"}], "gifs": ({"filename": "b", "type": "temp"},), "text": ["x"], "animated": True}
    assert [(entry.filename, entry.type) for entry in files.file_entries(ui)] == [("a", "output"), ("b", "temp")]
