"""Models from the hub: the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from os import environ
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines import hub
from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
from comfyui_onediff_guard.pipelines.families import COGVIDEOX, COGVIDEOX_FROM_IMAGE
from comfyui_onediff_guard.pipelines.hub import check_id, fetch
from hub_server import BLOCK, HubServer, files_of
from huggingface_hub import constants, file_download
from huggingface_hub.utils import WeakFileLock

ID = "owner/small-video"
DENOISER = "transformer/diffusion_pytorch_model.safetensors"


class Stop(Exception):
    """What a host's progress bar raises."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[HubServer]:
    """A hub that huggingface_hub in this process talks to, and an empty cache."""
    server = HubServer()
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name, value in {
        "ENDPOINT": server.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_TOKEN_PATH": str(tmp_path / "token"),
        "HF_HUB_OFFLINE": False,
        "DOWNLOAD_CHUNK_SIZE": BLOCK,
    }.items():
        monkeypatch.setattr(constants, name, value)
        if hasattr(file_download, name):  # older versions import some by name
            monkeypatch.setattr(file_download, name, value)
    yield server
    server.close()


@pytest.fixture(scope="session")
def files(model_folder: Callable[..., Path]) -> dict[str, bytes]:
    return files_of(model_folder())


def text(files: dict[str, bytes], path: str, **changes: Any) -> dict[str, bytes]:
    """The files with another JSON."""
    return {**files, path: json.dumps({**json.loads(files[path]), **changes}).encode()}


def without(files: dict[str, bytes], *paths: str) -> dict[str, bytes]:
    return {path: data for path, data in files.items() if path not in paths}


def in_cache(revision: str | None = None) -> bool:
    try:
        fetch(ID, revision, COGVIDEOX, download=False)
    except (HubError, BadFolder):
        return False
    return True


def partials() -> list[Path]:
    return sorted(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


def stop_after(n_bytes: int) -> Callable[[int, int, str], None]:
    def progress(done: int, _total: int, _text: str) -> None:
        if done > n_bytes:
            raise Stop

    return progress


# --- the way that it goes ---------------------------------------------------------------------------------------------

BY_ENVIRONMENT = """
import sys
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.pipelines.handle import load
from comfyui_onediff_guard.pipelines.hub import fetch
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
folder = fetch(sys.argv[1], None, COGVIDEOX)
handle = load(folder, COGVIDEOX, precision=Precision.FP32, backend="eager", offload="none", placement=PlainPlacement())
for name in ("tokenizer", "scheduler"):
    handle.store.unweighted(name)
print(sum(p.numel() for name in COGVIDEOX.weighted for p in handle.store.module(name, "fp32").parameters()))
print(folder)
"""


def test_the_environment_that_huggingface_hub_reads_is_all_there_is_to_set(
    files: dict[str, bytes], tmp_path: Path, fresh_python: Callable[..., str]
) -> None:
    server = HubServer()
    server.token = "hf_secret"
    commit = server.push(ID, files)
    settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}
    online = fresh_python(BY_ENVIRONMENT, ID, **settings)
    server.close()
    assert online == fresh_python(BY_ENVIRONMENT, ID, **settings, HF_HUB_OFFLINE="1")
    parameters, folder = online.split()
    assert int(parameters) > 400_000
    assert Path(folder) == tmp_path / "hub" / "models--owner--small-video" / "snapshots" / commit
    from_hub = [request for request in server.requests if not request.cdn]
    assert {request.authorization for request in from_hub} == {"Bearer hf_secret"}
    assert {request.authorization for request in server.requests if request.cdn} == {None}


