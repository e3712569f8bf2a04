"""What a node says while a component is read."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard.pipelines.models import on_disk as reading

GB = 10**9


@pytest.fixture(autouse=True)
def nothing_read_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_speeds", [])


def said(*reads: tuple[int, float]) -> list[str]:
    """The lines told before reads of so many bytes, in so many seconds."""
    lines: list[str] = []
    for n_bytes, seconds in reads:
        clock = iter([0.0, seconds])
        with reading.listening(lines.append), reading.reading("text_encoder", n_bytes, clock.__next__):
            pass
    return lines


def test_it_is_said_what_is_read_and_after_the_first_how_long_it_takes() -> None:
    assert said((4 * GB, 2.0), (9 * GB, 4.5)) == [
        "reading text_encoder, 4.0 GB",
        "reading text_encoder, 9.0 GB · 4 s left",
    ]


def test_a_small_one_says_nothing_of_how_fast_a_disk_is() -> None:
    assert said((1000, 1.0), (9 * GB, 4.5)) == ["reading text_encoder, 0.001 MB", "reading text_encoder, 9.0 GB"]


def test_nobody_listens_after_an_interrupt() -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), reading.listening(interrupt), reading.reading("vae", GB):
        pass
    with reading.reading("vae", GB):
        pass
