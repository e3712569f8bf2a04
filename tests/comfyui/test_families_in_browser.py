"""Guard every workflow on all of ComfyUI's own families, in one prompt, queued from the page and by the API."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import legs
import pytest
import torch
from test_every_workflow_in_browser import LOADED, SWITCH
from waiting import wait_until

pytestmark = pytest.mark.comfyui

HERE = Path(__file__).resolve().parent
NODES = f"""
import sys
sys.path += {[str(HERE / "inside"), str(HERE.parent / "support")]!r}
from model_nodes import NODE_CLASS_MAPPINGS
"""
SAMPLING = {"seed": 1, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
TILES = {"tile_size": 64, "overlap": 0, "temporal_size": 64, "temporal_overlap": 8}
VAE_NODES = {  # further nodes for the image VAE
    "decode tiled": ("VAEDecodeTiled", TILES),
    "encode": ("VAEEncode", {}),
    "encode tiled": ("VAEEncodeTiled", TILES),
}
API = ", by API"
RUNS = {"healthy": False, "healthy, guarded": True, "hot": False, "hot, guarded": True, "hot in fp32": False}
RUNS |= {f"healthy, guarded{API}": False, f"hot, guarded{API}": False}  # the prompt itself turns the guard on
GUARDED = ("guarded", f"guarded{API}")
Results = dict[str, dict[str, torch.Tensor]]  # the result of each case, by run


def graph(server: legs.Server, state: str) -> dict[str, Any]:
    """A graph with each family's KSampler, two that share a model, and each VAE's nodes. Results go to CASE.pt."""
    info = server.ask("/object_info")
    results: dict[str, Any] = {}

    def add(kind: str, **inputs: Any) -> str:
        results[str(len(results) + 1)] = {"class_type": kind, "inputs": inputs}
        return str(len(results))

    def sampler(model: str, latent: list[Any], **changed: Any) -> str:
        wires = {"model": [model, 0], "positive": [model, 1], "negative": [model, 2], "latent_image": latent}
        return add("KSampler", **wires, **SAMPLING | changed)

    def keep(case: str, node: str) -> None:
        add("TestKeep", made=[node, 0], file=f"{case}.pt")

    for name in info["TestSmallModel"]["input"]["required"]["name"][0]:
        model = add("TestSmallModel", name=name, state=state)
        first = sampler(model, [model, 3])
        keep(f"model {name}", first)
        if name == "sd15":
            keep("model sd15 twice", sampler(model, [first, 0], denoise=0.5, seed=2))
    for name in info["TestSmallVAE"]["input"]["required"]["name"][0]:
        vae = add("TestSmallVAE", name=name, state=state)
        keep(f"vae {name}", add("VAEDecode", vae=[vae, 0], samples=[vae, 1]))
        for case, (kind, more) in VAE_NODES.items() if name == "image" else ():
            given = {"samples": [vae, 1]} if "Decode" in kind else {"pixels": [vae, 2]}
            keep(f"vae {name} {case}", add(kind, vae=[vae, 0], **given, **more))
    return results


@pytest.fixture(scope="module")
def results(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    if reason := browser.missing_browser():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("families_page")
    legs.install_pack(folder / "custom_nodes")
    (folder / "custom_nodes" / "small_models.py").write_text(NODES, encoding="utf-8")
    with legs.started(leg, folder) as server, browser.canvas(server.url, folder) as canvas:
        found: Results = {}
        for run, switch in RUNS.items():
            server.ask(f"/settings/{SWITCH}", switch)
            server.ask("/free", {"free_memory": True, "unload_models": True})  # no result comes from the cache
            shutil.rmtree(folder / "user" / "onediff_guard" / "profiles", ignore_errors=True)
            prompt = graph(server, run.split(", ")[0])
            if run.endswith(API):
                queue_by_api(server, prompt)
            else:
                canvas.evaluate(LOADED, prompt)
                canvas.set_widgets({"KSampler.control_after_generate": "fixed"})
                end, detail = canvas.queue()
                assert end == "execution_success", (run, detail)
            found[run] = {file.stem: torch.load(file) for file in (folder / "output").glob("*.pt")}
            shutil.rmtree(folder / "output")
            (folder / "output").mkdir()
        yield found


def queue_by_api(server: legs.Server, prompt: dict[str, Any]) -> None:
    id_ = server.ask("/prompt", {"prompt": prompt, "extra_data": {"onediff_guard": True}})["prompt_id"]
    wait_until(lambda: server.ask(f"/history/{id_}"), server.tail)
    assert server.ask(f"/history/{id_}")[id_]["status"]["status_str"] == "success", server.tail()


def test_every_run_has_results_of_all_families(results: Results, leg: legs.Leg) -> None:
    cases = [*results["healthy"]]
    assert all(found.keys() == results["healthy"].keys() for found in results.values())
    assert len(cases) == (43 if leg.name == "c" else 24), cases


@pytest.mark.parametrize("way", GUARDED)
def test_healthy_runs_are_bit_equal_with_guards(results: Results, way: str) -> None:
    guarded = results[f"healthy, {way}"]
    assert [case for case, plain in results["healthy"].items() if not torch.equal(plain, guarded[case])] == []
    assert all(plain.isfinite().all() for plain in results["healthy"].values())


@pytest.mark.parametrize("way", GUARDED)
def test_overflowing_runs_are_near_fp32_with_guards(results: Results, way: str) -> None:
    """The bound is that of half precision: after the failed step, every layer is protected."""
    figures = {
        case: [distance(results[run][case], exact) for run in ("hot", f"hot, {way}")]
        for case, exact in results["hot in fp32"].items()
    }
    assert {case: both for case, both in figures.items() if not both[1] < 0.01} == {}
    harmless = {case: both for case, both in figures.items() if both[0] < 0.02}
    assert harmless.keys() <= {"model ace"}, "it clips in fp32 too"


def distance(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference relative to the largest value; NaN if `ours` is not finite."""
    return ((ours - exact).abs().max() / exact.abs().max()).item() if ours.isfinite().all() else math.nan
