"""The shipped workflows for ComfyUI's own models, run in a current ComfyUI on checkpoints that its loaders take.

On a CPU ComfyUI computes in fp32 whatever its flags say: `--fp16-vae` holds for the VAE alone. So the graphs get its
own ModelComputeDtype. A healthy and an overflowing checkpoint of each model, 2 steps, 16×16 pixels.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import browser
import comfyui_nodes
import families
import legs
import native_checkpoints
import numpy as np
import pytest
from comfyui_onediff_guard.headless import schema
from runs import finish, frames_of, start

pytestmark = pytest.mark.comfyui

WORKFLOWS = legs.ROOT / "workflows"
GUARDS = ("OneDiffGuardNaNGuardModel", "OneDiffGuardNaNGuardVAE")
SMALL = {"width": 16, "height": 16, "video_frames": 2, "steps": 2}
HOT = "overflowing_"
HALF = ("--force-fp16", "--fp16-vae")
TOLERANCE = 2e-2  # of the pixels' range
Graph = dict[str, Any]


@dataclass(frozen=True)
class Case:
    file: str  # in models/checkpoints, and in the workflow
    loader: str
    model: str  # ComfyUI's class, as the report names it
    vae: str
    size: tuple[int, int, int]  # frames, height, width
    write: Callable[..., None]


CASES = {
    "native_sd15_text_to_image": Case(
        comfyui_nodes.SD15_FILE,
        "CheckpointLoaderSimple",
        "SD15",
        "AutoencoderKL",
        (1, 16, 16),
        native_checkpoints.write_sd15,
    ),
    "native_svd_image_to_video": Case(
        comfyui_nodes.SVD_FILE,
        "ImageOnlyCheckpointLoader",
        "SVD_img2vid",
        "AutoencodingEngine",
        (2, 16, 16),
        native_checkpoints.write_svd,
    ),
}


@dataclass(frozen=True)
class Made:
    frames: np.ndarray  # [frames, height, width, 3], uint8
    reports: list[str]  # the guards' lines in ComfyUI's log

    def report(self, start: str) -> str:
        (found,) = [line for line in self.reports if line.startswith(start)]
        return found


@pytest.fixture(scope="module")
def leg() -> legs.Leg:
    found = legs.leg_b()
    if found.missing:
        pytest.skip(found.missing)
    return found


@pytest.fixture(scope="module")
def base(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ComfyUI's folder with pack, picture and checkpoints; these go when the tests are over, for their size."""
    folder = tmp_path_factory.mktemp("native_workflows")
    legs.install_pack(folder / "custom_nodes")
    families.write_inputs(folder / "input")
    checkpoints = folder / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for case in CASES.values():
        case.write(checkpoints / case.file, overflows=False)
        case.write(checkpoints / (HOT + case.file), overflows=True)
    yield folder
    shutil.rmtree(checkpoints)


@pytest.fixture(scope="module")
def in_fp32(leg: legs.Leg, base: Path) -> dict[str, Made]:
    """What the overflowing checkpoints make where nothing is in half precision."""
    with legs.started(leg, base) as server:
        return {name: make(server, graph(name, hot=True)) for name in CASES}


@pytest.fixture(scope="module")
def server(leg: legs.Leg, base: Path, in_fp32: dict[str, Made]) -> Iterator[legs.Server]:
    """In half precision, and after the other: two of them want too much memory."""
    with legs.started(leg, base, *HALF) as running:
        yield running


def graph(name: str, *, hot: bool = False, half: bool = False, guarded: bool = True) -> Graph:
    """The shipped API file, small."""
    found: Graph = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    case = CASES[name]
    for node in found.values():
        node["inputs"] |= {key: value for key, value in SMALL.items() if key in node["inputs"]}
    (loader,) = [id_ for id_, node in found.items() if node["class_type"] == case.loader]
    found[loader]["inputs"]["ckpt_name"] = HOT * hot + case.file
    if half:
        _relink(found, [loader, 0], ["half", 0])
        found["half"] = {"class_type": "ModelComputeDtype", "inputs": {"model": [loader, 0], "dtype": "fp16"}}
    for id_ in [] if guarded else [id_ for id_, node in found.items() if node["class_type"] in GUARDS]:
        inputs = found.pop(id_)["inputs"]
        _relink(found, [id_, 0], inputs.get("model") or inputs["vae"])
    return found


def _relink(graph: Graph, old: list[Any], new: list[Any]) -> None:
    for node in graph.values():
        node["inputs"] |= {name: new for name, value in node["inputs"].items() if value == old}


