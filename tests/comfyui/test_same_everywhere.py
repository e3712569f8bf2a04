"""One workflow file and seed: the same frames to the bit from the page, the server's API, and without a ComfyUI."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import browser
import legs
import numpy as np
import pytest
from PIL import Image
from runs import Ran
from templates import read, ui_file
from test_in_browser import LOADER, SAMPLER, SMALL

pytestmark = legs.IN_CHECKOUTS

FRAMES = 9
SETTINGS = SMALL | {f"{SAMPLER}.seed": 815, f"{SAMPLER}.control_after_generate": "fixed"}
PRECISIONS = {"auto": "small-healthy", "fp16": "small-inside"}
SERIALIZED = "() => JSON.parse(JSON.stringify(app.graph.serialize()))"
NOT_VIDEOS = """() => app.graph.nodes.filter(node => ['CreateVideo', 'SaveVideo'].includes(node.type))
    .forEach(node => app.graph.remove(node))"""


def pixels(files: list[Path]) -> np.ndarray:
    """[frames, height, width, 3], uint8, of PNGs, which lose nothing."""
    assert {file.suffix for file in files} == {".png"}
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in sorted(files)])


def newest(server: legs.Server) -> dict[str, Any]:
    """The last run in the server's history."""
    return max(server.ask("/history").values(), key=lambda run: run["prompt"][0])


def repeated(run: dict[str, Any]) -> bool:
    """Whether any node was taken from ComfyUI's cache."""
    return any(said["nodes"] for name, said in run["status"]["messages"] if name == "execution_cached")


def anew(server: legs.Server, made: Callable[[], np.ndarray]) -> np.ndarray:
    """What a run makes of which nothing comes from ComfyUI's cache."""
    server.ask("/free", {"unload_models": True, "free_memory": True})
    frames = made()
    if repeated(newest(server)):  # it was queued before the server came to /free, which it did after it
        frames = made()
    assert not repeated(newest(server))
    return frames


@pytest.mark.parametrize(("precision", "model"), PRECISIONS.items())
def test_page_server_and_headless_make_the_same_frames(
    canvas: browser.Canvas,
    server: legs.Server,
    run_graph: Callable[..., Ran],
    tmp_path: Path,
    precision: str,
    model: str,
) -> None:
    canvas.load(read(ui_file("cogvideox_text_to_video")))
    canvas.set_widgets(SETTINGS | {f"{LOADER}.precision": precision, f"{LOADER}.model": model})
    canvas.evaluate(NOT_VIDEOS)
    canvas.attach("SaveImage", "OneDiffGuardDecodeLatents", 0)
    file = tmp_path / "shared.json"
    file.write_text(json.dumps(canvas.evaluate(SERIALIZED)), encoding="utf-8")

    def from_page() -> np.ndarray:
        end, detail = canvas.queue()
        assert end == "execution_success", detail
        (saved,) = [ui["images"] for ui in newest(server)["outputs"].values() if "images" in ui]
        return pixels([server.base / "output" / image["subfolder"] / image["filename"] for image in saved])

    def from_api() -> np.ndarray:
        ran = run_graph(file)
        assert ran.code == 0, (ran.answer, server.tail())
        return pixels(ran.files)

    page, api = anew(server, from_page), anew(server, from_api)
    command = [sys.executable, "-m", "comfyui_onediff_guard", "run", str(file), "--json"]
    command += ["--models", str(server.base / "models"), "--out", str(tmp_path / "headless")]
    alone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    headless = pixels([Path(name) for name in json.loads(alone.stdout)["files"]])

    assert page.shape == (FRAMES, 64, 96, 3) and page.std() > 2
    assert np.array_equal(page, api) and np.array_equal(page, headless)
