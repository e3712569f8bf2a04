"""What a node says while a component is read."""

from __future__ import annotations

import pytest
from comfyui_onediff_guard.pipelines.models.on_disk import listening, tell_reading


def test_it_is_said_what_is_read_to_who_listens() -> None:
    lines: list[str] = []
    with listening(lines.append):
        tell_reading("text_encoder", 4 * 10**9)
    tell_reading("vae", 1000)
    assert lines == ["loading the weights of text_encoder, 4.0 GB"]


def test_nobody_listens_after_an_interrupt() -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), listening(interrupt):
        tell_reading("vae", 10**9)
    tell_reading("vae", 10**9)
