"""Models from the hub: what a family needs of a repository, fetched into huggingface_hub's own cache.

huggingface_hub resolves, authenticates, retries and lays out the cache. What its newer versions lack is a partial file
that the next call goes on with: their `hf_hub_download` deletes it. So each file is streamed by the library's
`http_get` into a partial file among the blobs, checked against the hub's hash and renamed to its blob;
`hf_hub_download` is asked for it then, finds the blob and links it. Files with code are never asked for.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from .errors import BadFolder, HubError
from .families import FamilySpec
from .folder import family_of, inspect, read_json

logger = logging.getLogger(__name__)

_INDEX = "model_index.json"
_STEMS = ("diffusion_pytorch_model", "model")  # in the order in which pipelines.folder looks for them
_SMALL = (".json", ".txt", ".model")  # configs and vocabularies
_SMALL_BYTES = 64 * 2**20  # the largest real one is a tokenizer.json of 20 MB
_VOCABULARIES = ("spiece.model", "tokenizer.model", "tokenizer.json", "vocab.json")
_AT_ONCE = 4  # files
_POLL = 0.2  # s between two calls of the progress callback: the longest that an interrupt waits
_COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # git's sha1, or sha256 of a file in LFS: names of blobs
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)

ProgressCallback = Callable[[int, int, str], None]


class _File(NamedTuple):
    path: str  # in the repository
    size: int  # bytes
    blob: str  # its hash, and its name in the cache


def fetch(
    hub_id: str,
    revision: str | None,
    family: FamilySpec,
    *,
    download: bool = True,
    progress: ProgressCallback | None = None,
) -> Path:
    """The folder of one commit of a hub repository, whole, in huggingface_hub's cache.

    Args:
        hub_id: "owner/name".
        revision: a branch, a tag or a commit; None is "main".
        download: False (or HF_HUB_OFFLINE) uses only what is in the cache.
        progress: called some times a second with bytes done, bytes in all (0: not known yet) and the file under way.
            What it raises ends the download at once; the next call goes on where it ended.

    Raises HubError where it cannot be had, BadFolder where it is no whole model of the family. Either way what was
    downloaded stays for the next call, and no folder counts as whole that is not.
    """
    from huggingface_hub import constants

    revision = check_id(hub_id, revision)
    if not download or constants.HF_HUB_OFFLINE:
        return _from_cache(hub_id, revision, family)
    cached = None
    with suppress(HubError, BadFolder):
        cached = _from_cache(hub_id, revision, family)
    if cached and _COMMIT.fullmatch(revision):
        return cached
    transfer = _Transfer(hub_id, revision, progress or (lambda *_: None))
    try:
        return _fetch(transfer, family, cached)
    except HubError as error:
        if not (cached and error.unreachable):
            raise
        logger.warning("%s Going on with the copy in the cache, commit %s.", error, cached.name)
        return cached
    finally:
        transfer.close()


def check_id(hub_id: str, revision: str | None = None) -> str:
    """The revision, "main" where none is given. Raises HubError where id or revision cannot be one; asks nobody."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(hub_id)
        if hub_id.count("/") == 1 and all(map(_NAME.fullmatch, hub_id.split("/"))):
            if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
                raise HubError(f"'{revision}' is no revision. Write a branch (main), a tag or a commit of 40 digits.")
            return revision or "main"
    raise HubError(
        f"'{hub_id}' is no hub id. Write owner/name as it stands on the model's page, such as THUDM/CogVideoX-2b: "
        "letters, digits, '-', '_' and '.', and one '/'."
    )


def _fetch(transfer: _Transfer, family: FamilySpec, cached: Path | None) -> Path:
    files = transfer.look_up()
    if cached != transfer.snapshot:
        if _INDEX not in files:
            raise BadFolder(f"'{transfer.hub_id}' has no {_INDEX}: it is not in diffusers format. Name one that is.")
        with transfer.alone(), _named(transfer.hub_id):
            transfer.get([files[_INDEX]])
            _check_pipeline(transfer.snapshot, family)
            needed = _needed(files, family, transfer.hub_id)
            transfer.plan(needed)
            transfer.get([file for file in needed if not file.path.endswith(".safetensors")])
            _check_shards(transfer.snapshot, {file.path for file in needed})
            transfer.get(needed)
            _check_whole(transfer.snapshot, family)
    with suppress(OSError):  # so that a branch or a tag is found without the hub; a read-only cache goes without
        ref = transfer.storage / "refs" / transfer.revision
        if transfer.revision != transfer.snapshot.name:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(transfer.snapshot.name, encoding="utf-8")
    return transfer.snapshot


