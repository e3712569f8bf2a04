"""The pack in a real ComfyUI, driven as a script would drive it: `onediff-guard run --server`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legs
import numpy as np
import pytest
from as_comfyui import as_json
from comfyui_onediff_guard.headless.errors import InterruptedRunError
from comfyui_onediff_guard.headless.hosts.result import RunProgress
from comfyui_onediff_guard.headless.server.follow import run_on_server
from comfyui_onediff_guard.headless.workflow.settings import Setting
from comfyui_onediff_guard.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from PIL import Image
from runs import HEALTHY, INSIDE, OVERFLOWING, SMALL, Ran, frames_of

pytestmark = pytest.mark.comfyui

FRAMES, HEIGHT, WIDTH = 9, 64, 96
WORK = ("loading component", "encoding prompt", "compiling", "Recompiling")  # lines of the log; the last is dynamo's


def assert_is_a_picture(ran: Ran) -> None:
    """One file, whole, and not black: a black video decodes to zeros, or to one colour."""
    assert ran.code == 0, ran.answer
    (file,) = ran.files
    frames = frames_of(file)
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert all(frame.std() > 2 for frame in frames), [float(frame.std()) for frame in frames]


def test_every_node_is_known_to_comfyui(server: legs.Server) -> None:
    info = server.ask("/object_info")
    for name, node in NODE_CLASS_MAPPINGS.items():
        assert name in info
        assert info[name]["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[name]
        assert info[name]["category"].startswith("OneDiff Guard")
        assert set(info[name]["input"]["required"]) == set(node.INPUT_TYPES()["required"])
    models = info["OneDiffGuardLoadPipeline"]["input"]["required"]["model"][0]
    assert set(models) >= {HEALTHY, OVERFLOWING}


def test_comfyui_says_that_it_could_import_the_pack(server: legs.Server) -> None:
    """That this is quick, tests/test_package.py holds: by what is imported and opened."""
    found = re.search(rf"([\d.]+) seconds(.*): .*{legs.FOLDER}", server.log_text())
    assert found, server.tail()
    assert not found[2], found[0]  # "(IMPORT FAILED)"


def test_the_shipped_workflow_makes_a_video(run: Callable[..., Ran]) -> None:
    ran = run()
    assert_is_a_picture(ran)
    assert ran.reports(), "sampler and decoder report to the history"
    setters = {switch["set_by"] for report in ran.reports() for switch in report["switches"]}
    assert "onediff-guard" in setters and "user" not in setters, "what ComfyUI sets at import is nobody's"
    assert "Sample CogVideoX" in ran.stderr, "the websocket's progress"


def test_fp16_that_overflows_is_not_black(run: Callable[..., Ran]) -> None:
    for model in (OVERFLOWING, INSIDE):
        ran = run(LoadPipeline__model=model, LoadPipeline__precision="fp16", NaNGuard__scope="step")
        assert_is_a_picture(ran)
        assert sum(report["reruns"] for report in ran.reports()) == 0


def test_another_seed_repeats_no_work_that_is_done(run: Callable[..., Ran], server: legs.Server) -> None:
    assert_is_a_picture(run(LoadPipeline__backend="inductor", SampleCogVideoX__seed=1))
    before = {text: server.count(text) for text in WORK}
    again = run(LoadPipeline__backend="inductor", SampleCogVideoX__seed=2)
    assert_is_a_picture(again)
    assert before["loading component"]
    assert before["encoding prompt"]
    assert before["compiling"]
    assert {text: server.count(text) for text in WORK} == before


class Interrupting:
    """Asks for an interrupt as soon as a node says how far it is, and remembers what it says."""

    def __init__(self, server: legs.Server, node: str):
        self.server, self.node = server, node
        self.done: list[float] = []
        self.total = 0.0

    def __call__(self, progress: RunProgress) -> None:
        if self.node in progress.node and progress.value is not None:
            self.done.append(progress.value)
            self.total = progress.maximum or 0.0
            if len(self.done) == 1:
                self.server.ask("/interrupt", {})


@pytest.mark.parametrize(
    ("node", "long"),
    [
        ("Sample CogVideoX", {"SampleCogVideoX.steps": 1000}),
        ("Decode Latents", {"SampleCogVideoX.steps": 1, "SampleCogVideoX.frames": 129, "DecodeLatents.tiling": True}),
    ],
)
def test_an_interrupt_ends_the_run_and_the_next_one_works(
    run: Callable[..., Ran], server: legs.Server, tmp_path: Path, node: str, long: dict[str, Any]
) -> None:
    """Within one step or call of the decoder: how many it is in ComfyUI depends on how soon the request is heard, so
    that is counted without it (tests/nodes/test_interrupt.py). Here it is not all of many."""
    run()
    known = set(server.history())
    settings = {"OneDiffGuardLoadPipeline.model": HEALTHY, "OneDiffGuardSampleCogVideoX.seed": 3, **SMALL}
    settings |= {f"OneDiffGuard{name}": value for name, value in long.items()}
    interrupting = Interrupting(server, node)
    with pytest.raises(InterruptedRunError):
        run_on_server(
            json.loads(server.leg.workflow.read_text(encoding="utf-8")),
            url=server.url,
            output_dir=tmp_path,
            changes=[Setting.parse(f"{name}={json.dumps(value)}") for name, value in settings.items()],
            on_progress=interrupting,
        )
    assert interrupting.total > 50
    assert interrupting.done[-1] < interrupting.total, "it came to its end"
    (prompt_id,) = set(server.history()) - known
    status = server.history()[prompt_id]["status"]
    assert status["status_str"] == "error"
    assert "execution_interrupted" in [name for name, _ in status["messages"]]
    assert_is_a_picture(run(SampleCogVideoX__seed=4))


def test_free_gives_everything_back(run: Callable[..., Ran], server: legs.Server) -> None:
    run(SampleCogVideoX__seed=5)
    loaded = server.count("loading component")
    for attempt in range(5):  # 0.0.1 forgets a request that comes while it still tidies up after a run
        server.ask("/free", {"unload_models": True, "free_memory": True})
        assert_is_a_picture(run(SampleCogVideoX__seed=60 + attempt))
        if server.count("loading component") > loaded:
            break
    assert server.count("loading component") == loaded + 3, "text encoder, denoiser and VAE were let go"


def test_wrong_sizes_are_refused_before_anything_loads(run: Callable[..., Ran], server: legs.Server) -> None:
    loaded = server.count("loading component")
    ran = run(SampleCogVideoX__width=90, LoadPipeline__model=OVERFLOWING, LoadPipeline__precision="fp32")
    assert ran.code == 2, ran.answer
    assert "Value 90 smaller than min of 16: use a multiple of 16, such as 80 or 96" in ran.answer["error"]
    assert server.count("loading component") == loaded


def test_a_folder_that_is_not_there_is_named(run: Callable[..., Ran]) -> None:
    ran = run(LoadPipeline__model="no-such-model")
    assert ran.code == 4, ran.answer
    assert "no-such-model" in ran.answer["error"]


def test_the_probe_and_its_profile_in_one_graph(run_graph: Callable[..., Ran], tmp_path: Path) -> None:
    size = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "steps": 2, "seed": 31}
    prompts = {"positive": ["encode", 0], "negative": ["encode", 1]}
    graph = {
        "load": as_json("LoadPipeline", model=INSIDE, precision="fp16", backend="eager", offload="none"),
        "encode": as_json("EncodePrompt", pipeline=["load", 0], prompt="a red kite"),
        "probe": as_json("NumericsProbe", pipeline=["load", 0], **size, **prompts),
        "guard": as_json("NaNGuard", pipeline=["load", 0], scope="learned", profile=["probe", 2]),
        "sample": as_json("SampleCogVideoX", pipeline=["guard", 0], **size, **prompts, scheduler="DDIM"),
        "decode": as_json("DecodeLatents", pipeline=["guard", 0], latents=["sample", 0], tiling=False),
        "frames": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "frame"}},
        "picture": {"class_type": "SaveImage", "inputs": {"images": ["probe", 0], "filename_prefix": "probe"}},
    }
    workflow = tmp_path / "probe.json"
    workflow.write_text(json.dumps(graph), encoding="utf-8")
    ran = run_graph(workflow)
    assert ran.code == 0, ran.answer
    (probed,) = ran.answer["outputs"]["probe"]["onediff_guard"]
    assert probed["plan"] == "bf16", "which a CPU computes natively; fp16 is protected without a profile"
    assert [report["reruns"] for report in ran.reports()] == [0, 0, 0], "encoder, sampler, decoder"
    frames = [np.asarray(Image.open(file).convert("RGB")) for file in ran.files if file.name.startswith("frame")]
    assert len(frames) == FRAMES and all(frame.std() > 2 for frame in frames)
    (picture,) = (Image.open(file) for file in ran.files if file.name.startswith("probe"))
    assert picture.width > 800 and np.asarray(picture.convert("RGB")).std() > 20
