"""What cannot be had from the hub: no hub, refused by it, or not what a family needs."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX, COGVIDEOX_FROM_IMAGE
from comfyui_onediff_guard.pipelines.models.hub import fetch
from hub_files import DENOISER, ID, Stop, files_of, in_cache, stop_after, text, without
from hub_server import HubServer
from huggingface_hub import constants


@pytest.mark.parametrize("off", ["download", "HF_HUB_OFFLINE"])
def test_turned_off_nothing_is_asked(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, off: str
) -> None:
    server.push(ID, files)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", off == "HF_HUB_OFFLINE")
    with pytest.raises(HubError, match=r"'owner/small-video' at 'main' is not in the cache \(.*turned off: turn them"):
        fetch(ID, None, COGVIDEOX, download=off != "download")
    assert not server.requests


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ("tokenizer/spiece.model", "no spiece.model"),
        ("transformer/config.json", "no config.json"),
        ("vae/diffusion_pytorch_model.safetensors", "no .safetensors"),
        ("scheduler/scheduler_config.json", "no scheduler_config.json"),
        ("model_index.json", "no model_index.json"),
    ],
)
def test_a_copy_that_lost_a_file_is_not_used(server: HubServer, files: dict[str, bytes], lost: str, said: str) -> None:
    server.push(ID, files)
    folder = fetch(ID, None, COGVIDEOX)
    (folder / lost).resolve().unlink()  # its blob: the link leads nowhere now
    with pytest.raises(BadFolder, match=f"'{ID}' lost {lost}. That is the copy in the cache.*Downloads are turned off"):
        fetch(ID, None, COGVIDEOX, download=False)
    (folder / lost).unlink()
    with pytest.raises(BadFolder, match=f"{ID}.*{said}"):
        fetch(ID, None, COGVIDEOX, download=False)
    server.requests.clear()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    assert len([request for request in server.gets(lost) if request.path != "api"]) <= 1


def test_no_network_is_said_early(
    server: HubServer, files: dict[str, bytes], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push(ID, files)
    folder = fetch(ID, None, COGVIDEOX)
    server.close()
    connect, tried, slept = socket.socket.connect, [], []
    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda self, to: (tried.append(to), connect(self, to)))
        patch.setattr(time, "sleep", slept.append)  # what the library waits between attempts
        with pytest.raises(HubError, match=r"cannot be reached for 'owner/other' \(Connect.*Check the network"):
            fetch("owner/other", None, COGVIDEOX)
    assert 1 <= len(tried) <= 3 and sum(slept) < 5, (tried, slept)
    with caplog.at_level(logging.WARNING):
        assert fetch(ID, None, COGVIDEOX) == folder, "what is there is used, and that is said"
    assert f"cannot be reached for '{ID}'" in caplog.text and folder.name in caplog.text


def test_a_hub_that_does_not_answer(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
        with pytest.raises(HubError, match=r"cannot be reached.*Timeout"):
            fetch(ID, None, COGVIDEOX)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
        with pytest.raises(Stop):
            fetch(ID, None, COGVIDEOX, progress=stop_after(-1))


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", "no 'owner/small-video' on the hub, or it is private or gated.*HF_TOKEN"),
        (401, "RepoNotFound", "no 'owner/small-video' on the hub, or it is private or gated.*HF_TOKEN"),
        (403, "GatedRepo", "'owner/small-video' is gated. Accept its terms.*HF_TOKEN"),
        (403, "", r"refused 'owner/small-video' \(HTTP 403\).*HF_TOKEN"),
        (404, "RevisionNotFound", "no revision 'main'.*branch"),
        (404, "EntryNotFound", r"file of 'owner/small-video' is gone from the hub \(HTTP 404\)"),
        (500, "", r"cannot serve 'owner/small-video' now \(HTTP 500\)"),
    ],
)
@pytest.mark.parametrize("where", ["api", "model_index.json"])
def test_what_the_hub_refuses(
    server: HubServer, files: dict[str, bytes], where: str, status: int, code: str, said: str
) -> None:
    server.push(ID, files)
    server.faults.status = {where: (status, code)}
    with pytest.raises(HubError, match=said):
        fetch(ID, None, COGVIDEOX)
    assert not in_cache()


def test_ids_and_revisions_that_are_not_there(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    with pytest.raises(HubError, match="no 'owner/other' on the hub"):
        fetch("owner/other", None, COGVIDEOX)
    with pytest.raises(HubError, match="has no revision 'v9'"):
        fetch(ID, "v9", COGVIDEOX)
    server.token = "hf_secret"
    with pytest.raises(HubError, match=r"private or gated.*HF_TOKEN"):
        fetch(ID, None, COGVIDEOX)


# --- what a repository holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"_class_name": "CogVideoXImageToVideoPipeline"}, f"belongs to {COGVIDEOX_FROM_IMAGE.name}"),
        ({"_class_name": "FluxPipeline"}, "holds a FluxPipeline. Known: CogVideoXPipeline"),
        ({"_class_name": ["pipeline", "EvilPipeline"]}, "EvilPipeline"),
        ({"transformer": ["model", "EvilTransformer"]}, "EvilTransformer.* as transformer"),
        ({"vae": None}, "nothing as vae"),
    ],
)
def test_another_pipeline_is_refused_by_its_index_alone(
    server: HubServer, files: dict[str, bytes], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w')".encode()
    code = dict.fromkeys(("pipeline.py", "model.py", "transformer/model.py", "tokenizer/evil.py"), evil)
    server.push(ID, {**text(files, "model_index.json", **changes), **code})
    with pytest.raises(BadFolder, match=f"'{ID}'.*{said}"):
        fetch(ID, None, COGVIDEOX)
    assert [request.path for request in server.gets()] == ["api", "model_index.json"]
    assert not marker.exists() and not in_cache()


def test_code_of_a_repository_is_neither_fetched_nor_run(
    server: HubServer, files: dict[str, bytes], tmp_path: Path, open_pipeline: Callable[..., Any]
) -> None:
    marker = tmp_path / "ran"
    evil = f"open({str(marker)!r}, 'w')".encode()
    remote = {"auto_map": {"AutoModel": "model.Evil", "AutoTokenizer": ["model.Evil", None]}}
    changed = text(text(files, "text_encoder/config.json", **remote), "tokenizer/tokenizer_config.json", **remote)
    server.push(ID, {**changed, **{f"{folder}model.py": evil for folder in ("", "text_encoder/", "tokenizer/")}})
    handle = open_pipeline(fetch(ID, None, COGVIDEOX))
    assert type(handle.store.unweighted("tokenizer")).__module__.startswith("transformers.")
    assert type(handle.store.module("text_encoder", "fp32")).__name__ == "T5EncoderModel"
    assert not [request for request in server.requests if request.path.endswith(".py")] and not marker.exists()


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ("transformer/diffusion_pytorch_model.fp16.safetensors", "fp16.safetensors, but no diffusion_pytorch_model"),
        ("transformer/diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin, but no .*Pickled weights can run"),
        ("elsewhere.safetensors", "holds no weights, but no"),
    ],
)
def test_weights_in_no_form_that_is_taken(server: HubServer, files: dict[str, bytes], instead: str, said: str) -> None:
    server.push(ID, {**without(files, DENOISER), instead: files[DENOISER]})
    with pytest.raises(BadFolder, match=f"'{ID}/transformer' .*{said}"):
        fetch(ID, None, COGVIDEOX)
    assert not server.gets(".safetensors")


def test_no_diffusers_repository(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, without(files, "model_index.json"))
    with pytest.raises(BadFolder, match=f"'{ID}' has no model_index.json"):
        fetch(ID, None, COGVIDEOX)


def test_a_hub_that_lies_writes_nowhere_else(server: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    evil = {"transformer/../../../evil.json": b"{}", "tokenizer/sub/evil.json": b"{}", "tokenizer/.evil.json": b"{}"}
    server.push(ID, {**files, **evil})
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    shutil.rmtree(constants.HF_HUB_CACHE)
    server.faults.blob = "../../../../evil"
    with pytest.raises(BadFolder, match=r"no model_index.json"):
        fetch(ID, None, COGVIDEOX)
    server.faults.blob, server.faults.sha = None, "../../../evil"
    with pytest.raises(HubError, match=r"names no commit. Check HF_ENDPOINT"):
        fetch(ID, None, COGVIDEOX)
    assert not list(tmp_path.rglob("*evil*"))


@pytest.mark.parametrize("path", ["transformer/config.json", DENOISER])
def test_a_hub_that_sends_more_than_it_promised_fills_no_disk(
    server: HubServer, files: dict[str, bytes], path: str
) -> None:
    server.push(ID, files)
    server.faults.size = {path: 100}
    with pytest.raises(HubError, match=f"the hub sends more of {path} than the 100 bytes that it promised"):
        fetch(ID, None, COGVIDEOX)
    partial = Path(constants.HF_HUB_CACHE).rglob(f"*.{path.replace('/', '.')}.incomplete")
    assert all(file.stat().st_size <= 100 for file in partial)


@pytest.mark.parametrize(
    ("size", "said"), [(10**12, "model_index.json has 1,000,000,000,000 bytes"), (-1, "has no model_")]
)
def test_an_index_of_no_possible_size_is_not_asked_for(
    server: HubServer, files: dict[str, bytes], size: int, said: str
) -> None:
    server.push(ID, files)
    server.faults.size = {"model_index.json": size}
    with pytest.raises(BadFolder, match=said):
        fetch(ID, None, COGVIDEOX)
    assert not server.gets("model_index.json")


@pytest.mark.parametrize(
    ("file", "fields", "said"),
    [
        (
            "text_encoder/config.json",
            {"_attn_implementation": "someone/kernel"},
            "its '_attn_implementation' is someone",
        ),
        ("transformer/config.json", {"quantization_config": {"x": 1}}, "its 'quantization_config' is"),
        ("text_encoder/adapter_config.json", {"base_model_name_or_path": "someone/else"}, "holds adapter_config.json"),
    ],
)
def test_what_a_repository_asks_of_the_libraries_is_refused(
    server: HubServer, files: dict[str, bytes], file: str, fields: dict[str, Any], said: str
) -> None:
    server.push(ID, {**files, file: json.dumps({**json.loads(files.get(file, b"{}")), **fields}).encode()})
    with pytest.raises(BadFolder, match=f"{ID}.*{said}"):
        fetch(ID, None, COGVIDEOX)