def _needed(files: Mapping[str, _File], family: FamilySpec, hub_id: str) -> list[_File]:
    """The index, configs, vocabularies and one set of safetensors of each component. Raises BadFolder."""
    paths = [_INDEX]
    for component, spec in family.components.items():
        there = sorted(path.removeprefix(f"{component}/") for path in files if path.startswith(f"{component}/"))
        names = [name for name in there if _NAME.fullmatch(name)]
        small = [name for name in names if name.endswith(_SMALL) and ".index." not in name]
        weights = _weights(names) if spec.weights else []
        if spec.weights and not weights:
            raise BadFolder(
                f"'{hub_id}/{component}' holds {', '.join(sorted({*there} - {*small})) or 'no weights'}, but no "
                f"{' or '.join(f'{stem}.safetensors' for stem in _STEMS)}, whole or in shards. Pickled weights can run "
                "code and are refused, a variant such as fp16 alone is not taken. Name another repository or revision."
            )
        paths += [f"{component}/{name}" for name in (*small, *weights)]
    return [files[path] for path in paths if path.endswith(".safetensors") or files[path].size <= _SMALL_BYTES]


def _weights(names: Sequence[str]) -> list[str]:
    for stem in _STEMS:
        if f"{stem}.safetensors" in names:
            return [f"{stem}.safetensors"]
        if (index := f"{stem}.safetensors.index.json") in names:
            return [index, *filter(re.compile(rf"{stem}-\d+-of-\d+\.safetensors").fullmatch, names)]
    return []


def _check_pipeline(snapshot: Path, family: FamilySpec) -> None:
    """Classes, by model_index.json alone. Raises BadFolder."""
    found, index = family_of(snapshot), read_json(snapshot / _INDEX)
    if found is not family:
        what = f"holds a {found.pipeline}, not a {family.pipeline}. It belongs to {found.name}"
        raise BadFolder(f"'{snapshot.name}' {what}. Name a {family.name} repository.")
    for name, component in family.components.items():
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[1] not in component.classes:
            what = f"names {entry or 'nothing'} as {name}, but a {' or a '.join(component.classes)} is needed"
            raise BadFolder(f"'{snapshot.name}': {_INDEX} {what}. Name the original repository.")


def _check_shards(snapshot: Path, needed: set[str]) -> None:
    """The shards that an index names are those that will be fetched. Raises BadFolder."""
    for index in (path for path in needed if path.endswith(".index.json")):
        shards = read_json(snapshot / index).get("weight_map")
        names = map(str, shards.values()) if isinstance(shards, dict) else ["no weight_map"]
        missing = sorted({name for name in names if f"{index.split('/')[0]}/{name}" not in needed})
        if missing:
            raise BadFolder(f"'{snapshot.name}': {index} names {', '.join(missing)}. Name a repository that has it.")


def _check_whole(snapshot: Path, family: FamilySpec) -> None:
    """`inspect`, and what it doesn't look for: links that lead nowhere, vocabularies. Raises BadFolder."""
    if lost := sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if not path.exists()):
        raise BadFolder(f"'{snapshot.name}' lost {', '.join(lost)}.")
    classes = inspect(snapshot, family).classes
    for name, spec in family.components.items():
        wanted = _VOCABULARIES if "Tokenizer" in classes[name] else (".json",)
        if not spec.weights and not any(file.name.endswith(wanted) for file in (snapshot / name).iterdir()):
            raise BadFolder(f"'{snapshot.name}/{name}' has no {' or '.join(wanted)}. Name the original repository.")


@contextmanager
def _named(hub_id: str, more: str = "") -> Generator[None]:
    """Messages about a folder name the repository, not the commit that the folder is called after."""
    try:
        yield
    except BadFolder as error:
        raise BadFolder(_COMMIT.sub(hub_id, str(error)) + more) from None


def _storage(hub_id: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).expanduser() / repo_folder_name(repo_id=hub_id, repo_type="model")


def _from_cache(hub_id: str, revision: str, family: FamilySpec) -> Path:
    """The snapshot, if it is there and whole. Raises HubError, BadFolder."""
    storage, commit = _storage(hub_id), revision
    with suppress(OSError, UnicodeDecodeError):
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    snapshot = storage / "snapshots" / commit
    off = "Downloads are turned off: turn them on (`download`; HF_HUB_OFFLINE unset), or choose a model folder."
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        raise HubError(f"'{hub_id}' at '{revision}' is not in the cache ({storage.parent}). {off}")
    with _named(hub_id, f" That is the copy in the cache. {off}"):
        _check_whole(snapshot, family)
    return snapshot


def _size(file: Path) -> int:
    """Bytes; -1 where there is no file."""
    with suppress(OSError):
        return file.stat().st_size
    return -1


