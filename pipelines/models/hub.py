"""Models from the hub: what a family needs of a repository, fetched into huggingface_hub's own cache.

huggingface_hub resolves, authenticates, retries and lays out the cache. Files with code are never asked for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import BadFolder, HubError
from ..families.spec import FamilySpec
from ..small_files import MOST_CONFIG_BYTES, MOST_VOCABULARY_BYTES, read_json
from .folder import family_of, inspect
from .hub_transfer import COMMIT, File, ProgressCallback, Transfer, storage_of
from .on_disk import name_of
from .weight_files import STEMS

logger = logging.getLogger(__name__)

_INDEX = "model_index.json"
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*", re.ASCII)


def fetch(
    hub_id: str,
    revision: str | None,
    *families: FamilySpec,
    download: bool = True,
    progress: ProgressCallback | None = None,
) -> Path:
    """Bring one commit of a hub repository into huggingface_hub's cache, and return its folder, which is whole.

    hub_id: "owner/name".
    revision: a branch, a tag or a commit; None is "main".
    families: what the repository may hold; its model_index.json says which.
    download: False (or HF_HUB_OFFLINE) uses only what is in the cache.
    progress: called some times a second with bytes done, bytes in all (0: not known yet) and the file under way. What
        it raises ends the download at once; the next call goes on where it ended.

    Raises HubError where the files cannot be had, and BadFolder where they are no whole model of these families. Either
    way what was downloaded stays for the next call, and no folder counts as whole that is not.
    """
    from huggingface_hub import constants

    revision = check_id(hub_id, revision)
    if not download or constants.HF_HUB_OFFLINE:
        return _from_cache(hub_id, revision, families)
    cached = None
    with suppress(HubError, BadFolder):
        cached = _from_cache(hub_id, revision, families)
    if cached and COMMIT.fullmatch(revision):
        return cached
    transfer = Transfer(hub_id, revision, progress or (lambda *_: None))
    try:
        return _fetch(transfer, families, cached)
    except HubError as error:
        if not (cached and error.unreachable):
            raise
        logger.warning("%s Going on with the copy in the cache, commit %s.", error, cached.name)
        return cached
    finally:
        transfer.close()


def check_id(hub_id: str, revision: str | None = None) -> str:
    """Return the revision, "main" where none is given, without asking the hub.

    Raises HubError where the id or the revision cannot be one.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(hub_id)
        if hub_id.count("/") == 1 and all(map(_NAME.fullmatch, hub_id.split("/"))):
            if revision and (not _REVISION.fullmatch(revision) or ".." in revision):
                raise HubError("'{}' is no revision. Write a branch (main), a tag or a commit of 40 digits.", revision)
            return revision or "main"
    raise HubError(
        "'{}' is no hub id. Write owner/name as it stands on the model's page, such as THUDM/CogVideoX-2b: letters, "
        "digits, '-', '_' and '.', and one '/'.",
        hub_id,
    )


def _fetch(transfer: Transfer, families: Sequence[FamilySpec], cached: Path | None) -> Path:
    files = transfer.look_up()
    if cached != transfer.snapshot:
        if _INDEX not in files:
            raise BadFolder(
                "'{}' has no model_index.json: it is not in diffusers format. Name one that is.", transfer.hub_id
            )
        if files[_INDEX].size > MOST_CONFIG_BYTES:
            raise BadFolder(
                "'{}': model_index.json has {:,} bytes. Name another repository.", transfer.hub_id, files[_INDEX].size
            )
        with transfer.alone():
            transfer.get([files[_INDEX]])
            family = _family(transfer.snapshot, families)
            needed = _needed(files, family, transfer.hub_id)
            transfer.plan(needed)
            transfer.get([file for file in needed if not file.path.endswith(".safetensors")])
            _check_shards(transfer.snapshot, {file.path for file in needed})
            transfer.get(needed)
            _check_whole(transfer.snapshot, families)
    with suppress(OSError):  # so that a branch or a tag is found without the hub; a read-only cache goes without
        ref = transfer.storage / "refs" / transfer.revision
        if transfer.revision != transfer.snapshot.name:
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(transfer.snapshot.name, encoding="utf-8")
    return transfer.snapshot


