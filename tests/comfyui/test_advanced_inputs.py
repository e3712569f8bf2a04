"""Advanced inputs in Nodes 2.0: they are hidden. test_templates_as_seen.py saves and queues their values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import legs
import pytest
from templates import read, ui_file

pytestmark = legs.IN_CHECKOUTS


@pytest.fixture
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures) as opened, opened.nodes_2(server.url):
        yield opened


def test_nodes_2_hides_advanced_inputs(server: legs.Server, canvas: browser.Canvas) -> None:
    canvas.load(read(ui_file("cogvideox_text_to_video")))
    canvas.picture("nodes_2")
    page_text = canvas.evaluate("() => document.querySelector('#vue-app').innerText")
    assert "on_failure" in page_text and ("give_up_after" not in page_text) == server.leg.is_current
