"""What all tests of a run share is built once, is there whole or not at all, and stays as it was built."""

from __future__ import annotations

from pathlib import Path

import pytest
import shared_models
from at_once import at_once


@pytest.fixture(autouse=True)
def _of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(shared_models.VARIABLE, str(tmp_path))


def test_those_who_ask_at_once_get_the_same_and_nobody_sees_half_of_it(tmp_path: Path) -> None:
    times: list[Path] = []

    def model(path: Path, size: str, *, layers: int) -> None:
        times.append(path)
        path.mkdir()
        (path / "weights").write_text(size * layers)
        assert not (tmp_path / "model" / path.name).exists()

    found = at_once(*[lambda: shared_models.built(model, "2b", layers=3)] * 4)
    assert {*found} == {tmp_path / "model" / "2b-layers-3"} and len(times) == 1
    assert (found[0] / "weights").read_text() == "2b2b2b"
    assert shared_models.built(model, "5b", layers=1) != found[0]


def test_one_that_cannot_be_built_is_not_there(tmp_path: Path) -> None:
    def broken(path: Path) -> None:
        path.mkdir()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        shared_models.built(broken)
    assert [*(tmp_path / "broken").iterdir()] == [] and shared_models.changed() == []


def test_a_change_is_told_and_a_copy_may_be_changed(tmp_path: Path) -> None:
    def model(path: Path) -> None:
        path.mkdir()
        for name in ("kept", "rewritten", "gone"):
            (path / name).write_text("1")

    folder = shared_models.built(model)
    assert {file.stat().st_mode & 0o222 for file in folder.iterdir()} == {0}
    copy = shared_models.copied(folder, tmp_path / "copy")
    (copy / "kept").write_text("2")
    assert shared_models.changed() == []
    for name in ("rewritten", "new"):
        (tmp_path / "other").write_text("1")
        (tmp_path / "other").replace(folder / name)
    (folder / "gone").unlink()
    assert shared_models.changed() == [f"{folder}/{name}" for name in ("gone", "new", "rewritten")]