def _needed(files: Mapping[str, File], family: FamilySpec, hub_id: str) -> list[File]:
    """Return the index, the configs, the vocabularies and one set of safetensors of each component.

    Raises BadFolder where a component has no safetensors.
    """
    paths = [_INDEX]
    for component, spec in family.components.items():
        there = sorted(path.removeprefix(f"{component}/") for path in files if path.startswith(f"{component}/"))
        names = [name for name in there if _NAME.fullmatch(name)]
        configs = (name for name in names if name.endswith(".json") and ".index." not in name)
        small = list(configs) if spec.weights else [name for name in names if name in spec.files]
        stem = STEMS[spec.library]
        weights = _weights(names, stem) if spec.weights else []
        if spec.weights and not weights:
            raise BadFolder(
                "'{}/{}' holds {}, but no {}.safetensors, whole or in shards. Pickled weights can run code and are "
                "refused, a variant such as fp16 alone is not taken. Name another repository or revision.",
                hub_id,
                component,
                ", ".join(sorted({*there} - {*small})) or "no weights",
                stem,
            )
        paths += [f"{component}/{name}" for name in (*small, *weights)]
    return [files[path] for path in paths if path.endswith(".safetensors") or files[path].size <= MOST_VOCABULARY_BYTES]


def _weights(names: Sequence[str], stem: str) -> list[str]:
    """Return the names of one set of weights. The single file comes first: with it alone, no library looks for an
    index."""
    if f"{stem}.safetensors" in names:
        return [f"{stem}.safetensors"]
    if (index := f"{stem}.safetensors.index.json") in names:
        return [index, *filter(re.compile(rf"{stem}-\d+-of-\d+\.safetensors").fullmatch, names)]
    return []


def _family(snapshot: Path, families: Sequence[FamilySpec]) -> FamilySpec:
    """Return the family whose classes model_index.json names. Raises BadFolder where it is none of these."""
    family, index = family_of(snapshot), read_json(snapshot / _INDEX)
    if family.pipeline not in [known.pipeline for known in families]:
        pipelines, names = (" or a ".join(getattr(known, key) for known in families) for key in ("pipeline", "name"))
        raise BadFolder(
            "'{}' holds a {}, not a {}. It belongs to {}. Name a {} repository.",
            name_of(snapshot),
            family.pipeline,
            pipelines,
            family.name,
            names,
        )
    for name, component in family.components.items():
        entry = index.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[1] not in component.classes:
            raise BadFolder(
                "'{}': model_index.json names {} as {}, but a {} is needed. Name the original repository.",
                name_of(snapshot),
                entry or "nothing",
                name,
                " or a ".join(component.classes),
            )
    return family


def _check_shards(snapshot: Path, needed: set[str]) -> None:
    """Raise BadFolder where an index names a shard that will not be fetched."""
    for index in (path for path in needed if path.endswith(".index.json")):
        shards = read_json(snapshot / index).get("weight_map")
        names = map(str, shards.values()) if isinstance(shards, dict) else ["no weight_map"]
        missing = sorted({name for name in names if f"{index.split('/')[0]}/{name}" not in needed})
        if missing:
            raise BadFolder(
                "'{}': {} names {}. Name a repository that has it.", name_of(snapshot), index, ", ".join(missing)
            )


def _check_whole(snapshot: Path, families: Sequence[FamilySpec]) -> None:
    """Check all that `inspect` does, and what it does not look for: links that lead nowhere.

    Raises BadFolder.
    """
    if lost := sorted(str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if not path.exists()):
        raise BadFolder("'{}' lost {}.", name_of(snapshot), ", ".join(lost))
    inspect(snapshot, _family(snapshot, families))


def _from_cache(hub_id: str, revision: str, families: Sequence[FamilySpec]) -> Path:
    """Return the snapshot in the cache. Raises HubError where it is not there, BadFolder where it is not whole."""
    storage, commit = storage_of(hub_id), revision
    with suppress(OSError, UnicodeDecodeError):
        commit = (storage / "refs" / revision).read_text(encoding="utf-8").strip()
    snapshot = storage / "snapshots" / commit
    off = "Downloads are turned off: turn them on (`download`; HF_HUB_OFFLINE unset), or choose a model folder."
    if not COMMIT.fullmatch(commit) or not snapshot.is_dir():
        raise HubError("'{}' at '{}' is not in the cache ({}). {}", hub_id, revision, storage.parent, off)
    try:
        _check_whole(snapshot, families)
    except BadFolder as error:
        raise BadFolder("{} That is the copy in the cache. {}", error, off) from None
    return snapshot
