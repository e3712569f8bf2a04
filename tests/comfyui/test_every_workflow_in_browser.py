"""Guard every workflow on ComfyUI's page: the switch, notices and strips of a run, and the offer to run again.

The workflows have ComfyUI's own nodes, and a small SD1.5 that overflows fp16. Screenshots: see `browser.py`.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browser
import comfyui_nodes
import legs
import native_checkpoints
import numpy as np
import pytest
from native_graphs import HOT
from runs import frames_of
from test_strip_in_browser import STRIPS
from waiting import wait_until

pytestmark = pytest.mark.comfyui

SWITCH, OFFER = "OneDiffGuard.EveryWorkflow", "OneDiffGuard.OfferRerun"
HEALTHY = comfyui_nodes.SD15_FILE
SAMPLING = {"seed": 1, "steps": 2, "cfg": 8.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
NODES: dict[str, tuple[str, dict[str, Any]]] = {
    "1": ("CheckpointLoaderSimple", {"ckpt_name": HOT + HEALTHY}),
    "2": ("ModelComputeDtype", {"model": ["1", 0], "dtype": "fp16"}),
    "3": ("CLIPTextEncode", {"clip": ["1", 1], "text": "a small wooden boat on a calm lake"}),
    "4": ("CLIPTextEncode", {"clip": ["1", 1], "text": "blurry"}),
    "5": ("EmptyLatentImage", {"width": 16, "height": 16, "batch_size": 1}),
    "6": (
        "KSampler",
        {"model": ["2", 0], "positive": ["3", 0], "negative": ["4", 0], "latent_image": ["5", 0], **SAMPLING},
    ),
    "7": ("VAEDecode", {"samples": ["6", 0], "vae": ["1", 2]}),
    "8": ("SaveImage", {"images": ["7", 0], "filename_prefix": "guarded"}),
}
SECOND = {  # another sampler and output
    "16": ("KSampler", NODES["6"][1] | {"latent_image": ["6", 0], "seed": 2, "denoise": 0.5}),
    "17": ("VAEDecode", {"samples": ["16", 0], "vae": ["1", 2]}),
    "18": ("SaveImage", {"images": ["17", 0], "filename_prefix": "second"}),
}
PROVIDERS = """
from aiohttp import web
from server import PromptServer

@PromptServer.instance.routes.get("/test_providers")
async def providers(request):
    try:
        from comfy_execution.cache_provider import _get_cache_providers
    except ImportError:
        return web.json_response([])
    return web.json_response([type(provider).__name__ for provider in _get_cache_providers()])

NODE_CLASS_MAPPINGS = {}
"""
LOADED = "graph => app.loadApiJson(graph, 'mine')"
SAVED = "() => JSON.stringify((app.rootGraph ?? app.graph).serialize())"
SIZES = "() => Object.fromEntries(app.graph.nodes.map(node => [node.type, [...node.size]]))"
COMMAND = "name => app.extensionManager.command.execute(name)"
SUBGRAPH = """type => {
    const node = app.graph.nodes.find(node => node.type === type)
    app.canvas.graph.convertToSubgraph(new Set([node]))
}"""
SELECTED = """prefix => {
    const node = app.graph.nodes.find(node => node.widgets?.some(widget => widget.value === prefix))
    app.canvas.selectNode(node)
}"""
REPORTED = """([outputs, type, end, workflow]) => {
    const node = String(app.graph.nodes.find(node => node.type === type).id)
    const send = (event, detail) => app.api.dispatchEvent(new CustomEvent(event, {detail}))
    for (const output of outputs) send('onediff_guard.report', {node, type, prompt: 'one', workflow, output})
    send(end, {})
}"""
GRAPH = "() => (app.rootGraph ?? app.graph).serialize()"
OPENED = "graph => app.loadGraphData(graph)"
TWICE = """type => {
    const root = app.graph
    const {node} = app.canvas.graph.convertToSubgraph(new Set([root.nodes.find(node => node.type === type)]))
    const again = LiteGraph.createNode(node.type)
    root.add(again)
    const inner = node.subgraph.nodes.find(node => node.type === type).id
    return [node, again].map(({id}) => `${id}:${inner}`)
}"""
INSIDE = """() => {
    const inner = app.graph.nodes.find(node => node.subgraph).subgraph.nodes.find(node => node.type === 'KSampler')
    const strip = inner.widgets?.find(widget => widget.strip)?.element
    if (!strip) return {size: [...inner.size], saved: [...inner.serialize().size]}
    const cells = strip.querySelectorAll('.cells > .cell').length
    return {text: strip.firstChild.innerText || strip.textContent, cells}
}"""
ENLARGED = """([type, width, height]) => {
    const node = app.graph.nodes.find(node => node.type === type)
    node.setSize([node.size[0] + width, node.size[1] + height])
}"""
OFFERED = "#onediff-guard-offer"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A healthy and an overflowing checkpoint. They are large, so they are deleted after the tests."""
    folder = tmp_path_factory.mktemp("checkpoints")
    native_checkpoints.write_sd15(folder / HEALTHY, overflows=False)
    native_checkpoints.write_sd15(folder / (HOT + HEALTHY), overflows=True)
    yield folder
    shutil.rmtree(folder)