class _Transfer:
    """Brings files of one commit into the cache on threads of its own, which write nothing more once it is closed."""

    def __init__(self, hub_id: str, revision: str, progress: ProgressCallback):
        self.hub_id = hub_id
        self.revision = revision
        self.storage = _storage(hub_id)
        self.snapshot = self.storage / "snapshots"  # /commit, once that is known
        self.done: dict[str, int] = {}  # bytes of each file
        self.writing = threading.Lock()
        self.closed = False
        self._total = 0  # bytes
        self._text = f"looking for {hub_id}"
        self._tick = lambda: progress(sum(self.done.values()) if self._total else 0, self._total, self._text)

    def close(self) -> None:
        with self.writing:
            self.closed = True

    def check(self) -> None:
        if self.closed:
            raise HubError("Nobody waits for this download any more.")

    def wrote(self, path: str, size: int) -> None:
        self.done[path], self._text = size, f"{self.hub_id}: {path}"

    def look_up(self) -> dict[str, _File]:
        """Learn the commit. Returns its files by path, apart from those without a size or a hash."""
        from huggingface_hub import HfApi, constants

        options = {"files_metadata": True, "timeout": float(constants.HF_HUB_ETAG_TIMEOUT)}
        (info,) = self._run([lambda: HfApi().model_info(self.hub_id, revision=self.revision, **options)])
        if not _COMMIT.fullmatch(info.sha or ""):
            raise HubError(f"The hub's answer for '{self.hub_id}' names no commit. Check HF_ENDPOINT.")
        self.snapshot /= info.sha
        files = {}
        for sibling in info.siblings or ():
            blob = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            if isinstance(sibling.size, int) and isinstance(blob, str) and _HASH.fullmatch(blob):
                files[sibling.rfilename] = _File(sibling.rfilename, sibling.size, blob)
        return files

    @contextmanager
    def alone(self) -> Generator[None]:
        """Other processes wait for this one, so that two never append to one partial file."""
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
                    self._text = f"{self.hub_id}: another process is downloading it"
                except OSError as error:
                    raise HubError.of(error, self.hub_id, self.revision) from error
            yield

    def plan(self, files: Sequence[_File]) -> None:
        """Counts what is there. Raises HubError where there is no room for the rest."""
        self._total = sum(file.size for file in files)
        for path, size, blob in files:
            whole = size in (_size(self.snapshot / path), _size(self.storage / "blobs" / blob))
            self.done[path] = size if whole else min(max(_size(self._partial(path, blob)), 0), size)
        left, free = self._total - sum(self.done.values()), shutil.disk_usage(self.storage.parent).free
        if left > free:
            raise HubError(
                f"'{self.hub_id}' needs {left / 1e9:.1f} GB more in {self.storage.parent}, where {free / 1e9:.1f} GB "
                "are free. Make room, or set HF_HOME to a folder on a larger disk."
            )

    def get(self, files: Sequence[_File]) -> None:
        """Returns when all are in the snapshot. Raises what the progress callback raises, or HubError."""
        missing = [file for file in files if _size(self.snapshot / file.path) != file.size]
        self._run([lambda file=file: self._bring(file) for file in missing])

    def _run(self, jobs: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the jobs return, done by threads while progress is told; the first error is raised at once.
        A thread that hangs in the network by then ends by itself, with the library's timeouts."""
        gate = threading.Semaphore(_AT_ONCE)
        futures = [Future[Any]() for _ in jobs]

        def work(job: Callable[[], Any], future: Future[Any]) -> None:
            with gate:
                try:
                    self.check()
                    future.set_result(job())
                except Exception as error:  # noqa: BLE001, the caller's thread raises it
                    future.set_exception(HubError.of(error, self.hub_id, self.revision))

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

    def _bring(self, file: _File) -> None:
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

    def _download(self, file: _File) -> Path:
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
        with _Partial(partial, file.path, self) as stream:
            bar = SimpleNamespace(update=lambda _n: None)  # none beside the host's
            options: dict[str, Any] = {"temp_file": stream, "_tqdm_bar": bar}
            http_get(url, resume_size=stream.tell(), expected_size=file.size, headers=headers, **options)
        self._text = f"{self.hub_id}: checking {file.path}"
        digest = hashlib.sha256() if len(file.blob) == 64 else hashlib.sha1(b"blob %d\0" % file.size)
        with partial.open("rb") as written:
            while block := written.read(2**22):
                self.check()
                digest.update(block)
        if digest.hexdigest() != file.blob:
            partial.unlink()
            raise HubError(
                f"'{self.hub_id}': {file.path} has other bytes than the hub's checksum promises, and was deleted. "
                "Run it again; if it stays so, look for a proxy or a mirror that changes files."
            )
        return partial


class _Partial(io.FileIO):
    """What a download is appended to: it tells how far it is, and ends a download that nobody waits for."""

    def __init__(self, path: Path, name: str, transfer: _Transfer):
        super().__init__(path, "ab")
        self._inside = name  # its path in the repository
        self._transfer = transfer

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        with self._transfer.writing:
            while left:
                self._transfer.check()
                left = left[super().write(left) :]
            self._transfer.wrote(self._inside, self.tell())
        return len(data)
