"""Guard every workflow, in a current ComfyUI: the shipped native workflows without their guards."""

from __future__ import annotations

import copy
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import browser
import families
import legs
import numpy as np
import pytest
import torch
from native_graphs import CASES, GUARD, GUARDED, HOT, SMALL, WORKFLOWS, Graph, graph
from runs import frames_of
from safetensors.torch import load_file, save_file
from waiting import wait_until

pytestmark = pytest.mark.comfyui

BROKEN = "broken_"  # checkpoints whose fp32 is non-finite too
SWITCHED_ON = {"onediff_guard": True}


@pytest.fixture(scope="module")
def server(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    """A ComfyUI in half precision, with checkpoints; these go when the tests are over, for their size."""
    folder = tmp_path_factory.mktemp("every_workflow")
    legs.install_pack(folder / "custom_nodes")
    families.write_inputs(folder / "input")
    checkpoints = folder / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for case in CASES.values():
        case.write(checkpoints / case.file, overflows=False)
        case.write(checkpoints / (HOT + case.file), overflows=True)
        weights = load_file(checkpoints / case.file)
        for name in ("model.diffusion_model.out.2.bias", "first_stage_model.decoder.conv_out.bias"):
            weights[name] = torch.full_like(weights[name], torch.nan)
        save_file(weights, checkpoints / (BROKEN + case.file))
    with legs.started(leg, folder, "--force-fp16", "--fp16-vae") as running:
        yield running
    shutil.rmtree(checkpoints)


@pytest.fixture(autouse=True)
def nothing_learned(server: legs.Server) -> None:
    shutil.rmtree(server.base / "user" / "onediff_guard" / "profiles", ignore_errors=True)


class Queued:
    """A prompt that was queued, and what came of it."""

    def __init__(self, server: legs.Server, prompt: Graph, extra: dict[str, Any] | None = None) -> None:
        before = len(server.log_text())
        answer = server.ask("/prompt", {"prompt": prompt, "extra_data": extra or {}})
        self.entry = server.ended(answer["prompt_id"])
        self.ended: str = self.entry["status"]["status_str"]
        self.log = server.log_text()[before:]
        self.files = [
            server.base / "output" / file["subfolder"] / file["filename"]
            for output in self.entry["outputs"].values()
            for file in output.get("images", [])
        ]

    @property
    def frames(self) -> np.ndarray:
        assert self.ended == "success", self.log[-4000:]
        (file,) = self.files
        return frames_of(file)

    @property
    def cached(self) -> set[str]:
        return {
            node
            for kind, told in self.entry["status"]["messages"]
            if kind == "execution_cached"
            for node in told["nodes"]
        }


def unguarded(name: str, **how: Any) -> Graph:
    return graph(name, half=True, without=GUARDED, **how)


def with_seed(prompt: Graph, seed: int) -> Graph:
    """Another seed: else the sampler is not run anew."""
    made = copy.deepcopy(prompt)
    for node in made.values():
        if "seed" in node["inputs"]:
            node["inputs"]["seed"] = seed
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_run_is_the_same_to_the_bit(server: legs.Server, name: str) -> None:
    off, on = Queued(server, unguarded(name)), Queued(server, unguarded(name), SWITCHED_ON)
    assert "Guard every workflow" not in off.log and "Guard every workflow: 2 guards" in on.log
    assert np.array_equal(off.frames, on.frames) and off.frames.std() > 2
    assert on.log.count(", 0 reruns") >= 2 and "NaN Guard: " not in off.log
    summaries = [text for output in on.entry["outputs"].values() for text in output.get("onediff_guard", [])]
    assert len(summaries) == 2 and "0 reruns" in str(summaries)


@pytest.mark.parametrize("name", CASES)
def test_an_overflowing_run_is_as_with_guards_wired_by_hand(server: legs.Server, name: str) -> None:
    off = Queued(server, unguarded(name, hot=True))
    by_hand = Queued(server, with_seed(graph(name, hot=True, half=True), 3))
    shutil.rmtree(server.base / "user" / "onediff_guard" / "profiles")
    on = Queued(server, with_seed(unguarded(name, hot=True), 3), SWITCHED_ON)
    assert off.frames.max() == 0
    assert np.array_equal(on.frames, by_hand.frames) and on.frames.std() > 2
    assert "2 steps, 1 rerun" in on.log


@pytest.mark.parametrize("name", CASES)
def test_the_same_prompt_again_is_cached(server: legs.Server, name: str) -> None:
    prompt = with_seed(unguarded(name), 4)
    Queued(server, prompt, SWITCHED_ON)
    again = Queued(server, prompt, SWITCHED_ON)
    assert again.cached >= prompt.keys() and "NaN Guard: " not in again.log


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_saved_ends_as_without_guards(server: legs.Server, name: str) -> None:
    prompt = unguarded(name)
    for node in prompt.values():
        if "ckpt_name" in node["inputs"]:
            node["inputs"]["ckpt_name"] = BROKEN + CASES[name].file
    off, on = Queued(server, prompt), Queued(server, with_seed(prompt, 5), SWITCHED_ON)
    assert off.frames.max() == on.frames.max() == 0
    assert "Not guarded from call 1 on" in on.log and "model.diffusion_model.out" not in off.log


def test_a_guard_that_was_wired_by_hand_wins(server: legs.Server) -> None:
    """Behind another node, too, which hands on what it is given."""
    prompt = with_seed(graph("native_sd15_text_to_image", hot=True, half=True), 6)
    (guard,) = (id_ for id_, node in prompt.items() if node["class_type"] == GUARD)
    for node in prompt.values():
        node["inputs"] |= {name: ["after", 0] for name, value in node["inputs"].items() if value == [guard, 0]}
    prompt["after"] = {"class_type": "ModelComputeDtype", "inputs": {"model": [guard, 0], "dtype": "fp16"}}
    prompt[guard]["inputs"]["on_failure"] = "stop"
    on = Queued(server, prompt, SWITCHED_ON)
    assert on.ended == "error" and "set to stop" in on.log


def test_each_user_of_a_server_has_their_own_switch(leg: legs.Leg, tmp_path: Path) -> None:
    """Nothing runs: what they queue is refused, since there is no such model."""
    legs.install_pack(tmp_path / "custom_nodes")
    prompt = unguarded(NAME)
    with legs.started(leg, tmp_path, "--multi-user") as server:

        def ask(path: str, body: Any, user: str) -> None:
            headers = {"Content-Type": "application/json", "comfy-user": user}
            request = urllib.request.Request(server.url + path, json.dumps(body).encode(), headers)
            with suppress(urllib.error.HTTPError), urllib.request.urlopen(request, timeout=60):
                pass

        for name in ("anna", "bert"):
            ask("/users", {"username": name}, "")
        users = {name: id_ for id_, name in server.ask("/users")["users"].items()}
        ask(f"/settings/{SWITCH}", True, users["anna"])
        guarded = {}
        for name in ("bert", "anna", "bert"):
            before = server.count("Guard every workflow: 2 guards")
            ask("/prompt", {"prompt": prompt}, users[name])
            guarded[name] = server.count("Guard every workflow: 2 guards") - before
        assert guarded == {"anna": 1, "bert": 0}, server.tail()


BYPASS = "type => app.graph.nodes.filter(node => node.type === type).forEach(node => (node.mode = 4))"
SAVED = "() => JSON.stringify(app.graph.serialize())"
NAME = "native_sd15_text_to_image"
SWITCH = "OneDiffGuard.EveryWorkflow"


@contextmanager
def opened(server: legs.Server, pictures: Path, checkpoint: str, **settings: Any) -> Iterator[browser.Canvas]:
    """A page with the shipped workflow, small, and without its guards."""
    if reason := browser.missing_browser():
        pytest.skip(reason)
    for name, value in {SWITCH: False, **settings}.items():
        server.ask(f"/settings/{name}", value)
    with browser.canvas(server.url, pictures) as canvas:
        canvas.load(json.loads((WORKFLOWS / f"{NAME}.json").read_text(encoding="utf-8")))
        canvas.set_widgets(
            {f"{node}.{key}": value for node in ("EmptyLatentImage", "KSampler") for key, value in SMALL.items()}
        )
        canvas.set_widgets({f"{CASES[NAME].loader}.ckpt_name": checkpoint})
        canvas.insert("ModelComputeDtype", before=GUARD, dtype="fp16")
        canvas.evaluate(BYPASS, GUARD)
        yield canvas
    server.ask(f"/settings/{SWITCH}", False)


def last_frames(server: legs.Server) -> np.ndarray:
    entry = max(server.history().values(), key=lambda entry: entry["prompt"][0])
    (file,) = (image for output in entry["outputs"].values() for image in output.get("images", []))
    return frames_of(server.base / "output" / file["subfolder"] / file["filename"])


def test_a_healthy_run_leaves_the_page_as_it_was(server: legs.Server, pictures: Path) -> None:
    with opened(server, pictures, CASES[NAME].file) as canvas:
        canvas.set_widgets({"KSampler.control_after_generate": "fixed"})
        saved, notices = [], []
        for switch in (False, True):
            server.ask(f"/settings/{SWITCH}", switch)
            logged = len(server.log_text())
            end, detail = canvas.queue(seconds=240)
            assert end == "execution_success", detail
            saved.append(canvas.evaluate(SAVED))
            notices.append(canvas.notices())
        canvas.picture("healthy_with_switch")
    assert "Guard every workflow: 2 guards" in server.log_text()[logged:]
    assert saved[0] == saved[1] and notices[0] == notices[1]


def test_what_was_saved_is_told_where_it_happened(server: legs.Server, pictures: Path) -> None:
    with opened(server, pictures, HOT + CASES[NAME].file, **{SWITCH: True}) as canvas:
        end, detail = canvas.queue(seconds=240)
        assert end == "execution_success", detail
        canvas.picture("saved_with_switch")
        told = {node: " ".join(map(str, canvas.widgets(node).values())) for node in ("KSampler", "VAEDecode")}
        assert "1 rerun" in told["KSampler"] and "1 rerun" in told["VAEDecode"]
        assert any("NaN Guard" in notice for notice in canvas.notices())
        canvas.set_widgets({f"{CASES[NAME].loader}.ckpt_name": CASES[NAME].file})
        end, detail = canvas.queue(seconds=240)
        assert end == "execution_success", detail
        canvas.picture("healthy_after_saved")
        told = {node: " ".join(map(str, canvas.widgets(node).values())) for node in ("KSampler", "VAEDecode")}
        assert "rerun" not in told["KSampler"] and "rerun" not in told["VAEDecode"], "of the run before"
    assert last_frames(server).std() > 2


def test_what_came_out_black_is_run_again_at_a_click(server: legs.Server, pictures: Path) -> None:
    if server.leg.name == "b":
        pytest.skip("ComfyUI 0.3.64 shows nobody what nodes put out")
    with opened(server, pictures, HOT + CASES[NAME].file) as canvas:
        end, detail = canvas.queue(seconds=240)
        assert end == "execution_success", detail
        assert last_frames(server).max() == 0
        canvas.wait_for_text("Guard and run again")
        canvas.picture("black_offer")
        before = len(server.history())
        canvas.click("#onediff-guard-offer button")
        wait_until(lambda: len(server.history()) > before, lambda: f"nothing was run again:\n{server.tail()}")
        canvas.settle()
        canvas.picture("black_run_again")
        assert canvas.count("#onediff-guard-offer") == 0
    assert last_frames(server).std() > 2