@contextmanager
def started(leg: legs.Leg, folder: Path, checkpoints: Path, *options: str) -> Iterator[legs.Server]:
    if reason := browser.missing_browser():
        pytest.skip(reason)
    legs.install_pack(folder / "custom_nodes")
    (folder / "custom_nodes" / "test_providers.py").write_text(PROVIDERS, encoding="utf-8")
    (folder / "models").mkdir()
    (folder / "models" / "checkpoints").symlink_to(checkpoints)
    with legs.started(leg, folder, "--force-fp16", "--fp16-vae", *options) as running:
        yield running


@pytest.fixture(scope="module")
def server(leg: legs.Leg, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    with started(leg, tmp_path_factory.mktemp("page"), checkpoints) as running:
        yield running


@pytest.fixture(scope="module")
def page(server: legs.Server, pictures: Path) -> Iterator[browser.Canvas]:
    with browser.canvas(server.url, pictures) as opened:
        yield opened


@pytest.fixture
def canvas(page: browser.Canvas, server: legs.Server) -> Iterator[browser.Canvas]:
    """The page, reopened, with the switch off, an empty cache and no profiles."""
    for name, value in {SWITCH: False, OFFER: True, "Comfy.VueNodes.Enabled": False}.items():
        server.ask(f"/settings/{name}", value)
    server.forget()
    server.ask("/free", {"free_memory": True, "unload_models": True})
    page.open(server.url)
    load(page, api())
    yield page
    assert providers(server) == [], "a cache provider is left"


def api(*, second: bool = False, **inputs: Any) -> dict[str, Any]:
    """The workflow in API format. inputs: replace those of the same name."""
    made = {}
    for id_, (class_type, given) in (NODES | (SECOND if second else {})).items():
        changed = {name: inputs.get(name, value) for name, value in given.items()}
        made[id_] = {"class_type": class_type, "inputs": changed}
    return made


def load(canvas: browser.Canvas, graph: dict[str, Any]) -> None:
    canvas.evaluate(LOADED, graph)
    canvas.set_widgets({"KSampler.control_after_generate": "fixed"})
    canvas.settle()


def run(canvas: browser.Canvas, command: str = "") -> None:
    end, detail = canvas.queue(command)
    assert end == "execution_success", detail
    canvas.settle()


def entries(server: legs.Server) -> list[dict[str, Any]]:
    return sorted(server.history().values(), key=lambda entry: entry["prompt"][0])


def pictures_of(server: legs.Server, entry: dict[str, Any]) -> list[np.ndarray]:
    return [*map(frames_of, server.files_of(entry))]


def is_not_black(server: legs.Server, entry: dict[str, Any]) -> bool:
    made = pictures_of(server, entry)
    assert made
    return all(picture.std() > 2 for picture in made)


def providers(server: legs.Server) -> list[str]:
    """Return the classes of ComfyUI's cache providers."""
    return server.ask("/test_providers")


def skip_without_providers(server: legs.Server) -> None:
    if server.leg.name == "b":
        pytest.skip("ComfyUI 0.3.64 has no cache providers")


def guard_notices(canvas: browser.Canvas) -> list[str]:
    return [notice for notice in canvas.notices() if "NaN Guard" in notice]


def strips(canvas: browser.Canvas) -> dict[str, Any]:
    return canvas.evaluate(STRIPS)


def test_settings_switch_guards_without_changing_saved_workflow(canvas: browser.Canvas, server: legs.Server) -> None:
    saved: list[str] = []  # after each run: the workflow as a file would have it

    def run_with(checkpoint: str) -> dict[str, Any]:
        canvas.set_widgets({"CheckpointLoaderSimple.ckpt_name": checkpoint})
        run(canvas)
        saved.append(canvas.evaluate(SAVED).replace(HOT + HEALTHY, HEALTHY))
        assert is_not_black(server, entries(server)[-1])
        return strips(canvas)

    assert run_with(HEALTHY) == {}
    sizes = canvas.evaluate(SIZES)
    canvas.click_switch(SWITCH, "Guard every workflow")
    canvas.picture("every_settings")
    wait_until(lambda: server.ask("/settings").get(SWITCH) is True, "the setting is not saved")
    canvas.press("Escape")
    assert run_with(HEALTHY) == {} and "Guard every workflow: added 2 guards" in server.log_text()
    assert canvas.evaluate(SIZES) == sizes and not guard_notices(canvas)
    assert set(run_with(HOT + HEALTHY)) == {"KSampler", "VAEDecode"}
    assert run_with(HEALTHY) == {} and canvas.evaluate(SIZES) == sizes
    canvas.picture("every_healthy_after_rescued")
    assert [each == saved[0] for each in saved] == [True] * 4, saved


def in_classic_mode(canvas: browser.Canvas) -> None:
    run(canvas)


def in_app_mode(canvas: browser.Canvas) -> None:
    canvas.evaluate(COMMAND, "Comfy.ToggleLinear")
    canvas.settle()
    run(canvas)


def in_subgraph(canvas: browser.Canvas) -> None:
    canvas.evaluate(SUBGRAPH, "KSampler")
    canvas.settle()
    run(canvas)


def with_selected_output(canvas: browser.Canvas) -> None:
    load(canvas, api(second=True))
    canvas.evaluate(SELECTED, "guarded")
    run(canvas, "Comfy.QueueSelectedOutputNodes")


def in_nodes_2(canvas: browser.Canvas) -> None:
    canvas.evaluate("() => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    canvas.settle()
    run(canvas)


WAYS: dict[Callable[[browser.Canvas], None], str] = {  # way to run → the oldest ComfyUI whose page has it
    in_classic_mode: "",
    with_selected_output: "",
    in_subgraph: "",
    in_nodes_2: "0.33",
    in_app_mode: "0.33",
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_recomputed_run_shows_notice_and_strips(
    canvas: browser.Canvas, server: legs.Server, way: Callable[..., None]
) -> None:
    if WAYS[way] and server.leg.name == "b":
        pytest.skip(f"this page has no {way.__name__}")
    server.ask(f"/settings/{SWITCH}", True)
    canvas.set_widgets({"KSampler.seed": 7})
    way(canvas)
    canvas.settle()
    canvas.picture(f"every_{way.__name__}")
    entry = entries(server)[-1]
    assert is_not_black(server, entry) and len(pictures_of(server, entry)) == 1
    notices = guard_notices(canvas)
    assert len(notices) == 1 and "Result: OK." in notices[0] and "(KSampler, VAE Decode)" in notices[0], notices
    shown = strips(canvas)
    assert set(shown) == {"KSampler", "VAEDecode"}
    for strip in shown.values():
        assert strip["text"].startswith("Result: OK.") and "rerun" in strip["cells"]


def test_nodes_2_removes_strip_at_next_run(canvas: browser.Canvas, server: legs.Server) -> None:
    if WAYS[in_nodes_2] and server.leg.name == "b":
        pytest.skip("this page has no Nodes 2.0")
    server.ask(f"/settings/{SWITCH}", True)
    sizes, shown = [], []
    for checkpoint in (HEALTHY, HOT + HEALTHY, HEALTHY):
        canvas.set_widgets({"CheckpointLoaderSimple.ckpt_name": checkpoint})
        in_nodes_2(canvas)
        canvas.picture(f"every_in_nodes_2_{len(sizes)}")
        sizes.append(canvas.evaluate(SIZES))
        shown.append(canvas.count(".onediff-guard .verdict.rescued"))
    assert shown == [0, 2, 0]
    assert sizes[1] != sizes[0] and sizes[2] == sizes[0]


def test_reports_of_one_node_are_merged_into_one_strip(canvas: browser.Canvas) -> None:
    """A node has several reports if it has two models, a MODEL and a VAE, or samples several times."""
    outputs = [
        report("fp16", "the first", ["rerun", "half"]),
        report("bf16", "the second", ["rerun"]),
        report("fp16", "the first", ["half", "rerun"]) | {"unguarded": ["Not guarded from call 3 on: why"]},
        {"text": ["Not guarded from call 1 on: other"], "onediff_guard": [], "unguarded": ["other"]},
    ]
    canvas.evaluate(REPORTED, [outputs[:1], "KSampler", "execution_success"])
    assert strips(canvas)["KSampler"]["text"].startswith("Result: OK.")
    canvas.evaluate(REPORTED, [outputs[1:], "KSampler", "execution_success"])
    canvas.settle()
    canvas.picture("every_several_reports")
    strip = strips(canvas)["KSampler"]
    assert strip["cells"] == ["rerun", "half", "rerun", "half", "rerun"]
    said = strip["text"]
    assert said.startswith("Result: not guarded to the end") and "why" in said and "other" in said
    assert "fp16, bf16" in said and all(text in strip["report"] for text in ("whole the first", "whole the second"))
    broken = report("fp16", "the last", ["failed"]) | {"unguarded": []}
    broken["onediff_guard"][0]["outcomes"] = {"non-finite": 1}
    canvas.evaluate(REPORTED, [[broken], "KSampler", "execution_error"])
    assert strips(canvas)["KSampler"]["text"].startswith("Result: NOT OK.")
    assert len(guard_notices(canvas)) == 3, "one notice at the end of each prompt"
    canvas.dispatch("execution_start")
    cut = report("fp16", "the last", ["rerun"])
    cut["onediff_guard"][0]["ended"] = True
    canvas.evaluate(REPORTED, [[cut], "KSampler", "execution_interrupted"])
    assert strips(canvas)["KSampler"]["text"].startswith("Result: not finished")


def test_strip_is_removed_from_reopened_workflow(canvas: browser.Canvas) -> None:
    """During a run, the user opens another tab and returns."""
    outputs = [report("fp16", "said", ["rerun"])]
    saved = canvas.evaluate(SAVED)
    canvas.evaluate(REPORTED, [outputs, "KSampler", "nothing yet"])
    load(canvas, api())
    assert strips(canvas) == {}
    canvas.evaluate(REPORTED, [outputs, "KSampler", "nothing yet"])
    assert strips(canvas)["KSampler"]["cells"] == ["rerun", "rerun"]
    canvas.evaluate(REPORTED, [[], "KSampler", "execution_start"])
    assert strips(canvas) == {} and canvas.evaluate(SAVED) == saved


def test_strip_appears_only_in_workflow_that_ran(canvas: browser.Canvas, server: legs.Server) -> None:
    """The strip returns when that workflow is opened again."""
    server.ask(f"/settings/{SWITCH}", True)
    canvas.evaluate(OPENED, canvas.evaluate(GRAPH) | {"id": str(uuid.uuid4())})
    run(canvas)
    (graph, shown), notices = (canvas.evaluate(GRAPH), strips(canvas)), len(guard_notices(canvas))
    assert set(shown) == {"KSampler", "VAEDecode"}
    canvas.evaluate(OPENED, graph | {"id": str(uuid.uuid4())})
    canvas.settle()
    assert strips(canvas) == {}, "another workflow with the same nodes"
    canvas.evaluate(REPORTED, [[report("fp16", "said", ["rerun"])], "KSampler", "execution_success", graph["id"]])
    assert strips(canvas) == {} and len(guard_notices(canvas)) == notices + 1, "a notice appears if no strip is visible"
    canvas.evaluate(OPENED, graph)
    canvas.settle()
    assert set(strips(canvas)) == set(shown)


def test_wired_guard_reports_appear_when_workflow_is_opened_later(canvas: browser.Canvas) -> None:
    guard = {"class_type": "OneDiffGuardNaNGuardNative", "inputs": {"model": ["2", 0]}}
    canvas.evaluate(LOADED, api() | {"9": guard})
    graph = canvas.evaluate(GRAPH) | {"id": str(uuid.uuid4())}
    notices = len(guard_notices(canvas))
    for dtype in ("fp16", "bf16"):
        said = report(dtype, "said", ["rerun"])
        canvas.dispatch("onediff_guard.report", node="9", prompt="one", workflow=graph["id"], output=said)
    canvas.evaluate(REPORTED, [[], "KSampler", "execution_success"])
    assert strips(canvas) == {} and len(guard_notices(canvas)) == notices + 1
    canvas.evaluate(OPENED, graph)
    canvas.settle()
    assert strips(canvas)["OneDiffGuardNaNGuardNative"]["cells"] == ["rerun", "rerun"]


def test_subgraph_used_twice_shows_reports_of_both_uses(canvas: browser.Canvas) -> None:
    sizes, outer = canvas.evaluate(SIZES), canvas.evaluate(TWICE, "KSampler")
    for id_, outcome in zip(outer, ("non-finite", "rerun"), strict=True):
        output = report("fp16", f"of {id_}", ["failed" if outcome == "non-finite" else "rerun"])
        output["onediff_guard"][0]["outcomes"] = {outcome: 1}
        canvas.dispatch("onediff_guard.report", node=id_, type="KSampler", prompt="one", output=output)
    canvas.settle()
    shown = canvas.evaluate(INSIDE)
    assert shown["text"].startswith("Result: NOT OK.") and shown["cells"] == 2
    canvas.dispatch("execution_start")
    assert canvas.evaluate(INSIDE) == {"size": sizes["KSampler"], "saved": sizes["KSampler"]}


def test_enlarged_node_keeps_its_size_when_strip_is_removed(canvas: browser.Canvas) -> None:
    before = canvas.evaluate(SIZES)["KSampler"]
    canvas.evaluate(REPORTED, [[report("fp16", "said", ["rerun"])], "KSampler", "nothing yet"])
    canvas.settle()
    canvas.evaluate(ENLARGED, ["KSampler", 70, 50])
    (saved,) = (node for node in canvas.evaluate(GRAPH)["nodes"] if node["type"] == "KSampler")
    for more in ("more", "and more"):  # the node is laid out again
        canvas.evaluate(REPORTED, [[report("bf16", more, ["rerun"] * 30)], "KSampler", "nothing yet"])
        canvas.settle()
    canvas.evaluate(REPORTED, [[], "KSampler", "execution_start"])
    after = canvas.evaluate(SIZES)["KSampler"]
    assert [after, list(saved["size"])] == [[before[0] + 70, before[1] + 50]] * 2


def report(dtype: str, summary: str, cells: list[str]) -> dict[str, Any]:
    plan = {"component": "denoiser", "dtype": dtype, "reason": "said"}
    run = {"plan": plan, "architecture": "CPU", "cells": cells, "before": [], "text": f"whole {summary}"}
    return {"text": [f"{summary}\na note"], "onediff_guard": [run | {"outcomes": {"finite": 1, "rerun": 1}}]}


def click_offer(canvas: browser.Canvas, server: legs.Server, runs: int) -> list[dict[str, Any]]:
    """Click the offer, wait for the reruns, and return their history entries. runs: the number of black prompts."""
    before = len(entries(server))
    canvas.click(f"{OFFERED} button")
    wait_until(lambda: len(entries(server)) == before + runs, lambda: f"not all runs were repeated:\n{server.tail()}")
    canvas.settle()
    assert canvas.count(OFFERED) == 0
    return entries(server)[before:]


def test_black_run_is_rerun_with_guard_at_click(canvas: browser.Canvas, server: legs.Server, checkpoints: Path) -> None:
    """The rerun has the same prompt, seed and selected output, and uses the cache. A notice says why one is refused."""
    skip_without_providers(server)
    load(canvas, api(second=True, seed=4711))
    canvas.evaluate(SELECTED, "guarded")
    run(canvas, "Comfy.QueueSelectedOutputNodes")
    black = entries(server)[-1]
    assert [picture.max() for picture in pictures_of(server, black)] == [0]
    canvas.wait_for_text("Guard and run again")
    canvas.picture("every_offer")
    (again,) = click_offer(canvas, server, 1)
    canvas.picture("every_offer_taken")
    assert is_not_black(server, again) and len(pictures_of(server, again)) == 1
    of_prompts = [
        {id_: node for id_, node in entry["prompt"][2].items() if "KSampler" in str(node)} for entry in (black, again)
    ]
    assert [node["6"]["inputs"]["seed"] for node in of_prompts] == [4711, 4711]
    cached = {
        node for kind, data in again["status"]["messages"] if kind == "execution_cached" for node in data["nodes"]
    }
    assert cached == {"1", "2", "3", "4", "5"}
    assert "(KSampler, VAE Decode)" in str(guard_notices(canvas))
    file = checkpoints / (HOT + HEALTHY)
    away = file.rename(file.with_suffix(".away"))
    try:
        canvas.dispatch("onediff_guard.black", prompt=black["prompt"][1], node="6", problem="black")
        canvas.click(f"{OFFERED} button")
        canvas.wait_for_text("CheckpointLoaderSimple: Value not in list: ckpt_name: ")
    finally:
        away.rename(file)


def test_one_offer_covers_all_black_runs(canvas: browser.Canvas, server: legs.Server) -> None:
    """A queue may have many black runs. In App mode the offer hides nothing (see the screenshot)."""
    skip_without_providers(server)
    seeds = [11, 12, 13]
    for seed in seeds:
        canvas.set_widgets({"KSampler.seed": seed})
        run(canvas)
    assert canvas.count(OFFERED) == 1
    canvas.wait_for_text("3 runs came out black")
    canvas.picture("every_offer_of_three")
    canvas.evaluate(COMMAND, "Comfy.ToggleLinear")
    canvas.settle()
    canvas.picture("every_offer_in_app_mode")
    again = click_offer(canvas, server, 3)
    assert all(is_not_black(server, entry) for entry in again)
    assert [entry["prompt"][2]["6"]["inputs"]["seed"] for entry in again] == seeds


@pytest.mark.parametrize("why", ["dismissed", "switched off", "healthy run"])
def test_rerun_is_offered_only_for_new_black_runs_and_if_enabled(
    canvas: browser.Canvas, server: legs.Server, why: str
) -> None:
    skip_without_providers(server)
    if why == "switched off":
        canvas.click_switch(OFFER, "Offer a rerun")
        wait_until(lambda: server.ask("/settings").get(OFFER) is False, "the setting is not saved")
        canvas.press("Escape")
    if why == "healthy run":
        canvas.set_widgets({"CheckpointLoaderSimple.ckpt_name": HEALTHY})
    canvas.set_widgets({"KSampler.seed": 21})
    run(canvas)
    assert canvas.count(OFFERED) == (why == "dismissed")
    if why == "dismissed":
        canvas.click(f"{OFFERED} button >> nth=1")
        assert canvas.count(OFFERED) == 0
        canvas.set_widgets({"KSampler.seed": 22})
        run(canvas)
        canvas.wait_for_text("A result of this run")


@pytest.mark.parametrize("ends", ["error", "interrupt"])
def test_failed_or_interrupted_run_leaves_no_cache_provider(server: legs.Server, checkpoints: Path, ends: str) -> None:
    skip_without_providers(server)
    (checkpoints / "damaged.safetensors").write_bytes(b"no weights")
    changed = {"ckpt_name": "damaged.safetensors"} if ends == "error" else {"steps": 10_000}
    for name in (SWITCH, OFFER):
        server.ask(f"/settings/{name}", name == OFFER)
    prompt_id = server.ask("/prompt", {"prompt": api(**changed), "client_id": "a page"})["prompt_id"]
    if ends == "interrupt":
        wait_until(lambda: "Watch" in str(providers(server)), "no cache provider watches the outputs")
        wait_until(lambda: server.ask("/queue")["queue_running"], "nothing runs")
        server.ask("/interrupt", {})
    assert server.ended(prompt_id)["status"]["status_str"] == "error"
    assert providers(server) == []


def test_each_user_has_own_switch(leg: legs.Leg, checkpoints: Path, page: browser.Canvas, tmp_path: Path) -> None:
    with started(leg, tmp_path, checkpoints, "--multi-user") as server:
        for name in ("anna", "bert"):
            server.ask("/users", {"username": name})
        users = {name: id_ for id_, name in server.ask("/users")["users"].items()}
        for name in ("anna", "bert"):
            with page.page_of_user(server.url, users[name]) as canvas:
                load(canvas, api())
                if name == "anna":
                    canvas.click_switch(SWITCH, "Guard every workflow")
                    canvas.press("Escape")
                run(canvas)
                canvas.picture(f"every_of_{name}")
                assert is_not_black(server, entries(server)[-1]) is bool(guard_notices(canvas)) is (name == "anna")
                assert canvas.count(OFFERED) == (name == "bert" and leg.name != "b")
