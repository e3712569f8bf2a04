"""Shipped workflows on the page of a current ComfyUI: a run from the cache, and unsafe text.

Screenshots are in the test's temporary folder, or in the folder that `ONEDIFF_GUARD_PICTURES` names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import browser
import legs
import pytest
from runs import INSIDE
from runs import SMALL as SMALL_FILE
from templates import read, ui_file

pytestmark = legs.IN_CHECKOUTS

LOADER, SAMPLER = "OneDiffGuardLoadPipeline", "OneDiffGuardSampleCogVideoX"
SMALL = SMALL_FILE | {
    f"{LOADER}.model": INSIDE,
    f"{LOADER}.precision": "fp16",
    "OneDiffGuardNaNGuard.scope": "step",  # no profile is saved for the next test
}


MARKUP = "<img src=x onerror=\"window.ran=['text']\">"
ENDING = f"{MARKUP} & ![a](x) [[b|https://example.org]] __LNK7__"  # newer pages render Markdown and more


def test_cached_run_shows_report_of_first_run(canvas: browser.Canvas) -> None:
    fixed_seed = {f"{SAMPLER}.seed": 4711, f"{SAMPLER}.control_after_generate": "fixed"}  # the first run is not cached
    canvas.load(read(ui_file("cogvideox_text_to_video")))
    canvas.set_widgets(SMALL | fixed_seed)
    shown: list[dict[str, Any]] = []
    for _ in range(2):
        end, detail = canvas.queue()
        assert end == "execution_success", detail
        shown.append(canvas.widgets(SAMPLER))
    assert "2 steps, all fine" in str(shown[0]) and shown[1] == shown[0]
    runs = sorted(canvas.ask("/api/history").values(), key=lambda run: run["prompt"][0])[-2:]
    first, second = ({id_: ui.get("onediff_guard") for id_, ui in run["outputs"].items()} for run in runs)
    assert second == first


@pytest.fixture
def hostile_model(server: legs.Server) -> Iterator[str]:
    """The name of a CogView4 with markup in its config. tests/nodes/test_lists.py has markup in names."""
    models = server.base / "models" / "diffusers"
    made = shutil.copytree(models / "CogView4-6B", models / "hostile")
    config = made / "transformer" / "config.json"
    config.write_text(json.dumps(read(config) | {"num_layers": MARKUP}))
    yield made.name
    shutil.rmtree(made)


def test_markup_in_model_or_prompt_is_shown_as_text(
    canvas: browser.Canvas, server: legs.Server, hostile_model: str
) -> None:
    """A model's folder and config, and a workflow's prompt, come from other people. The report quotes the end of a
    prompt that is too long."""
    canvas.open(server.url)  # updates the list of folders
    canvas.load(read(ui_file("cogview4_text_to_image")))
    canvas.set_widgets(
        {
            "OneDiffGuardLoadPipeline.backend": "eager",
            "OneDiffGuardEncodePrompt.prompt": "boat " * 1030 + ENDING,
            "OneDiffGuardSampleCogView.width": 96,
            "OneDiffGuardSampleCogView.height": 64,
            "OneDiffGuardSampleCogView.steps": 2,
        }
    )
    canvas.attach("PreviewAny", "OneDiffGuardSampleCogView", 1)
    end, detail = canvas.queue()
    canvas.picture("markup_in_prompt")
    assert end == "execution_success", detail
    assert ENDING in canvas.text_with("this was cut off")
    canvas.set_widgets({"OneDiffGuardLoadPipeline.model": hostile_model})
    assert canvas.queue()[0] == "execution_error", "a denoiser with this config cannot be built"
    canvas.picture("markup_in_config")
    canvas.wait_for_error(MARKUP)
    assert canvas.count("img[src='x']") == 0 and canvas.evaluate("() => window.ran ?? []") == []
