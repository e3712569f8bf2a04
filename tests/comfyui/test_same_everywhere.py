"""One workflow file and seed gives bit-equal frames from the page, from the server's API, and without ComfyUI."""

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
    """Return the pixels of PNG files, which are lossless: [frames, height, width, 3], uint8."""
    assert {file.suffix for file in files} == {".png"}
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in sorted(files)])


def newest(server: legs.Server) -> dict[str, Any]:
    """Return the last run in the server's history."""
    return max(server.ask("/history").values(), key=lambda run: run["prompt"][0])


def used_cache(run: dict[str, Any]) -> bool:
    """Return whether any node's result came from ComfyUI's cache."""
    return any(data["nodes"] for name, data in run["status"]["messages"] if name == "execution_cached")


def run_uncached(server: legs.Server, run: Callable[[], np.ndarray]) -> np.ndarray:
    """Return the frames of a run that uses nothing from ComfyUI's cache."""
    server.ask("/free", {"unload_models": True, "free_memory": True})
    frames = run()
    if used_cache(newest(server)):  # the server handled /free only after this run
        frames = run()
    assert not used_cache(newest(server))
    return frames


@pytest.mark.parametrize(("precision", "model"), PRECISIONS.items())
def test_page_api_and_headless_runs_are_bit_equal(
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

    page, api = run_uncached(server, from_page), run_uncached(server, from_api)
    command = [sys.executable, "-m", "comfyui_onediff_guard", "run", str(file), "--json"]
    command += ["--models", str(server.base / "models"), "--out", str(tmp_path / "headless")]
    command_run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert command_run.returncode == 0, command_run.stdout + command_run.stderr
    headless = pixels([Path(name) for name in json.loads(command_run.stdout)["files"]])

    assert page.shape == (FRAMES, 64, 96, 3) and page.std() > 2
    assert np.array_equal(page, api) and np.array_equal(page, headless)
