"""Untrusted paths stay inside their folder or are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest
from comfyui_onediff_guard.trust.paths import Outside, inside, means_another_on_windows, relative
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("name", ["a.png", "a/b.png", "a\\b.png", "...", "a..b", " a", "日本.png", "a" * 255])
def test_name_below_folder_is_accepted(tmp_path: Path, name: str) -> None:
    assert inside(tmp_path, name) == tmp_path / name.replace("\\", "/")


REFUSED = {
    "leads out": ["/etc/passwd", "\\\\server\\share", "C:\\x", "c:x", "..", "a/../../b", "a\\..\\..\\b"],
    "control character": ["a\0b", "a\nb"],
    "too long": ["a" * 256, "日" * 90, "a/" * 600],
    "half a character": ["\ud800"],
}


@pytest.mark.parametrize(("name", "why"), [(name, why) for why, names in REFUSED.items() for name in names])
def test_unsafe_name_is_rejected_with_reason(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(Outside, match=why) as refused:
        inside(tmp_path, name)
    assert str(refused.value).isprintable()


def test_symlink_out_of_folder_is_rejected(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "file").symlink_to(tmp_path / "secret")
    (folder / "up").symlink_to(tmp_path)
    (folder / "there").write_text("x")
    (folder / "here").symlink_to(folder / "there")
    (folder / "circle").symlink_to(folder / "circle")
    for name in ("file", "up/secret", "circle/a"):
        with pytest.raises(Outside, match="through a link"):
            inside(folder, name)
    assert inside(folder, "here").read_text() == "x"


@given(st.text(max_size=40))
def test_random_name_stays_below_folder_or_is_rejected(name: str) -> None:
    folder = Path("/folder")
    try:
        path = folder / relative(name)
    except Outside:
        return
    assert path.is_relative_to(folder) and ".." not in path.parts


ANOTHER = ["CON", "nul.png", "COM1", "lpt¹.txt", "a.", "a ", "a.png:stream", "a?b", "aux .png"]


@pytest.mark.parametrize("name", [*ANOTHER, "console.png", "a.nul", "com.png", "a b.png", "..a", "日本"])
def test_names_that_mean_another_file_on_windows_are_detected(name: str) -> None:
    assert means_another_on_windows(name) == (name in ANOTHER)
