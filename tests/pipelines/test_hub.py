"""Models from the hub: the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

import errno
import logging
import re
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
from comfyui_onediff_guard.pipelines.models import hub
from comfyui_onediff_guard.pipelines.models.hub import fetch
from hub_files import DENOISER, ID, Stop, files_of, is_cached, stop_after, text, without
from hub_server import HANG_SECONDS, HubServer
from huggingface_hub import constants, file_download
from small_runs import opened

TOKEN = "hf_secret"
BY_ENVIRONMENT = """
import sys
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.models.hub import fetch
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
folder = fetch(sys.argv[1], None)
handle = load(folder, COGVIDEOX, precision=Precision.FP32, backend="eager", offload="none", placement=PlainPlacement())
for name in ("tokenizer", "scheduler"):
    handle.store.unweighted(name)
print(sum(p.numel() for name in COGVIDEOX.weighted for p in handle.store.module(name, "fp32").parameters()))
print(folder)
"""


def test_environment_variables_of_huggingface_hub_are_enough(
    files: dict[str, bytes], tmp_path: Path, fresh_python: Callable[..., str]
) -> None:
    server = HubServer()
    server.token = TOKEN
    commit = server.push(ID, files)
    settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_TOKEN": TOKEN}
    online = fresh_python(BY_ENVIRONMENT, ID, **settings)
    server.close()
    assert online == fresh_python(BY_ENVIRONMENT, ID, **settings, HF_HUB_OFFLINE="1")
    parameters, folder = online.split()
    assert int(parameters) > 400_000
    assert Path(folder) == tmp_path / "hub" / "models--owner--small-video" / "snapshots" / commit
    from_hub = [request for request in server.requests if not request.cdn]
    assert {request.authorization for request in from_hub} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in server.requests if request.cdn} == {None}


@pytest.fixture
def pushed(server: HubServer, files: dict[str, bytes]) -> HubServer:
    """The hub with the model."""
    server.push(ID, files)
    return server


# --- what is downloaded -----------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("stored", ["whole", "sharded"])
def test_only_files_that_family_needs_are_fetched(
    server: HubServer, files: dict[str, bytes], tmp_path: Path, stored: str
) -> None:
    """No other formats, no duplicates, no code, and no path that leads out of the folder."""
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')".encode()
    remote = {"auto_map": {"AutoModel": "model.Evil", "AutoTokenizer": ["model.Evil", None]}}
    files = text(text(files, "text_encoder/config.json", **remote), "tokenizer/tokenizer_config.json", **remote)
    index = "transformer/diffusion_pytorch_model.safetensors.index.json"
    beside = {index: b'{"weight_map": {"a": "gone.safetensors"}}'} if stored == "whole" else {}
    files = sharded(files, tmp_path) if stored == "sharded" else files
    others = [
        *("README.md", "demo.mp4", "cogvideox-fp16.safetensors", "safety_checker/model.safetensors"),
        *("text_encoder/flax_model.msgpack", "text_encoder/pytorch_model.bin.index.json"),
        *(f"transformer/diffusion_pytorch_model.{ending}" for ending in ("fp16.safetensors", "bin")),
        "vae/old/diffusion_pytorch_model.safetensors",
        *("transformer/../../../evil.json", "transformer/[a-z]*.json", "tokenizer/.evil.json"),
    ]
    scripts = ["pipeline.py", "model.py", "transformer/model.py", "tokenizer/model.py"]
    server.push(ID, {**files, **beside, **dict.fromkeys(others, b"x"), **dict.fromkeys(scripts, code)})
    folder = fetch(ID, None)
    assert files_of(folder) == files and (stored == "whole") == (DENOISER in files)
    assert {request.path for request in server.requests} == {"api", *files}
    handle = opened(folder)
    assert type(handle.store.unweighted("tokenizer")).__module__.startswith("transformers.")
    assert type(handle.store.module("text_encoder", "fp32")).__name__ == "T5EncoderModel"
    assert not marker.exists() and not list(tmp_path.rglob("*evil*"))


def test_progress_counts_bytes_up_to_their_sum(pushed: HubServer, files: dict[str, bytes]) -> None:
    pushed.faults.seconds_per_block = 0.03
    events: list[tuple[int, int, str]] = []
    fetch(ID, None, progress=lambda *news: events.append(news))
    total = sum(map(len, files.values()))
    known = [news[:2] for news in events if news[1]]
    assert events[0] == (0, 0, f"looking for {ID}")
    assert known == sorted(known) and known[-1] == (total, total)
    assert len({done for done, _ in known}) > 2 and {of for _, of in known} == {total}


def test_new_commit_fetches_only_changed_files_and_old_one_stays(server: HubServer, files: dict[str, bytes]) -> None:
    first = server.push(ID, files)
    old = fetch(ID, "main")
    second = server.push(ID, text(files, "scheduler/scheduler_config.json", snr_shift_scale=2.0))
    server.requests.clear()
    assert fetch(ID, first) == old and not server.requests, "a commit needs no hub"
    new = fetch(ID, "main")
    assert (old.name, new.name) == (first, second)
    assert {request.path for request in server.gets()} == {"api", "scheduler/scheduler_config.json"}
    assert fetch(ID, None, download=False) == new
    server.requests.clear()
    assert fetch(ID, None) == new and len(server.requests) == 1, "complete: one request and no more"


def test_branch_with_slash_in_name_is_fetched(server: HubServer, files: dict[str, bytes]) -> None:
    server.push(ID, files, "refs/pr/1")
    folder = fetch(ID, "refs/pr/1")
    assert fetch(ID, "refs/pr/1", download=False) == folder
    assert not is_cached("main")


# --- errors -----------------------------------------------------------------------------------------------------------


NO_IDS = (
    *("", "foo", "a/b/c", "a b/c", "a/ b", "../b", "a/..", "a/.b", "/b", "a/", "a\\b", "a/b--c", "a/b?x"),
    *("a://b/c", "ä/b", "a/b\n"),
)
NO_REVISIONS = ("../main", "a b", "/main", "a/../b", "-x", "main\n", "a//b", "a\\b", "a..b")


@pytest.mark.parametrize(("hub_id", "revision"), [(i, None) for i in NO_IDS] + [(ID, r) for r in NO_REVISIONS])
def test_invalid_id_or_revision_sends_no_request(server: HubServer, hub_id: str, revision: str | None) -> None:
    wrong = f"'{revision or hub_id}' is not a "
    with pytest.raises(HubError, match=re.escape(wrong)):
        fetch(hub_id, revision)
    assert not server.requests


@pytest.mark.parametrize(
    ("where", "status", "code", "reason"),
    [
        ("api", 404, "RepoNotFound", "The hub refuses 'owner/small-video' at 'main' .HTTP 404.*HF_TOKEN"),
        ("api", 401, "RepoNotFound", "HTTP 401.*HF_TOKEN"),
        ("api", 403, "", "HTTP 403.*HF_TOKEN"),
        ("api", 404, "RevisionNotFound", "at 'main' .HTTP 404"),
        ("api", 500, "", "HTTP 500"),
        ("model_index.json", 403, "GatedRepo", "HTTP 403.*accept its terms.*HF_TOKEN"),
        (DENOISER, 403, "GatedRepo", "HTTP 403.*accept its terms.*HF_TOKEN"),
        (DENOISER, 404, "EntryNotFound", "HTTP 404"),
    ],
)
def test_refusal_by_hub_is_explained_without_token(
    pushed: HubServer, monkeypatch: pytest.MonkeyPatch, where: str, status: int, code: str, reason: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    pushed.faults.status = {where: (status, code)}
    with pytest.raises(HubError, match=reason) as error:
        fetch(ID, None)
    assert {request.authorization for request in pushed.requests if not request.cdn} == {f"Bearer {TOKEN}"}
    assert TOKEN not in str(error.value) and error.value.__suppress_context__
    assert not is_cached()


@pytest.mark.parametrize("off", ["download", "HF_HUB_OFFLINE"])
def test_disabled_download_sends_no_request(pushed: HubServer, monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", off == "HF_HUB_OFFLINE")
    with pytest.raises(HubError, match=f"'{ID}' at 'main' is not in the cache"):
        fetch(ID, None, download=off != "download")
    assert not pushed.requests


def test_cached_model_is_used_without_network(
    pushed: HubServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch(ID, None)
    pushed.close()
    secret = f"http://user:{TOKEN}@127.0.0.1:1"
    for endpoint in (pushed.endpoint, secret):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        with pytest.raises(HubError, match=r"'owner/other' cannot be downloaded now \(\w+\)") as error:
            fetch("owner/other", None)
        assert TOKEN not in str(error.value)
    with caplog.at_level(logging.WARNING):
        assert fetch(ID, None) == folder, "the cached model is used, with a warning"
    assert f"'{ID}' cannot be downloaded now" in caplog.text and folder.name in caplog.text and TOKEN not in caplog.text


@pytest.mark.parametrize("status", [408, 429, 503])
def test_cached_model_is_used_if_hub_is_busy(pushed: HubServer, caplog: pytest.LogCaptureFixture, status: int) -> None:
    folder = fetch(ID, None)
    pushed.faults.status = {"api": (status, "")}
    with pytest.raises(HubError, match=f"'owner/other' cannot be downloaded now .HTTP {status}"):
        fetch("owner/other", None)
    with caplog.at_level(logging.WARNING):
        assert fetch(ID, None) == folder
    assert folder.name in caplog.text


def test_silent_hub_times_out_or_is_interrupted(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
        with pytest.raises(HubError, match=r"cannot be downloaded now.*Timeout"):
            fetch(ID, None)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 5)
        with pytest.raises(Stop):
            fetch(ID, None, progress=stop_after(-1))


# --- what a repository holds ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"_class_name": "FluxPipeline"}, "FluxPipeline"),
        ({"_class_name": ["pipeline", "EvilPipeline"]}, "EvilPipeline"),
        ({"transformer": ["model", "EvilTransformer"]}, "EvilTransformer.* as transformer"),
        ({"vae": None}, "nothing as vae"),
    ],
)
def test_unsupported_pipeline_is_refused_by_its_index_only(
    server: HubServer, files: dict[str, bytes], changes: dict[str, Any], reason: str
) -> None:
    server.push(ID, text(files, "model_index.json", **changes))
    with pytest.raises(BadFolder, match=f"'{ID}'.*{reason}"):
        fetch(ID, None)
    assert {request.path for request in server.gets()} == {"api", "model_index.json"} and not is_cached()


@pytest.mark.parametrize(
    ("lost", "instead", "reason"),
    [
        (DENOISER, "transformer/diffusion_pytorch_model.fp16.safetensors", f"'{ID}' has no {DENOISER}"),
        (DENOISER, "transformer/diffusion_pytorch_model.bin", f"'{ID}' has no {DENOISER}"),
        (DENOISER, "elsewhere.safetensors", f"'{ID}' has no {DENOISER}"),
        ("model_index.json", "index.json", f"'{ID}' has no model_index.json"),
    ],
)
def test_missing_files_are_refused_before_weights_are_fetched(
    server: HubServer, files: dict[str, bytes], lost: str, instead: str, reason: str
) -> None:
    server.push(ID, {**without(files, lost), instead: files[lost]})
    with pytest.raises(BadFolder, match=reason):
        fetch(ID, None)
    assert not server.gets(".safetensors")


def test_too_large_index_is_not_downloaded(
    pushed: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "MOST_VOCABULARY_BYTES", len(files["model_index.json"]) - 1)
    with pytest.raises(BadFolder, match=f"'{ID}' has no model_index.json"):
        fetch(ID, None)
    assert {request.path for request in pushed.gets()} == {"api"}


# --- interrupted, cut off, damaged ------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", [False, True])
def test_interrupt_cancels_download_at_once(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    old = server.push(ID, text(files, "scheduler/scheduler_config.json", snr_shift_scale=2.0))
    fetch(ID, None)
    shutil.rmtree(Path(constants.HF_HUB_CACHE) / "models--owner--small-video" / "blobs")
    server.push(ID, files)
    server.requests.clear()
    if hangs:
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10 * HANG_SECONDS)  # the library does not give up
        server.faults.hang = {DENOISER}
    else:
        server.faults.seconds_per_block = 0.05

    def progress(done: int, _total: int, _text: str) -> None:
        if done and server.gets(DENOISER):
            raise Stop

    with pytest.raises(Stop):
        fetch(ID, None, progress=progress)
    assert not is_cached()
    refs = Path(constants.HF_HUB_CACHE).rglob("refs/main")
    assert [ref.read_text() for ref in refs] == [old], "the branch does not move to an incomplete commit"
    server.released.set()
    with hub._xet_is_off:  # once the library's threads have ended
        assert sum(request.sent for request in server.gets(DENOISER)) < len(files[DENOISER])
    server.faults.hang, server.faults.seconds_per_block = set(), 0
    assert files_of(fetch(ID, None)) == files and is_cached()


@pytest.mark.parametrize("times", [1, 99])
def test_truncated_response_is_fetched_again(
    pushed: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda _s: None)  # between the library's own attempts
    pushed.faults.cut = {DENOISER: times}
    with suppress(HubError) if times == 1 else pytest.raises(HubError):  # newer versions go on by themselves
        fetch(ID, None)
    assert times == 1 or not is_cached()
    pushed.faults.cut = {}
    assert files_of(fetch(ID, None)) == files and is_cached()


def test_wrong_checksum_is_refused_and_file_fetched_again(pushed: HubServer, files: dict[str, bytes]) -> None:
    path = next(name for name in files if name.startswith("transformer/") and name.endswith(".safetensors"))
    pushed.faults.corrupt = {path}
    with pytest.raises(HubError, match=f"{Path(path).name} does not match.*deleted. Run again"):
        fetch(ID, None)
    pushed.faults.corrupt = set()
    assert files_of(fetch(ID, None)) == files


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(
    "file", [DENOISER, "model_index.json", "tokenizer/spiece.model", "transformer/config.json", "vae/config.json"]
)
def test_damaged_copy_is_refused_and_fetched_again(
    pushed: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, file: str, links: bool
) -> None:
    if not links:  # Windows without developer mode
        monkeypatch.setattr(file_download, "are_symlinks_supported", lambda _path=None: False)
    damaged = fetch(ID, None) / file
    assert damaged.is_symlink() == links
    for damage in (
        lambda: damaged.resolve().unlink(),  # its blob: the link leads nowhere now
        lambda: damaged.unlink(),
        lambda: damaged.resolve().write_bytes(files[file][: len(files[file]) // 2]),
    ):
        damage()
        with pytest.raises(BadFolder):
            fetch(ID, None, download=False)
        pushed.requests.clear()
        assert files_of(fetch(ID, None)) == files
        assert {request.path for request in pushed.gets()} <= {"api", file}


def test_low_disk_space_ends_fetch_before_weights(pushed: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda _path: SimpleNamespace(free=10_000))
    with pytest.raises(HubError, match=r"needs 0.0 GB more in .*cache, where 0.0 GB are free.*HF_HOME"):
        fetch(ID, None)
    assert {request.path for request in pushed.gets()} == {"api", "model_index.json"}


def test_full_disk_is_reported(pushed: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    write, full = file_download.http_get, OSError(errno.ENOSPC, "No space left on device")

    def http_get(url: str, *rest: Any, **options: Any) -> None:
        if url.endswith(DENOISER):
            raise full
        write(url, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", http_get)
        with pytest.raises(HubError, match=r"No space left.*HF_HOME"):
            fetch(ID, None)
    assert not is_cached()
    assert files_of(fetch(ID, None)) == files
