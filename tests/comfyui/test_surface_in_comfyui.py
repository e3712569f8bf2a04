"""A ComfyUI that lacks a function that the pack uses, or has another one: what needs it is off and says so, and each
run comes to what it comes to without the pack.

One ComfyUI runs; hidden.py hides one function after the other from the pack alone.
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


UNSAID = {  # where nothing is lost but a word, and modules without which a process is no ComfyUI
    *("comfyui_version.__version__", "comfyui_version", "comfy.cli_args.parser", "comfy.model_prefetch"),
    *("comfy.model_base.BaseModel.model_config", "comfy.model_base.BaseModel.model_lowvram"),
    *("folder_paths", "server", "comfy.model_management"),
}
LACKS = {"leg_b": {"comfy.controlnet.ControlNet.multigpu_clones"}}  # of objects: no class has them
KNOWN_AS = {  # a base class's; and what ComfyUI hands us to call
    "comfy.cldm.cldm.ControlNet.forward": "comfy.controlnet.ControlNet.control_model",
    "comfy.ldm.models.autoencoder.AutoencodingEngineLegacy.decode": "comfy.ldm.models.autoencoder.AutoencoderKL.decode",
    "comfy.ldm.modules.attention.attention_sub_quad": "comfy.ldm.modules.attention.attention_pytorch",
    "comfy.ldm.modules.attention.wrap_attn.<locals>.wrapper": "comfy.ldm.modules.attention.attention_pytorch",
}
SAID = {"comfy.patcher_extension": "cannot wrap a MODEL"}  # in other words than its name
FILES = comfyui_surface.files()
HOST = {"host.py", "page_settings.py", "placement.py", "previews.py"}
IN_PIPELINES = {name for name, files in FILES.items() if HOST & {*files} and "lists of" not in USES[name].off}
MODULES_OF_PIPELINES = {comfyui_surface.module_of(name) for name in IN_PIPELINES} - {"folder_paths"}
LOOKED_AT = {name for name, files in FILES.items() if "black_output.py" in files}


class Runs:
    """A ComfyUI, and what comes of a prompt in it."""

    def __init__(self, server: legs.Server):
        self.server = server
        self._salt = 0
        self.plain = self.run(guarded=False)
        self.guarded = self.run()
        self.frames = self.run_pipeline().astype(float)

    def run(self, *, guarded: bool = True, salt: int | None = None) -> dict[str, torch.Tensor]:
        """What each branch comes to."""
        self._salt += 1
        prompt = graph(self._salt if salt is None else salt, guarded=guarded)
        shutil.rmtree(self.server.base / "profiles", ignore_errors=True)
        shutil.rmtree(self.server.base / "output")
        (self.server.base / "output").mkdir()
        self._queue(prompt, onediff_guard=guarded)
        return {file.stem: torch.load(file) for file in (self.server.base / "output").glob("*.pt")}

    def run_pipeline(self) -> np.ndarray:
        """The frames of a pipeline of ours, loaded anew."""
        prompt: dict[str, Any] = json.loads(self.server.leg.workflow.read_text(encoding="utf-8"))
        for name, value in {"OneDiffGuardLoadPipeline.model": HEALTHY, **SMALL}.items():
            kind, field = name.split(".")
            for node in prompt.values():
                node["inputs"] |= {field: value} if node["class_type"] == kind else {}
        self.server.ask("/free", {"free_memory": True, "unload_models": True})  # at the latest behind the next one
        self._queue({"1": {"class_type": "TestEmpty", "inputs": {}}})
        (saved,) = self.server.files_of(self._queue(prompt))
        return frames_of(saved)

    def _queue(self, prompt: dict[str, Any], **extra: Any) -> dict[str, Any]:
        entry = self.server.run(prompt, client_id="nobody", **extra)
        assert entry["status"]["status_str"] == "success", self.server.tail(80)
        return entry

    def hide(self, name: str, how: str = "", kind: str = "") -> str:
        return self.server.ask("/hidden", {"name": name, "how": how, "kind": kind})["why_not"]

    def asked(self) -> bool:
        """Whether the pack has asked for what is hidden."""
        return bool(self.server.ask("/hidden")["asked"])


def graph(salt: int, *, guarded: bool) -> dict[str, Any]:
    """A healthy and an overflowing MODEL and VAE, each with a guard that is wired, and with none: it gets one where the
    prompt says that it is guarded. And an overflowing ControlNet of a healthy MODEL."""
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
        if guarded and state not in (BROKEN, CONTROLLED):  # which a wired guard ends
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
    """One is hidden inside. Whatever the pack asked for meanwhile, it has to have said that it is not there."""
    before = len(runs.server.log_text())
    if name in LACKS.get(runs.server.leg.id, ()):
        pytest.skip("not in this ComfyUI")
    if why := runs.hide(name, how, USES[name].how if name in USES else ""):
        pytest.skip(why)
    try:
        yield
        asked = runs.asked()
    finally:
        runs.hide("")
    words = SAID.get(name, name.split(".")[-1])
    said = [line for line in runs.server.log_text()[before:].splitlines() if words in line]
    print(f"\nSURFACE {how} {name}: {'asked' if asked else 'not asked'}; {said[:1]}")
    handed_on = how == "changed" and USES[name].how == REPLACE
    assert said or not asked or handed_on or name in UNSAID


@pytest.mark.parametrize(("how", "name"), CASES)
def test_a_guarded_run_comes_to_what_it_comes_to_without_the_pack_or_as_it_is(runs: Runs, how: str, name: str) -> None:
    with hidden(runs, how, name):
        made = runs.run()
        if name in LOOKED_AT:
            runs.run(guarded=False)
    for branch, rescued in runs.guarded.items():
        plain = runs.plain[" ".join(branch.split()[:2]) + " "]
        handed_on = how == "changed" and USES[name].how == REPLACE  # one argument more changes nothing
        assert same(made[branch], rescued) or (same(made[branch], plain) and not handed_on), branch


@pytest.mark.parametrize(("how", "name"), [case for case in CASES if case[1] in IN_PIPELINES | MODULES_OF_PIPELINES])
def test_a_pipeline_makes_its_frames(runs: Runs, how: str, name: str) -> None:
    with hidden(runs, how, name):
        frames = runs.run_pipeline()
    assert np.abs(frames - runs.frames).mean() < runs.frames.std() / 4  # they hang on where in memory a weight lies


def test_the_table_has_every_function_that_is_called(runs: Runs) -> None:
    """As the interpreter sees it: whatever of ComfyUI's is called from the pack's own code."""
    runs.run(salt=0)
    named = {re.sub(r"\.__(init|del)__$", "", name) for name in runs.server.ask("/hidden")["called"]}
    called = {KNOWN_AS.get(name, name) for name in named}
    assert {"comfy.patcher_extension.WrapperExecutor.__call__", "comfy.model_patcher.ModelPatcher.clone"} <= called
    assert sorted(called - USES.keys()) == []
