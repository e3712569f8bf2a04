"""Models from the hub: the real huggingface_hub against a hub on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_onediff_guard.pipelines.errors import BadFolder, HubError
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.hub import check_id, fetch
from hub_files import DENOISER, ID, files_of, in_cache, text, without
from hub_server import HubServer

BY_ENVIRONMENT = """
import sys
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.handle import load
from comfyui_onediff_guard.pipelines.models.hub import fetch
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
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


# --- ids and revisions ------------------------------------------------------------------------------------------------


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
