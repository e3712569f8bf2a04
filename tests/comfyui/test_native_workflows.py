"""The shipped SD 1.5 workflow with ComfyUI's own nodes, run in a current ComfyUI on small checkpoints.

On a CPU, ComfyUI computes models in fp32 regardless of its flags; `--fp16-vae` affects only the VAE. So the graphs use
its ModelComputeDtype node. There is a healthy and an overflowing checkpoint; runs have 2 steps and 16×16 pixels.
"""

from __future__ import annotations

import json
import operator
import shutil
from collections.abc import Iterator
from pathlib import Path

import browser
import comfyui_nodes
import families
import legs
import numpy as np
import pytest
from comfyui_onediff_guard.headless.workflow import schema
from native_checkpoints import write_sd15
from native_graphs import FILE, GUARD, GUARDED, HOT, LOADER, MODEL, NAME, SIZE, SMALL, VAE, RunOutput, graph, make, run
from PIL import Image
from templates import api_file, read, ui_file

pytestmark = pytest.mark.comfyui

HALF = ("--force-fp16", "--fp16-vae")
TOLERANCE = 2e-2  # of the pixels' range


@pytest.fixture(scope="module")
def base(leg: legs.Leg, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ComfyUI's folder with the pack, an input and checkpoints. The checkpoints are large, so they are deleted."""
    folder = tmp_path_factory.mktemp("native_workflows")
    legs.install_pack(folder / "custom_nodes")
    families.write_inputs(folder / "input")
    checkpoints = folder / "models" / "checkpoints"
    checkpoints.mkdir(parents=True)
    write_sd15(checkpoints / FILE, overflows=False)
    write_sd15(checkpoints / (HOT + FILE), overflows=True)
    yield folder
    shutil.rmtree(checkpoints)


@pytest.fixture(scope="module")
def in_fp32(leg: legs.Leg, base: Path) -> RunOutput:
    """The result of the overflowing checkpoint in fp32."""
    with legs.started(leg, base) as server:
        return make(server, graph(hot=True))


@pytest.fixture(scope="module")
def server(leg: legs.Leg, base: Path, in_fp32: RunOutput) -> Iterator[legs.Server]:
    """A server in half precision. It starts after the fp32 server has ended: two need too much memory."""
    with legs.started(leg, base, *HALF) as running:
        yield running


@pytest.fixture
def nothing_learned(server: legs.Server) -> None:
    server.forget()


def test_stand_in_nodes_match_comfyui_nodes(server: legs.Server) -> None:
    """The stand-ins of tests/workflows have the same inputs and outputs as ComfyUI's nodes."""
    known = server.ask("/object_info")
    missing = comfyui_nodes.NODE_CLASS_MAPPINGS.keys() - known
    current = server.leg.is_current
    assert missing <= (set() if current else comfyui_nodes.NEWER)
    for name, node in comfyui_nodes.NODE_CLASS_MAPPINGS.items():
        if name in missing:
            continue
        ours, theirs = schema.from_class(name, node), schema.from_object_info(name, known[name])
        assert list(ours.inputs) == list(theirs.inputs), name
        assert ours.outputs == theirs.outputs[: len(ours.outputs)], name  # newer ComfyUIs add outputs
        for key, spec in ours.inputs.items():
            real = theirs.inputs[key]
            assert (spec.type, spec.required) == (real.type, real.required), f"{name}.{key}"
            for what, value in spec.config.items():
                fits = {"min": operator.ge, "max": operator.le}.get(what, operator.eq)  # and widen limits
                assert fits(value, real.config.get(what)), f"{name}.{key}: {what}"
            if key not in comfyui_nodes.FILE_INPUTS:
                newer = set() if current else comfyui_nodes.NEWER_OPTIONS
                assert set(spec.options) <= {*real.options, *newer}, f"{name}.{key}"
                assert spec.options[:1] == real.options[:1], f"{name}.{key}"


def test_healthy_run_is_bit_equal_with_guards(server: legs.Server) -> None:
    plain = make(server, graph(half=True, without=GUARDED))
    guarded = make(server, graph(half=True))
    assert guarded.frames.shape == (*SIZE, 3)
    assert all(frame.std() > 2 for frame in guarded.frames)
    assert np.array_equal(plain.frames, guarded.frames)
    assert not plain.reports
    assert "2 steps, all fine" in guarded.report(f"{MODEL} runs in fp16")
    assert "1 part, fine" in guarded.report(f"VAE decoder: {VAE} runs in fp16")


def test_overflowing_model_is_black_unguarded_and_near_fp32_guarded(
    server: legs.Server, in_fp32: RunOutput, nothing_learned: None
) -> None:
    plain = make(server, graph(hot=True, half=True, without=GUARDED))
    guarded = make(server, graph(hot=True, half=True))
    kept = [json.loads(file.read_text(encoding="utf-8")) for file in server.profiles()]
    assert {profile["model"] for profile in kept} >= {MODEL, f"{VAE}, VAE decoder"}
    assert all(profile["learned"]["all_layers_scaled"] for profile in kept)
    assert guarded.frames.shape == in_fp32.frames.shape == (*SIZE, 3)
    assert plain.frames.max() == 0
    assert all(frame.std() > 2 for frame in in_fp32.frames)
    difference = np.abs(guarded.frames.astype(int) - in_fp32.frames).max() / 255
    print(f"largest difference {difference:.4f}")
    assert difference <= TOLERANCE
    assert "overflow protection; 2 steps, 1 recomputed in fp32" in guarded.report(f"{MODEL} runs in fp16")
    assert "1 part, 1 recomputed in fp32" in guarded.report(f"VAE decoder: {VAE} runs in fp16")
    assert "runs in fp32" in in_fp32.report(MODEL)


def test_probe_runs_with_inputs_of_sampler(server: legs.Server) -> None:
    nodes = graph(hot=True, half=True, without={"model"})
    (sampler,) = (node["inputs"] for node in nodes.values() if node["class_type"] == "KSampler")
    probing = {key: value for key, value in sampler.items() if key != "denoise"}
    nodes = {
        id_: node for id_, node in nodes.items() if not node["class_type"].startswith(("KSampler", "VAEDecode", "Save"))
    }
    nodes["probe"] = {"class_type": "OneDiffGuardNumericsProbeModel", "inputs": probing}
    nodes["save"] = {"class_type": "SaveImage", "inputs": {"images": ["probe", 0], "filename_prefix": "probe"}}
    ran = run(server, nodes)
    assert ran.code == 0, (ran.answer, server.tail())
    (found,) = ran.answer["outputs"]["probe"]["onediff_guard"]
    assert found["model"] == MODEL and found["measured_steps"] == 2
    assert found["dtype"] in ("bf16", "fp32") or found["plan"] != "fp16 plain", "plain fp16 overflows"
    assert found["worst"][0]["reach"] > 65504
    (file,) = ran.files
    picture = np.asarray(Image.open(file).convert("RGB"))
    assert picture.shape[1] > 800 and picture.std() > 20


def test_page_runs_workflow_and_shows_both_reports_on_guard(
    server: legs.Server, nothing_learned: None, pictures: Path
) -> None:
    with browser.canvas(server.url, pictures) as canvas:
        canvas.load(read(ui_file(NAME)))
        assert (canvas.missing(), canvas.notices()) == ([], [])
        shipped = read(api_file(NAME))
        assert canvas.prompt_like(shipped) == shipped
        sizes = ("EmptyLatentImage", "KSampler")
        canvas.set_widgets({f"{node}.{key}": value for node in sizes for key, value in SMALL.items()})
        canvas.set_widgets({f"{LOADER}.ckpt_name": HOT + FILE})
        canvas.insert("ModelComputeDtype", before=GUARD, dtype="fp16")
        end, detail = canvas.queue(seconds=240)
        assert end == "execution_success", detail
        canvas.picture(f"ran_{NAME}")
        texts = " ".join(map(str, canvas.widgets(GUARD).values()))
    assert f"{MODEL} runs in fp16" in texts and "overflow protection; 2 steps, 1 recomputed in fp32" in texts
    assert f"VAE decoder: {VAE} runs in fp16" in texts and "1 part, 1 recomputed in fp32" in texts
