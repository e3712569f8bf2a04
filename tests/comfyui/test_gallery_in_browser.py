"""ComfyUI's gallery of templates: search words find them, they are sorted by model, and three clicks make a video."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import browser
import legs
import pytest
from templates import TITLES

pytestmark = legs.IN_CHECKOUTS

NAME = "cogvideox_lora_text_to_video"
SIZES = {"width": 96, "height": 64, "frames": 9, "steps": 2}  # a CPU would need days for the template's own sizes
CATEGORY = f'text="{legs.FOLDER}"'
CARD = "template-workflow-"
COUNT_CLICKS = "() => { window.clicks = 0; document.addEventListener('click', () => { window.clicks += 1 }, true) }"


@pytest.fixture
def gallery(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures) as canvas:
        canvas.evaluate("() => { app.extensionManager.command.execute('Comfy.BrowseTemplates') }")
        canvas.evaluate(COUNT_CLICKS)
        yield canvas


def titles(canvas: browser.Canvas) -> list[str]:
    """Return the titles of the templates in the list, also those below the visible area."""
    canvas.settle()
    cards = f"() => [...document.querySelectorAll('[data-testid^={CARD}]')].map(card => card.dataset.testid)"
    return [name.removeprefix(CARD) for name in canvas.evaluate(cards)]


def test_search_for_black_nan_or_fp16_finds_every_template(gallery: browser.Canvas) -> None:
    gallery.click(CATEGORY)
    for word in ("black", "NaN", "fp16"):
        gallery.fill("[role=dialog] input:visible", word)
        gallery.picture(f"gallery_{word}")
        assert sorted(titles(gallery)) == sorted(TITLES.values()), word


def test_three_clicks_in_gallery_make_video(gallery: browser.Canvas) -> None:
    gallery.click(CATEGORY)
    shown = titles(gallery)
    gallery.picture("gallery")
    assert len(shown) >= 8 and shown == [*TITLES.values()][: len(shown)], "by model; older pages add the last later"
    gallery.click(f"[data-testid='{CARD}{TITLES[NAME]}']")
    gallery.wait_for_node("OneDiffGuardSampleCogVideoX")
    gallery.set_widgets({f"OneDiffGuardSampleCogVideoX.{key}": value for key, value in SIZES.items()})
    end, detail = gallery.click_run()
    assert end == "execution_success", detail
    gallery.wait_for_video()
    gallery.picture("from_the_gallery")
    assert gallery.evaluate("() => window.clicks") == 3
