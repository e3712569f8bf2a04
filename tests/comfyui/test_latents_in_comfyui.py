"""Latents saved with ComfyUI's SaveLatent, and decoded after LoadLatent in another ComfyUI process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legs
import numpy as np
import pytest
import shared_models
from as_comfyui import GRAPHS, NEGATIVE, PROMPT, api_node
from PIL import Image

pytestmark = pytest.mark.comfyui

FAMILIES = ("2b", "1.5", "5b-i2v", "cogview3", "cogview4", "wan", "svd")
PICTURE = "start.png"
Graph = dict[str, dict[str, Any]]


@pytest.fixture
def models(server: legs.Server, model_folder: Callable[..., Path]) -> dict[str, str]:
    """{family: the name of its folder on the server}"""
    for family in FAMILIES:
        folder = server.base / "models" / "diffusers" / f"saved-{family}"
        shared_models.copied(model_folder(family), folder)
    ramp = np.linspace(0, 255, 96 * 80 * 3).reshape(80, 96, 3).astype(np.uint8)
    Image.fromarray(ramp).save(server.base / "input" / PICTURE)
    return {family: f"saved-{family}" for family in FAMILIES}


def message(history: dict[str, Any], name: str) -> dict[str, Any]:
    return dict(history["status"]["messages"]).get(name, {})


def loader(family: str, model: str) -> Graph:
    return {f"{family} load": api_node("LoadPipeline", model=model, precision="fp32", backend="eager")}


def sampler(family: str, model: str) -> Graph:
    """Load → Encode → Sample → SaveLatent."""
    graph, pipeline = GRAPHS[family], [f"{family} load", 0]
    nodes = loader(family, model)
    given: dict[str, Any] = {"pipeline": pipeline, "seed": 3, **graph.sampling}
    if graph.prompted:
        nodes[f"{family} encode"] = api_node("EncodePrompt", pipeline=pipeline, prompt=PROMPT, negative_prompt=NEGATIVE)
        given |= {"positive": [f"{family} encode", 0], "negative": [f"{family} encode", 1]}
    if graph.start:
        nodes["picture"] = {"class_type": "LoadImage", "inputs": {"image": PICTURE}}
        given |= {"image": ["picture", 0]}
    nodes[f"{family} sample"] = api_node(graph.sampler, **given)
    saved = {"samples": [f"{family} sample", 0], "filename_prefix": f"latents/{family}"}
    return nodes | {f"{family} save": {"class_type": "SaveLatent", "inputs": saved}}


def decoder(family: str, latents: list[Any]) -> Graph:
    """Decode Latents → SaveImage, with the family's loader."""
    decode = api_node("DecodeLatents", pipeline=[f"{family} load", 0], latents=latents)
    images = {"images": [f"{family} decode", 0], "filename_prefix": family}
    return {f"{family} decode": decode, f"{family} images": {"class_type": "SaveImage", "inputs": images}}


def frames(server: legs.Server, history: dict[str, Any], family: str) -> np.ndarray:
    files = [server.base / "output" / image["filename"] for image in history["outputs"][f"{family} images"]["images"]]
    return np.stack([np.asarray(Image.open(file)) for file in files]).astype(int)


def test_saved_latents_are_decoded_after_restart(server: legs.Server, models: dict[str, str], tmp_path: Path) -> None:
    graph: Graph = {}
    for family, model in models.items():
        graph |= sampler(family, model) | decoder(family, [f"{family} sample", 0])
    before = server.run(graph)
    assert before["status"]["status_str"] == "success", message(before, "execution_error")

    shutil.copytree(server.base / "models", tmp_path / "models")
    shutil.copytree(server.base / "custom_nodes", tmp_path / "custom_nodes")
    (tmp_path / "input").mkdir()
    later: Graph = {}
    for family, model in models.items():
        (saved,) = before["outputs"][f"{family} save"]["latents"]
        file = f"{family}.latent"
        shutil.copy2(server.base / "output" / saved["subfolder"] / saved["filename"], tmp_path / "input" / file)
        latents = {"class_type": "LoadLatent", "inputs": {"latent": file}}
        later |= loader(family, model) | {f"{family} latents": latents} | decoder(family, [f"{family} latents", 0])

    with legs.started(server.leg, tmp_path) as restarted:
        after = restarted.run(later)
        assert after["status"]["status_str"] == "success", message(after, "execution_error")
        for family in models:
            found, expected = frames(restarted, after, family), frames(server, before, family)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() <= 1, family
        read = [line for line in restarted.log_text().splitlines() if "loading component" in line]
        assert len(read) == len(models)
        assert all("loading component vae" in line for line in read), "no step runs again"
