"""Downloads a model from the Hugging Face Hub into huggingface_hub's cache, and checks it there.

huggingface_hub resolves, authenticates, retries and lays out the cache. Code in a repository is never downloaded.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, errors, hf_hub_download, snapshot_download, try_to_load_from_cache
from tqdm import tqdm

from ...trust.message import Message
from ..errors import BadFolder, HubError
from ..families.spec import FamilySpec
from ..small_files import MOST_VOCABULARY_BYTES, read_json
from .folder import INDEX, component_class, family_of, inspect
from .on_disk import name_of
from .weight_files import STEMS

logger = logging.getLogger(__name__)

_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)
_ADDRESS = re.compile(  # of a model's page, or of a revision's page
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([^/?#]+/[^/?#]+)(?:/(?:tree|blob)/([^/?#]+))?.*"
)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)
_POLL_SECONDS = 0.2  # between two calls of `progress`: the longest that an interrupt waits
_xet_is_off = threading.Lock()  # one download at a time

ProgressCallback = Callable[[int, int, str], None]  # bytes done, bytes in all (0: not known yet), a line of text


def fetch(
    hub_id: str,  # "owner/name", or the address of its page
    revision: str | None,  # a branch, a tag or a commit; None is "main"
    *,
    download: bool = True,  # False (or HF_HUB_OFFLINE) uses only what is in the cache
    progress: ProgressCallback = lambda *_: None,  # called several times a second; what it raises cancels the download
) -> Path:
    """Download one commit of a repository into huggingface_hub's cache. Return its folder, which passed all checks.

    Raises HubError where the files cannot be had, and BadFolder where they are no complete model of a known family.
    """
    if address := _ADDRESS.fullmatch(hub_id):
        hub_id, revision = address[1], revision or address[2]
    revision = revision or "main"
    if not _ID.fullmatch(hub_id):
        raise HubError("'{}' is not a repository id; use owner/name.", hub_id)
    if not _REVISION.fullmatch(revision):
        raise HubError("'{}' is not a revision; use a branch, a tag or a commit.", revision)
    if not download or constants.HF_HUB_OFFLINE:
        return _from_cache(hub_id, revision)
    cached = None
    with suppress(HubError, BadFolder):
        cached = _from_cache(hub_id, revision)
    if cached and cached.name == revision:
        return cached
    try:
        return _Download(hub_id, revision, progress).run(cached)
    except HubError as error:
        if not (cached and error.unreachable):
            raise
        logger.warning("%s Using the copy in the cache, commit %s.", error, cached.name)
        return cached


def _from_cache(hub_id: str, revision: str) -> Path:
    """Return the commit's folder in the cache. Raises HubError if there is none, BadFolder if it is damaged."""
    off = "Downloads are turned off: turn them on (`download`; HF_HUB_OFFLINE unset), or choose a model folder."
    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=[], local_files_only=True))
    except (OSError, ValueError):
        raise HubError("'{}' at '{}' is not in the cache. {}", hub_id, revision, off) from None
    try:
        return _checked(folder)
    except BadFolder as error:
        raise BadFolder("{} This is the copy in the cache. {}", error, off) from None


def _checked(folder: Path) -> Path:
    """Check a folder by `inspect`, and that no link is broken. Raises BadFolder."""
    if lost := sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.exists()):
        raise BadFolder("'{}' is incomplete: {} is missing.", name_of(folder), ", ".join(lost))
    return inspect(folder, family_of(folder)).path


def _needed(paths: Collection[str], family: FamilySpec, hub_id: str) -> list[str]:
    """Return the index, and of each component its configs or vocabularies and one set of safetensors. Raises BadFolder
    where a component has no safetensors."""
    needed = [INDEX]
    for name, spec in family.components.items():
        if not spec.weights:
            needed += [f"{name}/{file}" for file in spec.files if f"{name}/{file}" in paths]
            continue
        configs = re.compile(rf"{name}/[\w-]+\.json", re.ASCII)
        single = f"{name}/{STEMS[spec.library]}.safetensors"  # without an index, both libraries read this file
        shards = re.compile(rf"{name}/{STEMS[spec.library]}(-\d+-of-\d+\.safetensors|\.safetensors\.index\.json)")
        weights = [single] if single in paths else [*filter(shards.fullmatch, paths)]
        if not weights:
            raise BadFolder(
                "'{}' has no {}, neither as one file nor in shards. Other formats can run code and are refused; "
                "variants such as fp16 are not supported. Choose another repository or revision.",
                hub_id,
                single,
            )
        needed += [*filter(configs.fullmatch, paths), *weights]
    return needed