def test_only_what_the_family_needs_is_fetched(server: HubServer, files: dict[str, bytes]) -> None:
    beside = {
        "README.md": b"x",
        "demo.mp4": b"x",
        "pipeline.py": b"raise SystemExit('ran')",
        "cogvideox-fp16.safetensors": b"x",
        "transformer/model.py": b"raise SystemExit('ran')",
        "transformer/diffusion_pytorch_model.fp16.safetensors": b"x",
        "transformer/diffusion_pytorch_model.bin": b"x",
        "transformer/diffusion_pytorch_model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}',
        "text_encoder/flax_model.msgpack": b"x",
        "text_encoder/pytorch_model.bin.index.json": b"{}",
        "text_encoder/model.onnx": b"x",
        "vae/old/diffusion_pytorch_model.safetensors": b"x",
        "safety_checker/model.safetensors": b"x",
    }
    server.push(ID, {**files, **beside})
    folder = fetch(ID, None, COGVIDEOX)
    assert files_of(folder) == files
    assert {request.path for request in server.requests} == {"api", *files}
    bodies = [request for request in server.gets() if request.path != "api"]
    assert {request.encoding for request in bodies} == {"identity"}, "a compressed answer could not be resumed"


def test_bytes_are_told_and_end_at_their_sum(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.02
    told: list[tuple[int, int, str]] = []
    fetch(ID, None, COGVIDEOX, progress=lambda *news: told.append(news))
    total = sum(map(len, files.values()))
    known = [news for news in told if news[1]]
    assert {news[1] for news in known} == {total}
    assert known[-1][0] == total and sorted(known) == sorted(known, key=lambda news: news[0])
    assert any(0 < done < total and text.startswith(f"{ID}: ") and "." in text for done, _, text in known)
    assert told[0] == (0, 0, f"looking for {ID}")


def test_shards_are_fetched_by_their_index(server: HubServer, files: dict[str, bytes], tmp_path: Path) -> None:
    server.push(ID, shards := sharded(files, tmp_path))
    assert len([path for path in shards if "-of-" in path]) > 1
    assert files_of(fetch(ID, None, COGVIDEOX)) == shards


def sharded(files: dict[str, bytes], tmp_path: Path) -> dict[str, bytes]:
    from huggingface_hub import save_torch_state_dict
    from safetensors.torch import load

    (tmp_path / "shards").mkdir()
    save_torch_state_dict(
        load(files[DENOISER]),
        tmp_path / "shards",
        filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
        max_shard_size=400_000,
    )
    shards = files_of(tmp_path / "shards")
    return {**without(files, DENOISER), **{f"transformer/{name}": data for name, data in shards.items()}}


def test_an_index_with_a_shard_that_is_not_there_costs_no_weights(
    server: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    shards = sharded(files, tmp_path)
    gone = max(path for path in shards if "-of-" in path)
    server.push(ID, without(shards, gone))
    with pytest.raises(BadFolder, match=f"'{ID}': .*index.json names {gone.split('/')[1]}"):
        fetch(ID, None, COGVIDEOX)
    assert not server.gets(".safetensors")


def test_a_commit_stays_what_it_was(server: HubServer, files: dict[str, bytes]) -> None:
    first = server.push(ID, files)
    old = fetch(ID, "main", COGVIDEOX)
    second = server.push(ID, text(files, "scheduler/scheduler_config.json", snr_shift_scale=2.0))
    server.requests.clear()
    assert fetch(ID, first, COGVIDEOX) == old and not server.requests, "a commit needs no hub"
    new = fetch(ID, "main", COGVIDEOX)
    assert (old.name, new.name) == (first, second)
    assert [request.path for request in server.gets()] == ["api", "scheduler/scheduler_config.json"]
    assert fetch(ID, None, COGVIDEOX, download=False) == new
    server.requests.clear()
    assert fetch(ID, None, COGVIDEOX) == new and len(server.requests) == 1, "whole: one question and no more"


def test_tags_and_branches_with_a_slash(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files, "refs/pr/1")
    folder = fetch(ID, "refs/pr/1", COGVIDEOX)
    assert fetch(ID, "refs/pr/1", COGVIDEOX, download=False) == folder
    assert not in_cache("main")


# --- interrupted, cut, broken -----------------------------------------------------------------------------------------


def test_an_interrupted_download_goes_on_where_it_ended(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.03
    with pytest.raises(Stop):
        fetch(ID, None, COGVIDEOX, progress=stop_after(700_000))
    kept = sum(path.stat().st_size for path in partials())
    assert kept > 5 * BLOCK and not in_cache()
    assert "main" not in {path.name for path in Path(constants.HF_HUB_CACHE).rglob("refs/*")}
    server.requests.clear()
    server.faults.seconds_per_block = 0
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    resumed = [request for request in server.requests if request.first_byte]
    assert kept == sum(request.first_byte for request in resumed)
    assert {len(files[r.path]) - r.first_byte for r in resumed} == {r.sent for r in resumed}
    assert not partials()


def test_an_interrupt_does_not_wait_for_a_hub_that_hangs(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    server.faults.hang = {DENOISER}
    started: list[float] = []

    def progress(done: int, total: int, _text: str) -> None:
        if total and done > total - len(files[DENOISER]):  # all else is there
            started.append(time.perf_counter())
            raise Stop

    with pytest.raises(Stop):
        fetch(ID, None, COGVIDEOX, progress=progress)
    assert time.perf_counter() - started[0] < 0.1
    server.faults.hang = set()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files, "what hangs from before does no harm"


def test_a_killed_process_leaves_what_it_had(files: dict[str, bytes], server: HubServer) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.03
    code = (
        "import os, sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 2 ** 15\n"
        "from comfyui_onediff_guard.pipelines.families import COGVIDEOX\n"
        "from comfyui_onediff_guard.pipelines.hub import fetch\n"
        f"fetch({ID!r}, None, COGVIDEOX, progress=lambda done, *_: done > 700_000 and os.kill(os.getpid(), 9))"
    )
    where = {"HF_ENDPOINT": server.endpoint, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    done = subprocess.run([sys.executable, "-c", code], env={**environ, **where}, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    kept = sum(path.stat().st_size for path in partials())
    assert kept > 5 * BLOCK and not in_cache()
    server.requests.clear()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    assert kept == sum(request.first_byte for request in server.requests)


def test_an_answer_that_ends_early(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    server.faults.cut = {DENOISER: 1}
    with suppress(HubError):  # newer versions of huggingface_hub go on by themselves
        fetch(ID, None, COGVIDEOX)
    fetch(ID, None, COGVIDEOX)
    first, second = server.gets(DENOISER)
    assert second.first_byte > 0.8 * first.sent and second.sent == len(files[DENOISER]) - second.first_byte
    assert in_cache()


def test_a_file_that_never_comes_whole(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push(ID, files)
    monkeypatch.setattr(file_download.time, "sleep", lambda _s: None)  # between the library's own attempts
    server.faults.cut = {"transformer/config.json": 99}
    with pytest.raises(HubError, match=r"(reached|ended early|downloaded).*Run|run it again"):
        fetch(ID, None, COGVIDEOX)
    assert not in_cache() and not server.gets(".safetensors")
    server.faults.cut = {}
    assert files_of(fetch(ID, None, COGVIDEOX)) == files


@pytest.mark.parametrize("path", [DENOISER, "vae/config.json"])
def test_other_bytes_than_the_checksum_promises(server: HubServer, files: dict[str, bytes], path: str) -> None:
    server.push(ID, files)
    server.faults.corrupt = {path}
    with pytest.raises(HubError, match=f"{path} has other bytes.*deleted. Run it again"):
        fetch(ID, None, COGVIDEOX)
    assert not in_cache()
    server.faults.corrupt = set()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files


def test_a_hub_without_ranges_is_asked_for_the_whole_file(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.03
    with pytest.raises(Stop):
        fetch(ID, None, COGVIDEOX, progress=stop_after(700_000))
    server.faults.seconds_per_block = 0
    server.faults.no_ranges = True
    assert files_of(fetch(ID, None, COGVIDEOX)) == files


def test_no_room_is_said_before_weights_are_fetched(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push(ID, files)
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _path: SimpleNamespace(free=10_000))
    with pytest.raises(HubError, match=r"needs 0.0 GB more in .*cache, where 0.0 GB are free.*HF_HOME"):
        fetch(ID, None, COGVIDEOX)
    assert not server.gets(".safetensors")


def test_a_disk_that_gets_full(server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.push(ID, files)
    write = hub._Partial.write

    def full(self: Any, data: Any) -> int:
        if self.tell() > 20 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(hub._Partial, "write", full)
        with pytest.raises(HubError, match=r"disk is full. Make room.*kept: run it again"):
            fetch(ID, None, COGVIDEOX)
    assert partials() and not in_cache()
    server.requests.clear()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    assert any(request.first_byte > 20 * BLOCK for request in server.requests)


def test_a_cache_that_cannot_be_written(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server.push(ID, files)
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(HubError, match=r"cache cannot be written.*Set HF_HOME"):
        fetch(ID, None, COGVIDEOX)


def test_without_links_files_are_kept_once(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows without developer mode."""
    server.push(ID, files)
    monkeypatch.setattr(file_download, "are_symlinks_supported", lambda _path=None: False)
    folder = fetch(ID, None, COGVIDEOX)
    assert not any(path.is_symlink() for path in folder.rglob("*")) and files_of(folder) == files
    assert not list((folder.parents[1] / "blobs").iterdir())
    (folder / DENOISER).write_bytes(b"cut off")
    server.requests.clear()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files
    assert [request.path for request in server.gets()] == ["api", DENOISER]


def test_two_processes_do_not_write_one_file(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files)
    lock = Path(constants.HF_HUB_CACHE) / ".locks" / "models--owner--small-video" / "onediff-guard.lock"
    lock.parent.mkdir(parents=True)
    told: list[str] = []

    def progress(_done: int, _total: int, text: str) -> None:
        told.append(text)
        if "another process" in text:
            raise Stop

    with WeakFileLock(lock), pytest.raises(Stop):
        fetch(ID, None, COGVIDEOX, progress=progress)
    assert not server.gets(".json")
    fetch(ID, None, COGVIDEOX)


# --- without a hub ----------------------------------------------------------------------------------------------------


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
        ("scheduler/scheduler_config.json", "no .json"),
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


def test_no_network_is_said_early(server: HubServer, files: dict[str, bytes], caplog: pytest.LogCaptureFixture) -> None:
    server.push(ID, files)
    folder = fetch(ID, None, COGVIDEOX)
    server.close()
    started = time.perf_counter()
    with pytest.raises(HubError, match=r"cannot be reached for 'owner/other' \(Connect.*Check the network"):
        fetch("owner/other", None, COGVIDEOX)
    assert time.perf_counter() - started < 5
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


@pytest.mark.parametrize(
    "hub_id",
    [
        "",
        "foo",
        "a/b/c",
        "a b/c",
        "a/ b",
        "../b",
        "a/..",
        "a/.b",
        "/b",
        "a/",
        "a\\b",
        "a/b--c",
        "a/b?x",
        "a://b/c",
        "ä/b",
    ],
)
def test_what_is_no_hub_id(server: HubServer, hub_id: str) -> None:
    with pytest.raises(HubError, match=r"is no hub id. Write owner/name"):
        fetch(hub_id, None, COGVIDEOX)
    assert not server.requests


@pytest.mark.parametrize("revision", ["../main", "a b", "/main", "a/../b", "-x", "main\n", "a//b", "a\\b", "a..b"])
def test_what_is_no_revision(server: HubServer, revision: str) -> None:
    with pytest.raises(HubError, match=r"is no revision. Write a branch"):
        fetch(ID, revision, COGVIDEOX)
    assert not server.requests


def test_what_is_one() -> None:
    assert check_id("THUDM/CogVideoX-2b") == "main" == check_id("a/b", "")
    assert [check_id("a/b_c.d-e", r) for r in ("v1.0", "refs/pr/2", "0" * 40)] == ["v1.0", "refs/pr/2", "0" * 40]


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
