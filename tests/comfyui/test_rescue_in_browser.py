"""*Guard every workflow*, from a black picture to a correct one: the steps of README's animation.

With `ONEDIFF_GUARD_PICTURES=DIR`, the frames are saved as DIR/LEG/rescue.webp, the source of docs/rescue.webp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import browser
import flowing_sd15
import legs
import pytest
from PIL import Image
from test_every_workflow_in_browser import LOADED, OFFERED, SWITCH, guard_notices, run, strips
from waiting import wait_until

WITH_OFFER = [leg for leg in legs.CHECKOUTS if leg.name != "b"]  # 0.3.64 has no cache providers, so it makes no offer
pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.parametrize("leg", WITH_OFFER, indirect=True, ids=attrgetter("id"), scope="module"),
]

CHECKPOINT = "small-sd15.safetensors"
WINDOW = {"width": 1000, "height": 660}
SAMPLING = {"seed": 3, "steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "1": ("CheckpointLoaderSimple", {"ckpt_name": CHECKPOINT}),
    "2": ("ModelComputeDtype", {"model": ["1", 0], "dtype": "fp16"}),  # the default on a GPU
    "3": ("CLIPTextEncode", {"clip": ["1", 1], "text": "soft colours, out of focus"}),
    "4": ("CLIPTextEncode", {"clip": ["1", 1], "text": "text, watermark"}),
    "5": ("EmptyLatentImage", {"width": 128, "height": 128, "batch_size": 1}),  # a CPU is slow in fp16
    "6": (
        "KSampler",
        {"model": ["2", 0], "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0], **SAMPLING},
    ),
    "7": ("VAEDecode", {"samples": ["6", 0], "vae": ["1", 2]}),
    "8": ("ImageScaleBy", {"image": ["7", 0], "upscale_method": "bicubic", "scale_by": 1.75}),
    "9": ("PreviewImage", {"images": ["8", 0]}),
}
PLACES = {  # x, y, width and height
    "1": (0, 0, 230, 98),
    "2": (0, 150, 230, 58),
    "5": (0, 260, 230, 106),
    "3": (250, 0, 200, 100),
    "4": (250, 150, 200, 100),
    "6": (470, 0, 240, 262),
    "7": (730, 0, 250, 46),
    "8": (730, 86, 250, 82),
    "9": (730, 206, 250, 290),
}
PLACED = """places => {
    for (const node of app.graph.nodes) {
        const [x, y, width, height] = places[String(node.id)]
        node.pos = [x, y]
        node.setSize([width, height])
    }
    app.canvas.ds.scale = 0.94
    app.canvas.ds.offset = [75, 140]
    app.graph.setDirtyCanvas(true, true)
}"""
SHOWN = """() => {  // the preview's largest value and standard deviation; null without a preview
    const image = app.graph.nodes.find(node => node.type === 'PreviewImage').imgs?.[0]
    if (!image?.complete) return null
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight)
    const context = canvas.getContext('2d')
    context.drawImage(image, 0, 0)
    const values = context.getImageData(0, 0, canvas.width, canvas.height).data.filter((_, i) => i % 4 < 3)
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length
    const variance = values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / values.length
    return [Math.max(...values.filter((_, i) => i % 7 === 0)), Math.sqrt(variance)]
}"""
SWITCH_BUTTON = f"[id='{SWITCH}'] [role=switch], [role=switch][id='{SWITCH}']"


@pytest.fixture(scope="module")
def server(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    if reason := browser.missing_browser():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("rescue")
    legs.install_pack(base / "custom_nodes")
    checkpoint = base / "models" / "checkpoints" / CHECKPOINT
    checkpoint.parent.mkdir(parents=True)
    flowing_sd15.write(checkpoint)
    with legs.started(leg, base, "--force-fp16") as running:
        yield running
    checkpoint.unlink()  # it is large


@pytest.fixture(scope="module")
def canvas(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    """A page with the width of README's pictures."""
    with browser.canvas(server.url, pictures, window=WINDOW) as opened:
        opened.set_settings(server.url, Minimap_Visible=False, Graph_CanvasInfo=False)
        opened.open(server.url)
        yield opened


def test_black_picture_has_detail_after_switching_guard_on(
    canvas: browser.Canvas, server: legs.Server, pictures: Path
) -> None:
    frames: list[tuple[Path, int]] = []  # screenshots, and their duration in milliseconds

    def frame(milliseconds: int) -> None:
        frames.append((canvas.picture(f"rescue_{len(frames) + 1}"), milliseconds))

    prompt = {id_: {"class_type": class_type, "inputs": inputs} for id_, (class_type, inputs) in NODES.items()}
    canvas.evaluate(LOADED.replace("mine", "workflow"), prompt)
    canvas.set_widgets({"KSampler.control_after_generate": "fixed"})
    canvas.evaluate(PLACED, PLACES)
    canvas.settle()
    frame(1500)

    run(canvas)
    canvas.wait_for_text("Guard and run again")
    wait_until(lambda: canvas.evaluate(SHOWN), "no preview")
    assert canvas.evaluate(SHOWN) == [0, 0], "black"
    assert strips(canvas) == {} and canvas.count(OFFERED) == 1
    wait_until(lambda: not canvas.count("text=Job completed >> visible=true"), "ComfyUI's own notice stays")
    frame(2500)

    canvas.click(f"{OFFERED} button >> nth=1")
    canvas.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    canvas.click("[role=dialog] >> text=OneDiff Guard")
    canvas.settle()
    assert canvas.evaluate("selector => document.querySelector(selector).ariaChecked", SWITCH_BUTTON) == "false"
    frame(1500)
    canvas.click(SWITCH_BUTTON)
    canvas.settle()
    wait_until(lambda: server.ask("/settings").get(SWITCH) is True, "the setting is not saved")
    assert canvas.evaluate("selector => document.querySelector(selector).ariaChecked", SWITCH_BUTTON) == "true"
    frame(2000)

    canvas.press("Escape")
    run(canvas)
    wait_until(lambda: canvas.evaluate(SHOWN)[0] > 0, "the preview stays black")
    assert guard_notices(canvas) and canvas.count(OFFERED) == 0
    frame(2500)
    wait_until(lambda: not canvas.notices(), "notices stay")
    canvas.settle()
    strip = strips(canvas)["KSampler"]
    assert strip["text"].startswith("Result: OK.") and strip["cells"] == ["rerun"] + ["half"] * 3
    assert canvas.evaluate(SHOWN)[1] > 20, "a picture"
    frame(5000)

    if "ONEDIFF_GUARD_PICTURES" in os.environ:
        first, *others = (Image.open(path).convert("RGB") for path, _ in frames)
        how: dict[str, Any] = {"duration": [milliseconds for _, milliseconds in frames], "loop": 0, "lossless": True}
        first.save(pictures / "rescue.webp", save_all=True, append_images=others, method=6, **how)