class _Download:
    """One download. huggingface_hub runs in another thread; meanwhile `progress` is called, and can cancel."""

    def __init__(self, hub_id: str, revision: str, progress: ProgressCallback):
        self._hub_id = hub_id
        self._revision = revision
        self._progress = progress
        self._text = Message("looking for {}", hub_id)
        self._sizes: dict[Path, int] = {}  # bytes of each file of the snapshot
        self._cached = 0  # bytes of files that were in the cache before
        self._byte_bars: list[Any] = []
        self._cancelled = threading.Event()

    def run(self, cached: Path | None) -> Path:
        """Download, check and return the commit's folder. cached: the revision's cached folder. Raises as `fetch`."""
        timeout = float(constants.HF_HUB_ETAG_TIMEOUT)
        info = self._call(HfApi().model_info, revision=self._revision, files_metadata=True, timeout=timeout)
        if cached and cached.name == info.sha:
            return cached
        sizes = {file.rfilename: file.size for file in info.siblings or () if file.size is not None}
        sizes = {k: n for k, n in sizes.items() if k.endswith(".safetensors") or n <= MOST_VOCABULARY_BYTES}
        folder = self._snapshot(info.sha, {INDEX: sizes[INDEX]} if INDEX in sizes else {})
        family, index = family_of(folder), read_json(folder, INDEX)
        for name, component in family.components.items():
            component_class(folder, index, name, component)
        needed = _needed(sizes, family, self._hub_id)
        self._expect({folder / path: sizes[path] for path in needed})
        checksums = {file.rfilename: file.lfs.sha256 for file in info.siblings or () if file.lfs}
        new = {path: checksums[path] for path in needed if path in checksums and not (folder / path).exists()}
        self._snapshot(info.sha, {path: sizes[path] for path in needed})
        for path, checksum in new.items():
            self._compare(folder / path, checksum)
        _checked(folder)
        self._call(hf_hub_download, filename=INDEX, revision=self._revision)  # notes the branch's commit in the cache
        return folder

    def _snapshot(self, commit: str, sizes: dict[str, int]) -> Path:
        """Download these files, again those of another size. sizes: in bytes, by path. Raises as `_call`."""
        for path, size in sizes.items():
            file = try_to_load_from_cache(self._hub_id, path, revision=commit)
            if isinstance(file, str) and Path(file).stat().st_size != size:
                Path(file).resolve().unlink()
        options = {"allow_patterns": [*sizes], "tqdm_class": self._bar_class()}
        return Path(self._call(snapshot_download, revision=commit, **options))

    def _compare(self, file: Path, checksum: str) -> None:
        """Delete a file and raise HubError if its SHA-256 differs: huggingface_hub compares only sizes."""
        found = hashlib.sha256()
        with file.open("rb") as content:
            while block := content.read(1 << 24):
                found.update(block)
                self._tell()
        if found.hexdigest() != checksum:
            file.resolve().unlink()
            file.unlink(missing_ok=True)
            raise HubError(
                "'{}': {} does not match the hub's checksum and was deleted. Run again; if it fails again, look for "
                "a proxy or a mirror that changes files.",
                self._hub_id,
                file.name,
            )

    def _expect(self, sizes: dict[Path, int]) -> None:
        """Count the bytes of files that are in the cache. Raises HubError if the disk has no space for the rest."""
        self._sizes, self._text = sizes, Message("downloading {}", self._hub_id)
        self._cached, cache = self._complete(), next(iter(sizes)).parents[3]
        missing, free = sum(sizes.values()) - self._cached, shutil.disk_usage(cache).free
        if missing > free:
            raise HubError(
                "'{}' needs {:.1f} GB more in {}, where {:.1f} GB are free. Free some space, or set HF_HOME to a "
                "folder on a larger disk.",
                *(self._hub_id, missing / 1e9, cache, free / 1e9),
            )

    def _complete(self) -> int:
        return sum(size for file, size in self._sizes.items() if file.exists())

    def _tell(self) -> None:
        received = max((bar.n for bar in self._byte_bars), default=0)  # no bars with huggingface_hub < 1.1
        self._progress(max(self._cached + received, self._complete()), sum(self._sizes.values()), self._text)

    def _call(self, function: Callable[..., Any], **options: Any) -> Any:
        """Call a function of huggingface_hub. Raises HubError, and `progress`'s exceptions at once."""
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self._without_xet, function, options)
        pool.shutdown(wait=False)
        try:
            while not wait([future], timeout=_POLL_SECONDS).done:
                self._tell()
            self._tell()
        except BaseException:
            self._cancelled.set()
            raise
        try:
            return future.result()
        except Exception as error:  # noqa: BLE001
            raise _explained(error, self._hub_id, self._revision) from None  # its text may have a token in an address

    def _without_xet(self, function: Callable[..., Any], options: dict[str, Any]) -> Any:
        """Call a function without hf_xet, whose downloads cannot be cancelled: it only prints a bar's exceptions."""
        with _xet_is_off:
            before, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
            try:
                return function(self._hub_id, **options)
            finally:
                constants.HF_HUB_DISABLE_XET = before

    def _bar_class(self) -> type:
        """Return a tqdm class that shows nothing, counts, and raises CancelledError once the download is cancelled."""
        download = self

        class Bar(tqdm):
            def __init__(self, *args: Any, **options: Any):
                super().__init__(*args, **{**options, "disable": True})
                self.counts_bytes = options.get("unit") == "B"  # another bar counts files
                if self.counts_bytes:
                    download._byte_bars.append(self)

            def update(self, n: float | None = 1) -> None:
                if self.counts_bytes and download._cancelled.is_set():
                    raise CancelledError
                self.n += n or 0

        return Bar


def _explained(error: Exception, hub_id: str, revision: str) -> HubError:
    """Return the HubError for an error of huggingface_hub, its HTTP library or the disk."""
    if isinstance(error, (errors.LocalEntryNotFoundError, ValueError)) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", 0)
    again = "Run again: complete files are kept."
    if status in (401, 403, 404, 410):
        return HubError(
            "The hub refuses '{}' at '{}' (HTTP {}). Check the spelling of both. If it is private or gated, accept "
            "its terms on its page, and set HF_TOKEN to a token that may read it.",
            *(hub_id, revision, status),
        )
    if isinstance(error, OSError) and error.errno and not isinstance(error, (ConnectionError, TimeoutError)):
        return HubError(
            "The cache cannot be written ({}). Free space, or set HF_HOME to a folder on another disk. {}", error, again
        )
    cause = f"HTTP {status}" if status else type(error).__name__  # its text may name an address with a token
    explained = HubError(
        "'{}' cannot be downloaded now ({}). Check the network, a proxy, and HF_ENDPOINT. {}", hub_id, cause, again
    )
    explained.unreachable = type(error) is not OSError  # a bare OSError is huggingface_hub's, for a wrong file size
    return explained
