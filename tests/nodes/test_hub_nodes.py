"""The loader node with models from the hub: the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from as_comfyui import api_node
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
from comfyui_onediff_guard.pipelines.models.hub import fetch
from fake_comfy import InterruptProcessingException
from hub_files import DENOISER, ID, files_of, text
from hub_server import HubServer
from huggingface_hub import constants

VARIANTS = ("2b", "5b-i2v", "cogview3", "cogview4", "wan", "wan-two", "svd")


@pytest.fixture
def no_models(tmp_path: Path) -> Iterator[Path]:
    """A process without ComfyUI that has no models."""
    with host.plain_folders(models=[tmp_path / "models"], input=tmp_path, output=tmp_path):
        yield tmp_path


NO_MODEL = "none found: put one into models/diffusers or models/checkpoints, or fill in hub_id"


def loader(name: str = "LoadPipeline") -> Any:
    return NODE_CLASS_MAPPINGS[f"OneDiffGuard{name}"]


def load(hub_id: str = ID, **more: Any) -> Any:
    (pipeline,) = loader()().load(NO_MODEL, "fp32", "eager", "none", hub_id=hub_id, node_id="7", **more)["result"]
    return pipeline


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_reading_input_types_does_not_import_torch(fresh_python: Callable[..., str]) -> None:
    code = (
        "import sys\n"
        "from comfyui_onediff_guard.nodes.load import LoadPipeline\n"
        "print(bool(LoadPipeline.INPUT_TYPES()), 'torch' in sys.modules)"
    )
    assert fresh_python(code).split() == ["True", "False"]


# --- download ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_loader_downloads_models_of_every_family(
    server: HubServer, no_models: Path, model_folder: Callable[..., Path], variant: str
) -> None:
    server.push(ID, files := files_of(model_folder(variant)))
    pipeline = load(f" {ID} ")
    assert pipeline.family.pipeline == json.loads(files["model_index.json"])["_class_name"]
    assert files_of(pipeline.store.model.path) == files


def test_node_shows_downloaded_bytes_and_then_commit(server: HubServer, files: dict[str, bytes], comfyui: Any) -> None:
    commit = server.push(ID, files)
    server.faults.seconds_per_block = 0.02
    load()
    total = sum(map(len, files.values()))
    (bar,) = comfyui.bars
    assert bar[0] == (0, 1), "nothing is known yet, and no total of 0 is sent"
    assert bar[-1] == (total, total) and any(0 < done < total for done, _ in bar)
    assert {node for node, _ in comfyui.texts} == {"7"}
    first, *between, last = [text for _, text in comfyui.texts]
    assert first == f"looking for {ID}" and last == f"{ID}, commit {commit}"
    assert any(f" of {total / 1e6:.1f} MB" in line for line in between)


def test_downloaded_bytes_are_on_stderr_without_comfyui(
    server: HubServer, files: dict[str, bytes], no_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.push(ID, files)
    load()
    size = f"{sum(map(len, files.values())) / 1e6:.1f}"
    assert f"{size} of {size} MB" in capsys.readouterr().err


def test_interrupt_cancels_download(
    server: HubServer, files: dict[str, bytes], comfyui: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.03

    def interrupted() -> None:
        if comfyui.bars[-1][-1][0] > 700_000:
            raise InterruptProcessingException

    with monkeypatch.context() as patch:
        patch.setattr(comfyui.management, "throw_exception_if_processing_interrupted", interrupted)
        with pytest.raises(InterruptProcessingException):
            load()
    assert loader().IS_CHANGED(hub_id=ID) == ""
    server.faults.seconds_per_block = 0
    assert files_of(load().store.model.path) == files


# --- errors -----------------------------------------------------------------------------------------------------------


def test_error_messages_name_hub_id(server: HubServer, files: dict[str, bytes], no_models: Path) -> None:
    server.push(ID, text(files, "text_encoder/config.json", num_heads="four"))
    with pytest.raises(BadFolder, match=f"^'{ID}/text_encoder/config.json' cannot be used: its 'num_heads' is four"):
        load()
    server.push(ID, files)
    pipeline = load()
    assert pipeline.store.model.name == ID
    weights = pipeline.store.model.path / "text_encoder" / "model.safetensors"
    blob = weights.readlink()
    weights.unlink()
    with pytest.raises(BadFolder, match=f"^'{ID}/text_encoder' could not be loaded"):
        loader("EncodePrompt")().encode(pipeline, "a boat", "", "inherit")
    weights.symlink_to(blob)
    (pipeline.store.model.path / "vae" / "config.json").unlink()
    server.close()
    with pytest.raises(HubError, match=ID):
        load()
    with pytest.raises(BadFolder, match=f"^'{ID}' has no vae/config.json"):
        load(download=False)


# --- when the loader runs again ---------------------------------------------------------------------------------------


def test_is_changed_notices_new_cached_commit_without_request(
    server: HubServer, files: dict[str, bytes], no_models: Path
) -> None:
    changed = loader().IS_CHANGED
    old = server.push(ID, files)
    assert changed(model=NO_MODEL, hub_id=ID) == ""
    load()
    assert changed(model=NO_MODEL, hub_id=f" {ID} ", revision=" ") == old
    new = server.push(ID, text(files, "scheduler/scheduler_config.json", snr_shift_scale=2.0))
    server.requests.clear()
    assert changed(hub_id=ID) == old and not server.requests, "the hub is asked only when the node runs"
    fetch(ID, None)
    server.close()
    assert changed(hub_id=ID) == new and changed(hub_id=ID, revision=old) == old
    assert changed(hub_id=ID, revision="v9") == ""


def test_is_changed_never_raises_on_damaged_cache(server: HubServer, files: dict[str, bytes], no_models: Path) -> None:
    server.push(ID, files)
    folder = load().store.model.path
    (folder / "model_index.json").write_bytes(b"\xff")
    assert loader().IS_CHANGED(hub_id=ID) == ""
    (folder / DENOISER).resolve().unlink()
    assert loader().IS_CHANGED(hub_id=ID) == ""
    shutil.rmtree(constants.HF_HUB_CACHE)
    Path(constants.HF_HUB_CACHE).touch()
    assert loader().IS_CHANGED(hub_id=ID) == ""


# --- without a browser ------------------------------------------------------------------------------------------------


def test_hub_id_can_be_set_on_command_line(
    server: HubServer, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.push(ID, files)
    size = {"width": 64, "height": 48, "frames": 1, "steps": 1}
    workflow = {
        "1": api_node("LoadPipeline", model="CogVideoX-2b", precision="fp32", backend="eager", offload="none"),
        "2": api_node("EncodePrompt", pipeline=["1", 0]),
        "3": api_node("SampleCogVideoX", pipeline=["1", 0], positive=["2", 0], negative=["2", 1], **size),
        "4": api_node("DecodeLatents", pipeline=["1", 0], latents=["3", 0]),
        "5": {"class_type": "SaveImage", "inputs": {"images": ["4", 0], "filename_prefix": "hub"}},
    }
    (tmp_path / "workflow.json").write_text(json.dumps(workflow), encoding="utf-8")
    run = ["run", str(tmp_path / "workflow.json"), "--models", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    assert cli.main(run) == 4 and "Model 'CogVideoX-2b' was not found" in capsys.readouterr().err
    assert cli.main([*run, "--json", "--set", f"1.hub_id={ID}"]) == 0
    assert f"Plan for {ID}: " in capsys.readouterr().out
    assert (
        cli.main([*run, "--set", "1.hub_id=CogVideoX-2b"]) == 4 and "is not a repository id" in capsys.readouterr().err
    )
    assert cli.main([*run, "--set", "1.hub_id=owner/other"]) == 4
    assert "The hub refuses 'owner/other'" in capsys.readouterr().err


def test_doctor_plans_cached_models_without_request(
    server: HubServer, files: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.push(ID, files)
    assert cli.main(["doctor", "--model", ID]) == 2 and f"There is no '{ID}'" in capsys.readouterr().err
    assert not server.requests, "doctor downloads nothing"
    fetch(ID, None)
    assert cli.main(["doctor", "--model", ID, "--verbose"]) == 0
    assert f"Plan for {ID}: " in capsys.readouterr().out
