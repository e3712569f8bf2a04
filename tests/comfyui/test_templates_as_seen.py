"""Each template on ComfyUI's page: it opens, runs with a small model, and names a missing model. In both frontends, and
in Nodes 2.0. Screenshots: see `browser.py`.

Templates of models in several files are opened, and tested with a missing model, but not run: ComfyUI cannot load small
files of these models.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import comfyui_nodes
import families
import legs
import native_checkpoints
import native_graphs
import pytest
from runs import HEALTHY
from templates import TITLES, api_file, read, ui_file
from test_layout_in_browser import FAULTS, WIDEST, types
from test_strip_in_browser import STRIPS, console_errors

pytestmark = legs.IN_CHECKOUTS

WITHOUT_FILES = {name for name in TITLES if name.startswith("native_")} - {native_graphs.NAME}
MODELS = {  # the inputs that name a model, by node
    "OneDiffGuardLoadPipeline": "model",
    "CheckpointLoaderSimple": "ckpt_name",
    "UNETLoader": "unet_name",
}
SUBSTITUTES = {  # a template's model → the model used here
    "OneDiffGuardLoadPipeline.model": {"CogVideoX-2b": HEALTHY},
}
MISSING_MODEL = "a-model-that-is-gone"


@pytest.fixture(scope="module")
def files(server: legs.Server) -> Iterator[None]:
    """A checkpoint that ComfyUI's loader reads, and empty files that only appear in lists."""
    models = server.base / "models"
    written = models / "checkpoints" / comfyui_nodes.SD15_FILE
    native_checkpoints.write_sd15(written, overflows=False)
    listed = [models / folder / name for folder, names in comfyui_nodes.FILES.items() for name in names]
    for file in listed:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    yield
    for file in (written, *listed):
        file.unlink()


@pytest.fixture(scope="module", params=["classic", "nodes_2"])
def canvas(
    request: pytest.FixtureRequest, server: legs.Server, pictures: Path, files: None
) -> Iterator[browser.Canvas]:
    vue = request.param == "nodes_2"
    if vue and server.leg.id == "leg_b":
        pytest.skip("Nodes 2.0 is newer than this frontend")
    folder = pictures / request.param
    folder.mkdir(exist_ok=True)
    with browser.canvas(server.url, folder) as opened, opened.nodes_2(server.url, on=vue):
        yield opened


def small(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """Return the template's widget values for a CPU, by node and name."""
    sizes = native_graphs.SMALL if name.startswith("native_") else {}
    given = {
        f"{node['class_type']}.{key}": sizes.get(key, value)
        for node in families.small(api_file(name), known).values()
        for key, value in node["inputs"].items()
        if not isinstance(value, list) and key != "text"  # not links, nor the two prompts
    }
    return given | {name: others[given[name]] for name, others in SUBSTITUTES.items() if given.get(name) in others}


@pytest.mark.parametrize("name", TITLES)
def test_template_opens_runs_and_names_missing_model(canvas: browser.Canvas, server: legs.Server, name: str) -> None:
    if lacking := types(name) - server.ask("/object_info").keys():
        pytest.skip(f"this ComfyUI has no {', '.join(sorted(lacking))}")
    canvas.open(server.url)
    canvas.console_errors.clear()
    workflow, shipped = read(ui_file(name)), read(api_file(name))
    canvas.load(workflow)
    canvas.settle()
    canvas.picture(f"{name}_1_opened")
    assert (canvas.missing(), canvas.notices(), console_errors(canvas)) == ([], [], [])
    assert not [url for url in canvas.failed_urls if legs.FOLDER in url]
    assert canvas.prompt_like(shipped) == shipped
    assert canvas.saved_values() == browser.values_of(workflow), "by position; pages hide advanced ones"
    if name not in WITHOUT_FILES:
        canvas.set_widgets(small(name, canvas.ask("/object_info")))
        end, detail = canvas.queue()
        assert end == "execution_success", detail
        canvas.settle()
        canvas.picture(f"{name}_2_ran")
        strips = canvas.evaluate(STRIPS)
        verdicts = {kind: strip["text"].splitlines()[0] for kind, strip in strips.items() if strip["cells"]}
        assert verdicts and set(verdicts.values()) <= {"Result: OK.", "This stage: OK."}, verdicts
        if loader := strips.get("OneDiffGuardLoadPipeline"):
            assert ", since " in loader["text"], "the reason for the dtype"
        assert any(kind.startswith(("OneDiffGuardSample", native_graphs.GUARD)) for kind in verdicts)
        found = canvas.evaluate(FAULTS, WIDEST)[0]
        assert [fault for fault in found if "lies on" in fault] == [], "strips do not overlap other nodes"
    canvas.set_widgets({f"{kind}.{key}": MISSING_MODEL for kind, key in MODELS.items()})
    canvas.press_run()
    if name.startswith("native_"):  # ComfyUI's own loaders
        canvas.wait_for_text("not in list" if server.leg.id == "leg_b" else "not available")  # "is" or "are"
    else:
        canvas.wait_for_error(MISSING_MODEL)
    canvas.picture(f"{name}_3_failed")
