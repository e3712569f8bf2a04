"""ComfyUI lacks a function that the pack uses, or has changed it: the feature that needs it is off and reported, and
each run gives the guarded or the plain result.

One ComfyUI runs. hidden.py hides one function after the other from the pack.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfyui_surface
import legs
import numpy as np
import pytest
import shared_models
import torch
from comfyui_onediff_guard.comfyui_host.host import PROFILES_VARIABLE
from comfyui_surface import CALL, REPLACE, USES, WRAP
from native_graphs import GUARD
from runs import HEALTHY, SMALL, frames_of

pytestmark = pytest.mark.comfyui

HERE = Path(__file__).resolve().parent
NODES = f"""
import sys
sys.path += {[str(HERE / "inside"), str(HERE.parent / "support")]!r}
import hidden
from model_nodes import NODE_CLASS_MAPPINGS as MODELS
NODE_CLASS_MAPPINGS = MODELS | hidden.NODE_CLASS_MAPPINGS
hidden.add_routes()
"""
SAMPLING = {"seed": 1, "steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
BROKEN, CONTROLLED = "broken", "controlled"
STATES = ("healthy", "hot", BROKEN, CONTROLLED)
WAYS = ("wired", "every workflow")
MODULES = sorted({comfyui_surface.module_of(name) for name in USES})
CASES = [
    *(("missing", name) for name in USES),
    *(("changed", name) for name, use in USES.items() if use.how in (CALL, REPLACE, WRAP)),
    *(("gone", name) for name in MODULES),
]


UNREPORTED = {  # names whose loss has no visible effect, and modules that every ComfyUI has
    *("comfyui_version.__version__", "comfyui_version", "comfy.cli_args.parser", "comfy.model_prefetch"),
    *("comfy.model_base.BaseModel.model_config", "comfy.model_base.BaseModel.model_lowvram"),
    *("folder_paths", "server", "comfy.model_management"),
}
NOT_ON_CLASS = {"leg_b": {"comfy.controlnet.ControlNet.multigpu_clones"}}  # instance attributes: not on the class
KNOWN_AS = {  # name of a base class, or of a function that ComfyUI passes → name in the table
    "comfy.cldm.cldm.ControlNet.forward": "comfy.controlnet.ControlNet.control_model",
    "comfy.ldm.models.autoencoder.AutoencodingEngineLegacy.decode": "comfy.ldm.models.autoencoder.AutoencoderKL.decode",
    "comfy.ldm.modules.attention.attention_sub_quad": "comfy.ldm.modules.attention.attention_pytorch",
    "comfy.ldm.modules.attention.wrap_attn.<locals>.wrapper": "comfy.ldm.modules.attention.attention_pytorch",
}
REPORTED_AS = {"comfy.patcher_extension": "cannot wrap a MODEL"}  # reported with these words, not with its name
FILES = comfyui_surface.files()
HOST = {"host.py", "page_settings.py", "placement.py", "previews.py"}
IN_PIPELINES = {name for name, files in FILES.items() if HOST & {*files} and "lists of" not in USES[name].off}
MODULES_OF_PIPELINES = {comfyui_surface.module_of(name) for name in IN_PIPELINES} - {"folder_paths"}
USED_BY_BLACK_OUTPUT = {name for name, files in FILES.items() if "black_output.py" in files}


class Runs:
    """A ComfyUI, and the results of prompts in it."""

    def __init__(self, server: legs.Server):
        self.server = server
        self._salt = 0
        self.plain = self.run(guarded=False)
        self.guarded = self.run()
        self.frames = self.run_pipeline().astype(float)

    def run(self, *, guarded: bool = True, salt: int | None = None) -> dict[str, torch.Tensor]:
        """Run the prompt, and return the result of each branch."""
        self._salt += 1
        prompt = graph(self._salt if salt is None else salt, guarded=guarded)
        shutil.rmtree(self.server.base / "profiles", ignore_errors=True)
        shutil.rmtree(self.server.base / "output")
        (self.server.base / "output").mkdir()
        self._queue(prompt, onediff_guard=guarded)
        return {file.stem: torch.load(file) for file in (self.server.base / "output").glob("*.pt")}

    def run_pipeline(self) -> np.ndarray:
        """Load one of our pipelines again, and return its frames."""
        prompt: dict[str, Any] = json.loads(self.server.leg.workflow.read_text(encoding="utf-8"))
        for name, value in {"OneDiffGuardLoadPipeline.model": HEALTHY, **SMALL}.items():
            kind, field = name.split(".")
            for node in prompt.values():
                node["inputs"] |= {field: value} if node["class_type"] == kind else {}
        self.server.ask("/free", {"free_memory": True, "unload_models": True})  # takes effect after the next prompt
        self._queue({"1": {"class_type": "TestEmpty", "inputs": {}}})
        (saved,) = self.server.files_of(self._queue(prompt))
        return frames_of(saved)

    def _queue(self, prompt: dict[str, Any], **extra: Any) -> dict[str, Any]:
        entry = self.server.run(prompt, client_id="nobody", **extra)
        assert entry["status"]["status_str"] == "success", self.server.tail(80)
        return entry

    def hide(self, name: str, how: str = "", kind: str = "") -> str:
        return self.server.ask("/hidden", {"name": name, "how": how, "kind": kind})["why_not"]

    def was_accessed(self) -> bool:
        """Return whether the pack has accessed the hidden function."""
        return bool(self.server.ask("/hidden")["asked"])


def graph(salt: int, *, guarded: bool) -> dict[str, Any]:
    """A graph with healthy and overflowing MODELs and VAEs, each with a wired guard, and without one (inserted if
    guarded); and a healthy MODEL with an overflowing ControlNet."""
    made: dict[str, Any] = {}

    def add(kind: str, **inputs: Any) -> str:
        made[str(len(made) + 1)] = {"class_type": kind, "inputs": inputs}
        return str(len(made))

    for state in STATES:
        name = "sdxl" if state == BROKEN else "sd15"
        model = add("TestSmallModel", name=name, state="hot" if state == "hot" else "healthy")
        vae = add("TestSmallVAE", name="image", state="hot" if state == "hot" else "healthy")
        wires = {"model": [model, 0], "vae": [vae, 0], "latent": [vae, 1]}
        salted = add("TestSalted", **wires, salt=salt, broken=state == BROKEN)
        guards = {WAYS[1]: salted} if guarded else {"": salted}
        if guarded and state not in (BROKEN, CONTROLLED):  # a wired guard ends these runs
            guards[WAYS[0]] = add(GUARD, model=[salted, 0], vae=[salted, 1])
        for way, used in guards.items():
            text = [model, 1]
            if state == CONTROLLED:
                text = [add("TestControlled", conditioning=text, name=name, state="hot"), 0]
            wires = {"model": [used, 0], "positive": text, "negative": [model, 2], "latent_image": [model, 3]}
            branches = {
                "model": add("KSampler", **wires, **SAMPLING),
                "vae": add("VAEDecode", vae=[used, 1], samples=[salted, 2]),
            }
            for part, node in branches.items():
                add("TestKeep", made=[node, 0], file=f"{state} {part} {way}.pt")
    return made


@pytest.fixture(scope="module")
def runs(leg: legs.Leg, small_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("surface")
    legs.install_pack(folder / "custom_nodes")
    shared_models.copied(small_models, folder / "models")
    (folder / "custom_nodes" / "small_models.py").write_text(NODES, encoding="utf-8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(PROFILES_VARIABLE, str(folder / "profiles"))
        with legs.started(leg, folder) as server:
            yield Runs(server)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5))


@contextmanager
def hidden(runs: Runs, how: str, name: str) -> Iterator[None]:
    """Hide one function inside the context. If the pack accessed it, the log must report that it is missing."""
    before = len(runs.server.log_text())
    if name in NOT_ON_CLASS.get(runs.server.leg.id, ()):
        pytest.skip("not in this ComfyUI")
    if why := runs.hide(name, how, USES[name].how if name in USES else ""):
        pytest.skip(why)
    try:
        yield
        was_accessed = runs.was_accessed()
    finally:
        runs.hide("")
    words = REPORTED_AS.get(name, name.split(".")[-1])
    reported = [line for line in runs.server.log_text()[before:].splitlines() if words in line]
    print(f"\nSURFACE {how} {name}: {'accessed' if was_accessed else 'not accessed'}; {reported[:1]}")
    passed_on = how == "changed" and USES[name].how == REPLACE
    assert reported or not was_accessed or passed_on or name in UNREPORTED


@pytest.mark.parametrize(("how", "name"), CASES)
def test_run_with_hidden_function_equals_guarded_or_plain_run(runs: Runs, how: str, name: str) -> None:
    with hidden(runs, how, name):
        made = runs.run()
        if name in USED_BY_BLACK_OUTPUT:
            runs.run(guarded=False)
    for branch, rescued in runs.guarded.items():
        plain = runs.plain[" ".join(branch.split()[:2]) + " "]
        passed_on = how == "changed" and USES[name].how == REPLACE  # one more argument changes nothing
        assert same(made[branch], rescued) or (same(made[branch], plain) and not passed_on), branch


@pytest.mark.parametrize(("how", "name"), [case for case in CASES if case[1] in IN_PIPELINES | MODULES_OF_PIPELINES])
def test_pipeline_with_hidden_function_makes_similar_frames(runs: Runs, how: str, name: str) -> None:
    with hidden(runs, how, name):
        frames = runs.run_pipeline()
    assert np.abs(frames - runs.frames).mean() < runs.frames.std() / 4  # they depend on the memory address of a weight


def test_surface_table_lists_every_called_function(runs: Runs) -> None:
    """The interpreter's profiler lists every function of ComfyUI that the pack's code calls."""
    runs.run(salt=0)
    named = {re.sub(r"\.__(init|del)__$", "", name) for name in runs.server.ask("/hidden")["called"]}
    called = {KNOWN_AS.get(name, name) for name in named}
    assert {"comfy.patcher_extension.WrapperExecutor.__call__", "comfy.model_patcher.ModelPatcher.clone"} <= called
    assert sorted(called - USES.keys()) == []
