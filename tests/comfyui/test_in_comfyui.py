"""The pack in a real ComfyUI, run by a script: `onediff-guard run --server`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import legs
import numpy as np
import pytest
from as_comfyui import api_node
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


def assert_is_not_black(ran: Ran) -> None:
    """Check that the run made one file of the right size that is not black: black decodes to a single colour."""
    assert ran.code == 0, ran.answer
    (file,) = ran.files
    frames = frames_of(file)
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert all(frame.std() > 2 for frame in frames), [float(frame.std()) for frame in frames]


def test_comfyui_lists_every_node(server: legs.Server) -> None:
    info = server.ask("/object_info")
    for name, node in NODE_CLASS_MAPPINGS.items():
        assert name in info
        assert info[name]["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[name]
        assert info[name]["category"].startswith("OneDiff Guard")
        assert set(info[name]["input"]["required"]) == set(node.INPUT_TYPES()["required"])
    models = info["OneDiffGuardLoadPipeline"]["input"]["required"]["model"][0]
    assert set(models) >= {HEALTHY, OVERFLOWING}


def test_comfyui_log_shows_successful_import(server: legs.Server) -> None:
    """tests/test_package.py checks that the import is quick."""
    found = re.search(rf"([\d.]+) seconds(.*): .*{legs.FOLDER}", server.log_text())
    assert found, server.tail()
    assert not found[2], found[0]  # "(IMPORT FAILED)"


def test_shipped_workflow_makes_video(run: Callable[..., Ran]) -> None:
    ran = run()
    assert_is_not_black(ran)
    assert ran.reports(), "sampler and decoder report to the history"
    setters = {switch["set_by"] for report in ran.reports() for switch in report["switches"]}
    assert "onediff-guard" in setters and "user" not in setters, "ComfyUI's own settings at import are not the user's"
    assert "Sample CogVideoX" in ran.stderr, "the websocket's progress"


def test_overflowing_fp16_run_is_not_black_and_needs_no_rerun(run: Callable[..., Ran]) -> None:
    for model in (OVERFLOWING, INSIDE):
        ran = run(LoadPipeline__model=model, LoadPipeline__precision="fp16", NaNGuard__scope="step")
        assert_is_not_black(ran)
        assert sum(report["reruns"] for report in ran.reports()) == 0


def test_new_seed_does_not_reload_encode_or_recompile(run: Callable[..., Ran], server: legs.Server) -> None:
    assert_is_not_black(run(LoadPipeline__backend="inductor", SampleCogVideoX__seed=1))
    counts_before = {text: server.count(text) for text in WORK}
    again = run(LoadPipeline__backend="inductor", SampleCogVideoX__seed=2)
    assert_is_not_black(again)
    assert counts_before["loading component"]
    assert counts_before["encoding prompt"]
    assert counts_before["compiling"]
    assert {text: server.count(text) for text in WORK} == counts_before


class Interrupting:
    """Requests an interrupt at a node's first progress message, and records the progress."""

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
    ("node", "changes"),
    [
        ("Sample CogVideoX", {"SampleCogVideoX.steps": 1000}),
        ("Decode Latents", {"SampleCogVideoX.steps": 1, "SampleCogVideoX.frames": 129, "DecodeLatents.tiling": True}),
    ],
)
def test_interrupt_ends_run_and_next_run_works(
    run: Callable[..., Ran], server: legs.Server, tmp_path: Path, node: str, changes: dict[str, Any]
) -> None:
    """In ComfyUI, the number of steps or decoder calls until the stop depends on when the request arrives. So
    tests/nodes/test_interrupt.py counts them, and this test only checks that the run does not finish."""
    run()
    known = set(server.history())
    settings = {"OneDiffGuardLoadPipeline.model": HEALTHY, "OneDiffGuardSampleCogVideoX.seed": 3, **SMALL}
    settings |= {f"OneDiffGuard{name}": value for name, value in changes.items()}
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
    assert interrupting.done[-1] < interrupting.total, "the node ran to its end"
    (prompt_id,) = set(server.history()) - known
    status = server.history()[prompt_id]["status"]
    assert status["status_str"] == "error"
    assert "execution_interrupted" in [name for name, _ in status["messages"]]
    assert_is_not_black(run(SampleCogVideoX__seed=4))


def test_free_request_unloads_every_component(run: Callable[..., Ran], server: legs.Server) -> None:
    run(SampleCogVideoX__seed=5)
    loaded = server.count("loading component")
    for attempt in range(5):  # 0.0.1 ignores a request that arrives while it cleans up after a run
        server.ask("/free", {"unload_models": True, "free_memory": True})
        assert_is_not_black(run(SampleCogVideoX__seed=60 + attempt))
        if server.count("loading component") > loaded:
            break
    assert server.count("loading component") == loaded + 3, "text encoder, denoiser and VAE were unloaded"


def test_invalid_size_is_rejected_before_loading(run: Callable[..., Ran], server: legs.Server) -> None:
    loaded = server.count("loading component")
    ran = run(SampleCogVideoX__width=90, LoadPipeline__model=OVERFLOWING, LoadPipeline__precision="fp32")
    assert ran.code == 2, ran.answer
    assert "Value 90 smaller than min of 16: use a multiple of 16, such as 80 or 96" in ran.answer["error"]
    assert server.count("loading component") == loaded


def test_missing_model_folder_is_named_in_error(run: Callable[..., Ran]) -> None:
    ran = run(LoadPipeline__model="no-such-model")
    assert ran.code == 4, ran.answer
    assert "no-such-model" in ran.answer["error"]


def test_probe_profile_in_same_graph_runs_without_reruns(run_graph: Callable[..., Ran], tmp_path: Path) -> None:
    size = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "steps": 2, "seed": 31}
    prompts = {"positive": ["encode", 0], "negative": ["encode", 1]}
    graph = {
        "load": api_node("LoadPipeline", model=INSIDE, precision="fp16", backend="eager", offload="none"),
        "encode": api_node("EncodePrompt", pipeline=["load", 0], prompt="a red kite"),
        "probe": api_node("NumericsProbe", pipeline=["load", 0], **size, **prompts),
        "guard": api_node("NaNGuard", pipeline=["load", 0], scope="learned", profile=["probe", 2]),
        "sample": api_node("SampleCogVideoX", pipeline=["guard", 0], **size, **prompts, scheduler="DDIM"),
        "decode": api_node("DecodeLatents", pipeline=["guard", 0], latents=["sample", 0], tiling=False),
        "frames": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "frame"}},
        "picture": {"class_type": "SaveImage", "inputs": {"images": ["probe", 0], "filename_prefix": "probe"}},
    }
    workflow = tmp_path / "probe.json"
    workflow.write_text(json.dumps(graph), encoding="utf-8")
    ran = run_graph(workflow)
    assert ran.code == 0, ran.answer
    (probed,) = ran.answer["outputs"]["probe"]["onediff_guard"]
    assert probed["plan"] == "bf16", "a CPU computes bf16 natively; fp16 is protected without a profile"
    assert [report["reruns"] for report in ran.reports()] == [0, 0, 0], "encoder, sampler, decoder"
    frames = [np.asarray(Image.open(file).convert("RGB")) for file in ran.files if file.name.startswith("frame")]
    assert len(frames) == FRAMES and all(frame.std() > 2 for frame in frames)
    (picture,) = (Image.open(file) for file in ran.files if file.name.startswith("probe"))
    assert picture.width > 800 and np.asarray(picture.convert("RGB")).std() > 20