def make(server: legs.Server, graph: Graph) -> Made:
    before = len(server.log_text())
    file = server.base / "workflow.json"
    file.write_text(json.dumps(graph), encoding="utf-8")
    ran = finish(start(server, file, server.base), server)
    assert ran.code == 0, (ran.answer, server.tail())
    (saved,) = ran.files
    said = server.log_text()[before:].splitlines()
    return Made(frames_of(saved), [line.split("NaN Guard: ", 1)[1] for line in said if "NaN Guard: " in line])


def test_the_stand_ins_of_other_tests_are_comfyuis_nodes(server: legs.Server) -> None:
    """What tests/workflows takes the shipped files by is what ComfyUI says of its nodes."""
    known = server.ask("/object_info")
    for name, node in comfyui_nodes.NODE_CLASS_MAPPINGS.items():
        ours, theirs = schema.from_class(name, node), schema.from_object_info(name, known[name])
        assert (list(ours.inputs), ours.outputs) == (list(theirs.inputs), theirs.outputs), name
        for key, spec in ours.inputs.items():
            real = theirs.inputs[key]
            assert (spec.type, spec.required) == (real.type, real.required), f"{name}.{key}"
            assert {limit: real.config.get(limit) for limit in spec.config} == dict(spec.config), f"{name}.{key}"
            if key not in {"ckpt_name", "file"}:
                assert spec.options == real.options[: len(spec.options)], f"{name}.{key}"


@pytest.mark.parametrize("name", CASES)
def test_a_healthy_run_is_the_same_with_and_without_the_guards(server: legs.Server, name: str) -> None:
    case = CASES[name]
    plain = make(server, graph(name, half=True, guarded=False))
    guarded = make(server, graph(name, half=True))
    assert guarded.frames.shape == (*case.size, 3)
    assert all(frame.std() > 2 for frame in guarded.frames)
    assert np.array_equal(plain.frames, guarded.frames)
    assert not plain.reports
    assert "2 steps, 0 reruns" in guarded.report(f"{case.model} computes in fp16")
    assert "1 call, 0 reruns" in guarded.report(f"VAE decoder: {case.vae} computes in fp16")


@pytest.mark.parametrize("name", CASES)
def test_an_overflowing_model_is_black_without_the_guards_and_right_with_them(
    server: legs.Server, in_fp32: dict[str, Made], name: str
) -> None:
    case = CASES[name]
    plain = make(server, graph(name, hot=True, half=True, guarded=False))
    guarded = make(server, graph(name, hot=True, half=True))
    right = in_fp32[name]
    assert guarded.frames.shape == right.frames.shape == (*case.size, 3)
    assert plain.frames.max() == 0  # of as many frames as differ: an animated WEBP keeps one of equal ones
    assert all(frame.std() > 2 for frame in right.frames)
    difference = np.abs(guarded.frames.astype(int) - right.frames).max() / 255
    print(f"{name}: largest difference {difference:.4f}")
    assert difference <= TOLERANCE
    assert "2 steps, 2 reruns" in guarded.report(f"{case.model} computes in fp16")
    assert "1 call, 1 rerun" in guarded.report(f"VAE decoder: {case.vae} computes in fp16")
    assert "computes in fp32" in right.report(case.model)


@pytest.mark.parametrize("name", CASES)
def test_the_page_runs_it_and_shows_each_report_on_its_guard(server: legs.Server, pictures: Path, name: str) -> None:
    if reason := browser.missing_browser():
        pytest.skip(reason)
    case = CASES[name]
    with browser.canvas(server.url, pictures) as canvas:
        canvas.load(json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8")))
        assert canvas.missing() == []
        assert canvas.prompt() == json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
        sizes = ("EmptyLatentImage", "SVD_img2vid_Conditioning", "KSampler")
        canvas.set_widgets({f"{node}.{key}": value for node in sizes for key, value in SMALL.items()})
        canvas.set_widgets({f"{case.loader}.ckpt_name": HOT + case.file})
        canvas.insert("ModelComputeDtype", before=GUARDS[0], dtype="fp16")
        end, detail = canvas.queue(seconds=240)
        assert end == "execution_success", detail
        canvas.picture(f"ran_{name}")
        model, vae = (" ".join(map(str, canvas.widgets(guard).values())) for guard in GUARDS)
    assert f"{case.model} computes in fp16" in model and "2 steps, 2 reruns" in model
    assert f"VAE decoder: {case.vae} computes in fp16" in vae and "1 call, 1 rerun" in vae
