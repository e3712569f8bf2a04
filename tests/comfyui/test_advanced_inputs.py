"""In Nodes 2.0, inputs that a first run does not need are folded away, and their values travel all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import browser
import legs
import pytest
from templates import api_file, ui_file

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.parametrize("any_leg", legs.CHECKOUTS, indirect=True, ids=[leg.id for leg in legs.CHECKOUTS]),
]

NAME = "cogvideox_text_to_video"


@pytest.fixture
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures) as opened:
        opened.choose(server.url, VueNodes_Enabled=True)
        opened.open(server.url)
        yield opened
        opened.choose(server.url, VueNodes_Enabled=False)


def test_nodes_2_fold_them_away_and_queue_them(server: legs.Server, canvas: browser.Canvas) -> None:
    workflow = json.loads(ui_file(NAME).read_text(encoding="utf-8"))
    canvas.load(workflow)
    canvas.picture("nodes_2")
    shown = canvas.evaluate("() => document.querySelector('#vue-app').innerText")
    folded = tuple(map(int, server.leg.version.split("."))) >= legs.CURRENT
    assert "on_failure" in shown and ("give_up_after" not in shown) == folded
    assert canvas.saved_values() == browser.values_of(workflow)
    shipped = json.loads(api_file(NAME).read_text(encoding="utf-8"))
    assert canvas.prompt_as(shipped) == shipped
