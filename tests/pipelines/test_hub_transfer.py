"""Downloads that are interrupted, cut off or damaged: nothing is lost, and nothing counts as whole that is not."""

from __future__ import annotations

import errno
import subprocess
import sys
from contextlib import suppress
from os import environ
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.pipelines.errors import HubError
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models import hub_transfer
from comfyui_onediff_guard.pipelines.models.hub import fetch
from hub_files import DENOISER, ID, Stop, files_of, in_cache, partials, stop_after
from hub_server import BLOCK, HANG_SECONDS, HubServer
from huggingface_hub import constants, file_download
from huggingface_hub.utils import WeakFileLock


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


def test_an_interrupt_does_not_wait_for_a_hub_that_hangs(
    server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.push(ID, files)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 10 * HANG_SECONDS)  # the library does not give up first
    server.faults.hang = {DENOISER}

    def progress(done: int, total: int, _text: str) -> None:
        if total and done > total - len(files[DENOISER]):  # all else is there
            raise Stop

    with pytest.raises(Stop):
        fetch(ID, None, COGVIDEOX, progress=progress)
    assert len(server.hanging) == 1, "it hangs on, and nobody waits for it"
    server.faults.hang = set()
    assert files_of(fetch(ID, None, COGVIDEOX)) == files, "what hangs from before does no harm"


def test_a_killed_process_leaves_what_it_had(files: dict[str, bytes], server: HubServer) -> None:
    server.push(ID, files)
    server.faults.seconds_per_block = 0.03
    code = (
        "import os, sys; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 2 ** 15\n"
        "from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX\n"
        "from comfyui_onediff_guard.pipelines.models.hub import fetch\n"
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
    monkeypatch.setattr(hub_transfer.shutil, "disk_usage", lambda _path: SimpleNamespace(free=10_000))
    with pytest.raises(HubError, match=r"needs 0.0 GB more in .*cache, where 0.0 GB are free.*HF_HOME"):
        fetch(ID, None, COGVIDEOX)
    assert not server.gets(".safetensors")


def test_a_disk_that_gets_full(server: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    server.push(ID, files)
    write = hub_transfer._Partial.write

    def full(self: Any, data: Any) -> int:
        if self.tell() > 20 * BLOCK:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(hub_transfer._Partial, "write", full)
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
