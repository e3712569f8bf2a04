"""Advanced inputs in Nodes 2.0: they are hidden, and their values are saved and queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import legs
import pytest
from templates import api_file, read, ui_file

pytestmark = legs.IN_CHECKOUTS

NAME = "cogvideox_text_to_video"


@pytest.fixture
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures) as opened, opened.nodes_2(server.url):
        yield opened


def test_nodes_2_hides_advanced_inputs_and_queues_their_values(server: legs.Server, canvas: browser.Canvas) -> None:
    workflow = read(ui_file(NAME))
    canvas.load(workflow)
    canvas.picture("nodes_2")
    page_text = canvas.evaluate("() => document.querySelector('#vue-app').innerText")
    assert "on_failure" in page_text and ("give_up_after" not in page_text) == server.leg.is_current
    assert canvas.saved_values() == browser.values_of(workflow)
    shipped = read(api_file(NAME))
    assert canvas.prompt_like(shipped) == shipped
