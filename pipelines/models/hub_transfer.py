"""Download files of one commit of a hub repository into huggingface_hub's cache.

The `hf_hub_download` of newer versions of the library deletes partial files, with which the next call could go on. So
each file is streamed by the library's `http_get` into a partial file among the blobs, checked against the hub's hash
and renamed to its blob. Then `hf_hub_download` is asked for the file, finds the blob and links it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ...trust.message import Message
from ..errors import HubError

COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's sha1, or sha256 of a file in LFS: names of blobs
_AT_ONCE = 4  # files
_POLL = 0.2  # s between two calls of the progress callback: the longest that an interrupt waits

ProgressCallback = Callable[[int, int, str], None]


class File(NamedTuple):
    """A file of the repository."""

    path: str  # in the repository
    size: int  # bytes
    blob: str  # its hash, and its name in the cache


def storage_of(hub_id: str) -> Path:
    """Return the repository's folder in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=hub_id, repo_type="model")


def _size(file: Path) -> int:
    """Return how many bytes a file has; -1 where there is none."""
    with suppress(OSError):
        return file.stat().st_size
    return -1


class Transfer:
    """The download of one commit's files, on threads of its own, which write nothing more once it is closed."""

    def __init__(self, hub_id: str, revision: str, progress: ProgressCallback):
        self.hub_id = hub_id
        self.revision = revision
        self.storage = storage_of(hub_id)
        self.snapshot = self.storage / "snapshots"  # /commit, once that is known
        self.done: dict[str, int] = {}  # bytes of each file
        self.writing = threading.Lock()
        self.closed = False
        self._total = 0  # bytes
        self._text = Message("looking for {}", hub_id)
        self._tick = lambda: progress(sum(self.done.values()) if self._total else 0, self._total, self._text)

    def close(self) -> None:
        with self.writing:
            self.closed = True

    def check(self) -> None:
        if self.closed:
            raise HubError("Nobody waits for this download any more.")

    def wrote(self, path: str, size: int) -> None:
        self.done[path], self._text = size, f"{self.hub_id}: {path}"

    def look_up(self) -> dict[str, File]:
        """Ask the hub for the commit. Returns its files by path, apart from those without a size or a hash.

        Raises HubError where the hub cannot be asked, or names no commit.
        """
        from huggingface_hub import HfApi, constants

        options = {"files_metadata": True, "timeout": float(constants.HF_HUB_ETAG_TIMEOUT)}
        (info,) = self._run([lambda: HfApi().model_info(self.hub_id, revision=self.revision, **options)])
        if not COMMIT.fullmatch(info.sha or ""):
            raise HubError("The hub's answer for '{}' names no commit. Check HF_ENDPOINT.", self.hub_id)
        self.snapshot /= info.sha
        files = {}
        for sibling in info.siblings or ():
            blob = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            if isinstance(sibling.size, int) and sibling.size >= 0 and isinstance(blob, str) and _HASH.fullmatch(blob):
                files[sibling.rfilename] = File(sibling.rfilename, sibling.size, blob)
        return files

    @contextmanager
    def alone(self) -> Generator[None]:
        """Make other processes wait while this one is inside, so that two never append to one partial file.

        Raises HubError where the lock cannot be written.
        """
        from huggingface_hub.utils import WeakFileLock

        path = self.storage.parent / ".locks" / self.storage.name / "onediff-guard.lock"
        with ExitStack() as stack:
            while True:
                self._tick()
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(WeakFileLock(path, timeout=_POLL))
                    break
                except TimeoutError:
                    self._text = Message("{}: another process is downloading it", self.hub_id)
                except OSError as error:
                    raise HubError.of(error, self.hub_id, self.revision) from error
            yield

    def plan(self, files: Sequence[File]) -> None:
        """Count the bytes that are there already. Raises HubError where the disk has no room for the rest."""
        self._total = sum(file.size for file in files)
        for path, size, blob in files:
            whole = size in (_size(self.snapshot / path), _size(self.storage / "blobs" / blob))
            self.done[path] = size if whole else min(max(_size(self._partial(path, blob)), 0), size)
        left, free = self._total - sum(self.done.values()), shutil.disk_usage(self.storage.parent).free
        if left > free:
            raise HubError(
                "'{}' needs {:.1f} GB more in {}, where {:.1f} GB are free. Make room, or set HF_HOME to a folder on "
                "a larger disk.",
                self.hub_id,
                left / 1e9,
                self.storage.parent,
                free / 1e9,
            )

    def get(self, files: Sequence[File]) -> None:
        """Download what is missing, until all files are in the snapshot.

        Raises HubError, or what the progress callback raises.
        """
        missing = [file for file in files if _size(self.snapshot / file.path) != file.size]
        self._run([lambda file=file: self._bring(file) for file in missing])

    def _run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Do the jobs on threads, call `progress` meanwhile, and return their results. The first error is raised at
        once; a thread that hangs in the network by then ends by itself, with the library's timeouts."""
        gate = threading.Semaphore(_AT_ONCE)
        futures = [Future[Any]() for _ in jobs]

        def work(job: Callable[[], Any], future: Future[Any]) -> None:
            with gate:
                try:
                    self.check()
                    future.set_result(job())
                except Exception as error:  # noqa: BLE001, the caller's thread raises it
                    future.set_exception(HubError.of(error, self.hub_id, self.revision))
                except BaseException as error:  # noqa: BLE001, a panic in a library of Rust's is no Exception
                    future.set_exception(error)

        for job, future in zip(jobs, futures, strict=True):
            threading.Thread(target=work, args=(job, future), daemon=True).start()
        left = set(futures)
        while left:
            self._tick()
            ended, left = wait(left, timeout=_POLL, return_when=FIRST_EXCEPTION)
            for future in ended:
                future.result()
        self._tick()
        return [future.result() for future in futures]

    def _partial(self, path: str, blob: str) -> Path:
        return self.storage / "blobs" / f"{blob[:16]}.{path.replace('/', '.')}.incomplete"

    def _bring(self, file: File) -> None:
        from huggingface_hub import hf_hub_download

        blob, link = self.storage / "blobs" / file.blob, self.snapshot / file.path
        if _size(blob) != file.size:
            blob.parent.mkdir(parents=True, exist_ok=True)
            partial = self._download(file)
            with self.writing:
                self.check()
                os.replace(partial, blob)
        link.unlink(missing_ok=True)  # it is not whole, or it would not have to be brought
        hf_hub_download(self.hub_id, file.path, revision=self.snapshot.name)
        if not link.is_symlink():  # where there are no links, the library has copied
            blob.unlink(missing_ok=True)
        self.wrote(file.path, file.size)

    def _download(self, file: File) -> Path:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        partial = self._partial(file.path, file.blob)
        if _size(partial) > file.size:
            partial.unlink()
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}  # a compressed answer could not be resumed
        if getattr(constants, "HF_HUB_ENABLE_HF_TRANSFER", False):
            headers["Range"] = "bytes=0-"  # keeps http_get from a downloader that cannot resume either
        url = hf_hub_url(self.hub_id, file.path, revision=self.snapshot.name)
        with _Partial(partial, file, self) as stream:
            bar = SimpleNamespace(update=lambda _n: None)  # none beside the host's
            options: dict[str, Any] = {"temp_file": stream, "_tqdm_bar": bar}
            http_get(url, resume_size=stream.tell(), expected_size=file.size, headers=headers, **options)
        self._text = Message("{}: checking {}", self.hub_id, file.path)
        digest = hashlib.sha256() if len(file.blob) == 64 else hashlib.sha1(b"blob %d\0" % file.size)
        with partial.open("rb") as written:
            while block := written.read(2**22):
                self.check()
                digest.update(block)
        if digest.hexdigest() != file.blob:
            partial.unlink()
            raise HubError(
                "'{}': {} has other bytes than the hub's checksum promises, and was deleted. Run it again; if it "
                "stays so, look for a proxy or a mirror that changes files.",
                self.hub_id,
                file.path,
            )
        return partial


class _Partial(io.FileIO):
    """The file that a download is appended to. It tells how far that is, and ends one that nobody waits for."""

    def __init__(self, path: Path, file: File, transfer: Transfer):
        super().__init__(path, "ab")
        self._file = file
        self._transfer = transfer

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        if self.tell() + len(left) > self._file.size:
            raise HubError(
                "'{}': the hub sends more of {} than the {:,} bytes that it promised. Check HF_ENDPOINT, and look for "
                "a proxy that changes files.",
                self._transfer.hub_id,
                self._file.path,
                self._file.size,
            )
        with self._transfer.writing:
            while left:
                self._transfer.check()
                left = left[super().write(left) :]
            self._transfer.wrote(self._file.path, self.tell())
        return len(data)
