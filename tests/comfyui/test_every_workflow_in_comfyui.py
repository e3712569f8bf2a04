"""Guard every workflow in a current ComfyUI, on the shipped SD 1.5 workflow without its guards."""

from __future__ import annotations

import copy
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import families
import legs
import numpy as np
import pytest
import torch
from native_checkpoints import write_sd15
from native_graphs import FILE, GUARD, GUARDED, HOT, Graph, graph
from runs import frames_of
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfyui

SWITCH = "OneDiffGuard.EveryWorkflow"
BROKEN = "broken_"  # the prefix of a checkpoint that is NaN in fp32 too
SWITCHED_ON = {"onediff_guard": True}


@pytest.fixture(scope="module")
def server(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[legs.Server]:
    """A ComfyUI in half precision, with checkpoints. They are large, so they are deleted after the tests."""
    folder = tmp_path_factory.mktemp("every_workflow")
    legs.install_pack(folder / "custom_nodes")
    families.write_inputs(folder / "input")
    checkpoints = folder / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    write_sd15(checkpoints / FILE, overflows=False)
    write_sd15(checkpoints / (HOT + FILE), overflows=True)
    weights = load_file(checkpoints / FILE)
    for name in ("model.diffusion_model.out.2.bias", "first_stage_model.decoder.conv_out.bias"):
        weights[name] = torch.full_like(weights[name], torch.nan)
    save_file(weights, checkpoints / (BROKEN + FILE))
    with legs.started(leg, folder, "--force-fp16", "--fp16-vae") as running:
        yield running
    shutil.rmtree(checkpoints)


@pytest.fixture(autouse=True)
def nothing_learned(server: legs.Server) -> None:
    server.forget()


class Queued:
    """A prompt that was queued, and its result."""

    def __init__(self, server: legs.Server, prompt: Graph, extra: dict[str, Any] | None = None) -> None:
        before = len(server.log_text())
        self.entry = server.run(prompt, **extra or {})
        self.ended: str = self.entry["status"]["status_str"]
        self.log = server.log_text()[before:]
        self.files = server.files_of(self.entry)

    @property
    def frames(self) -> np.ndarray:
        assert self.ended == "success", self.log[-4000:]
        (file,) = self.files
        return frames_of(file)

    @property
    def cached(self) -> set[str]:
        return {
            node
            for kind, data in self.entry["status"]["messages"]
            if kind == "execution_cached"
            for node in data["nodes"]
        }


def unguarded(**options: Any) -> Graph:
    return graph(half=True, without=GUARDED, **options)


def with_seed(prompt: Graph, seed: int) -> Graph:
    """The prompt with another seed: otherwise ComfyUI uses the sampler's cached result."""
    made = copy.deepcopy(prompt)
    for node in made.values():
        if "seed" in node["inputs"]:
            node["inputs"]["seed"] = seed
    return made


def test_healthy_run_is_bit_equal_with_switch_on(server: legs.Server) -> None:
    off, on = Queued(server, unguarded()), Queued(server, unguarded(), SWITCHED_ON)
    again = Queued(server, with_seed(unguarded(), 2), SWITCHED_ON)
    assert "Guard every workflow" not in off.log and "Guard every workflow: added 2 guards" in on.log
    assert np.array_equal(off.frames, on.frames) and off.frames.std() > 2
    assert on.log.count(", all fine.") >= 1 and on.log.count(" fine.") >= 2 and "NaN Guard: " not in off.log
    for run in (on, again):  # the guards of the second run are cached
        texts = server.ended(run.entry["prompt"][1])["prompt"][3]["onediff_guard_summaries"]
        assert len(texts) == run.log.count("NaN Guard: ") >= 2 and all(text in run.log for text in texts), texts


def test_overflowing_run_is_bit_equal_to_run_with_wired_guards(server: legs.Server) -> None:
    off = Queued(server, unguarded(hot=True))
    by_hand = Queued(server, with_seed(graph(hot=True, half=True), 3))
    server.forget()
    on = Queued(server, with_seed(unguarded(hot=True), 3), SWITCHED_ON)
    assert off.frames.max() == 0
    assert np.array_equal(on.frames, by_hand.frames) and on.frames.std() > 2
    assert "2 steps, 1 recomputed in fp32" in on.log


def test_repeated_prompt_is_cached(server: legs.Server) -> None:
    prompt = with_seed(unguarded(), 4)
    Queued(server, prompt, SWITCHED_ON)
    again = Queued(server, prompt, SWITCHED_ON)
    assert again.cached >= prompt.keys() and "NaN Guard: " not in again.log


def test_run_broken_in_fp32_too_ends_as_without_guards(server: legs.Server) -> None:
    prompt = unguarded()
    for node in prompt.values():
        if "ckpt_name" in node["inputs"]:
            node["inputs"]["ckpt_name"] = BROKEN + FILE
    off, on = Queued(server, prompt), Queued(server, with_seed(prompt, 5), SWITCHED_ON)
    assert off.frames.max() == on.frames.max() == 0
    assert "Not guarded from call 1 on" in on.log and "model.diffusion_model.out" not in off.log


def test_wired_guard_takes_precedence_over_switch(server: legs.Server) -> None:
    """The wired guard also counts if another node is between it and the sampler."""
    prompt = with_seed(graph(hot=True, half=True), 6)
    (guard,) = (id_ for id_, node in prompt.items() if node["class_type"] == GUARD)
    for node in prompt.values():
        node["inputs"] |= {name: ["after", 0] for name, value in node["inputs"].items() if value == [guard, 0]}
    prompt["after"] = {"class_type": "ModelComputeDtype", "inputs": {"model": [guard, 0], "dtype": "fp16"}}
    prompt[guard]["inputs"]["on_failure"] = "stop"
    on = Queued(server, prompt, SWITCHED_ON)
    assert on.ended == "error" and "set to 'stop'" in on.log


def test_each_user_of_server_has_own_switch(leg: legs.Leg, tmp_path: Path) -> None:
    """Nothing runs: the prompts are rejected, since the model is missing."""
    legs.install_pack(tmp_path / "custom_nodes")
    prompt = unguarded()
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
            before = server.count("Guard every workflow: added 2 guards")
            ask("/prompt", {"prompt": prompt}, users[name])
            guarded[name] = server.count("Guard every workflow: added 2 guards") - before
        assert guarded == {"anna": 1, "bert": 0}, server.tail()
