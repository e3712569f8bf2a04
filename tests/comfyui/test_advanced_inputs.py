"""In Nodes 2.0, inputs that a first run does not need are folded away, and their values travel all the same."""

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


def test_nodes_2_fold_them_away_and_queue_them(server: legs.Server, canvas: browser.Canvas) -> None:
    workflow = read(ui_file(NAME))
    canvas.load(workflow)
    canvas.picture("nodes_2")
    shown = canvas.evaluate("() => document.querySelector('#vue-app').innerText")
    assert "on_failure" in shown and ("give_up_after" not in shown) == server.leg.is_current
    assert canvas.saved_values() == browser.values_of(workflow)
    shipped = read(api_file(NAME))
    assert canvas.prompt_as(shipped) == shipped
