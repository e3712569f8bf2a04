"""The files of a model folder beside its weights: configs, vocabularies, settings. Each is read whole, within a limit,
and checked; a library is given those that were checked and no others.

A config may have the fields that its class takes, each of a kind and within bounds, as its family's module names them.
What it could ask of a library beyond numbers (a kernel from the hub, a quantiser, other files) is refused by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ..trust.foreign import BOM, MAX_BYTES, Unreadable, fitting, is_lfs_pointer, object_in, parse, read
from ..trust.message import Message
from ..trust.text import shown
from .errors import BadFolder, LibraryFailed
from .families.components import ComponentSpec, Scheduler
from .families.spec import Config
from .models.on_disk import name_of

MOST_CONFIG_BYTES = 2**20  # of a config; the largest published one, a tokenizer_config.json, has 60,000
MOST_VOCABULARY_BYTES = 64 * 2**20  # the largest published one is a tokenizer.json of 20 MB
_VOCABULARIES = ("spiece.model", "tokenizer.json")
_NAMES_CLASS = {"tokenizer_config.json": "tokenizer_class", "preprocessor_config.json": "image_processor_type"}
_MOST_TOKENS = 2**20
_MOST_ADDED = 2**14  # tokens beside those of the vocabulary; published: 300
_SPARE_ROWS = 512  # of an encoder's embedding, without a token of their own; published: 28 (T5), 84 (UMT5), 209 (GLM)
_ATTENTION = ("eager", "sdpa")  # built in; every other name may be a kernel of somebody's on the hub
_REFUSED: dict[str, tuple[str, ...]] = {  # field → words that do no harm there; nothing at all (null, {}) never does
    **{
        f"{a}{b}_implementation{c}": _ATTENTION
        for a in ("", "_")
        for b in ("attn", "experts")
        for c in ("", "_internal")
    },
    **dict.fromkeys(("quantization_config", "compression_config"), ()),  # other weights than the files hold
    **dict.fromkeys(("kernel_config", "use_kernels", "fusion_config", "distributed_config", "per_layer_config"), ()),
    **dict.fromkeys(("transformers_weights", "gguf_file", "base_model_name_or_path", "init_inputs"), ()),  # other files
    **dict.fromkeys(("_use_default_values", "sp_model_kwargs"), ()),  # hides fields; settings of a sampling tokenizer
}
_INERT_FILES = ("special_tokens_map_file",)  # a path of its author's, which nothing opens
_PROBES = ("a red cat sleeps in the sun", "two dogs run over a wide bridge")


class Encoder(NamedTuple):
    """What a text encoder needs of its tokenizer."""

    rows: int  # of its embedding
    pad: int | None  # ids of these tokens; None: it does not say
    eos: tuple[int, ...]


def refuse_pointer(file: Path, where: str) -> None:
    """Raise BadFolder where Git left a pointer in place of a file. Raises OSError."""
    if is_lfs_pointer(file):
        raise BadFolder(
            "'{}' is a Git LFS pointer ({} bytes), not the file: run `git lfs pull` in the model's folder, or "
            "download the model again.",
            where,
            file.stat().st_size,
        )


def read_json(file: Path, *, missing: str = "", limit: int = MAX_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file, with or without a byte order mark.

    missing: the message where the file is not there.
    limit: how many bytes the file may have.

    Raises BadFolder where the file is not there, too large, or no JSON object.
    """
    if not file.exists():
        raise BadFolder(missing or Message("'{}' is missing.", file))
    try:
        if not file.is_file():
            raise Unreadable("it is no file")
        refuse_pointer(file, str(file))
        return dict(object_in(read(file, limit=limit)))
    except Unreadable as error:
        raise BadFolder("'{}' cannot be read as JSON: {}. Download it again.", file, error) from None
    except OSError as error:
        raise BadFolder("'{}' cannot be read: {}. Check its permissions, and the disk.", file, error) from error


def check_fields(where: str, component: ComponentSpec, cls: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that its class takes. where: the file, for messages. Raises BadFolder."""
    try:
        return fields_of(component, cls, config)
    except Unreadable as error:
        raise BadFolder("'{}' cannot be used: {}. Get it again, from the model's authors.", where, error) from None


def checked_files(path: Path, name: str, component: ComponentSpec, cls: str) -> dict[str, bytes]:
    """Return {file: content} of a component without weights: those that are read, without byte order marks.

    path: the model folder.
    name: the component, and its folder.
    cls: its class in model_index.json.

    Raises BadFolder where one that the class needs is missing, or where one of them is empty, too large, cut off, a
    pointer of Git LFS or of something else.
    """
    where = f"{name_of(path)}/{name}"
    files = {file: _whole(path / name / file, f"{where}/{file}") for file in component.files}
    found = {file: data for file, data in files.items() if data is not None}
    for group in component.needs:
        if not found.keys() & set(group):
            raise BadFolder("'{}' has no {}. The download is incomplete: fetch it again.", where, " or ".join(group))
    with explaining(where, cls):
        tokens = [_checked(f"{where}/{file}", component, cls, file, data) for file, data in found.items()]
    vocabularies = [each for each in tokens if each]
    if len(vocabularies) > 1 and not _alike(*vocabularies):
        raise BadFolder(
            "'{}' holds two vocabularies: spiece.model and tokenizer.json have other tokens. Download both again, of "
            "the same model.",
            where,
        )
    return found


def load(path: Path, name: str, component: ComponentSpec, cls: str) -> Any:
    """Load a component without weights from the files that `checked_files` returns. Raises BadFolder."""
    files = checked_files(path, name, component, cls)
    with tempfile.TemporaryDirectory(prefix="onediff-guard-") as folder:
        for file, data in files.items():
            (Path(folder) / file).write_bytes(data)
        with explaining(f"{name_of(path)}/{name}", cls):
            return _loader(component, cls, files).from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=32)  # a folder is checked when it is fetched, opened and diagnosed
def check_loads(
    path: Path, name: str, component: ComponentSpec, cls: str, encoder: Encoder | None, fingerprint: str
) -> None:
    """Load a component without weights, and try whether its tokens are those of a text encoder.

    encoder: None where it is no tokenizer.
    fingerprint: of its files, which are read again where it changes.

    Raises BadFolder where it cannot be loaded, where its vocabulary is not of the encoder's size, and where it does not
    tell two prompts apart.
    """
    del fingerprint
    loaded, where = load(path, name, component, cls), f"{name_of(path)}/{name}"
    with explaining(where, cls):
        wrong = _misfit(loaded, encoder) if encoder else ""
    if wrong:
        raise BadFolder("'{}' does not fit the text encoder: {}. Download both again, of the same model.", where, wrong)


@contextmanager
def explaining(where: str, cls: str) -> Iterator[None]:
    """Raise BadFolder, with its cause, for what a library raises while it loads a component; as it is what tells of the
    machine. where: the component's folder, for messages."""
    try:
        yield
    except (BadFolder, LibraryFailed, MemoryError):
        raise
    except ImportError as error:
        raise BadFolder(
            "'{}' needs a Python package that is not installed: {} Install the pack's requirements.txt (sentencepiece "
            "and protobuf are in it) and start again.",
            where,
            shown(str(error).strip().splitlines()[0], 200),
        ) from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's, which is loaded where it can be raised
            raise
        raise BadFolder(
            "'{}' could not be loaded as {}: {}: {}. Its files passed the check. If they are the authors' own, update "
            "transformers; else download them again.",
            where,
            cls,
            type(error).__name__,
            shown(str(error), 500),
        ) from error


def _whole(file: Path, where: str) -> bytes | None:
    """Return a file's content without a byte order mark, None where it is not there.

    Raises BadFolder where it is empty, too large or no file.
    """
    limit = MOST_VOCABULARY_BYTES if file.name in _VOCABULARIES else MOST_CONFIG_BYTES
    try:
        if not file.exists():
            return None
        if not file.is_file():
            raise BadFolder("'{}' is no file. Download it again.", where)
        size = file.stat().st_size
        if not size:
            raise BadFolder("'{}' is empty: the download is incomplete. Fetch it again.", where)
        if size > limit:
            raise BadFolder(
                "'{}' has {:,} bytes, and {:,} is the most that is read. Download it again.", where, size, limit
            )
        refuse_pointer(file, where)
        data = file.read_bytes()
    except OSError as error:
        raise BadFolder("'{}' cannot be read: {}. Check its permissions, and the disk.", where, error) from error
    return data.removeprefix(BOM) if file.suffix == ".json" else data


def _checked(where: str, component: ComponentSpec, cls: str, file: str, data: bytes) -> list[str]:
    """Check what a file holds. Returns the tokens of a vocabulary, by id. Raises BadFolder."""
    try:
        if file == "spiece.model":
            return _pieces(data)
        content = object_in(parse(data))
        if file == "tokenizer.json":
            return _tokens(content)
        if file == "added_tokens.json":
            _refuse_many(content)
        else:
            _check_config(component, cls, file, content)
    except Unreadable as error:
        raise BadFolder("'{}' cannot be used: {}. Download it again, from the model's authors.", where, error) from None
    return []


def _check_config(component: ComponentSpec, cls: str, file: str, content: Mapping[str, Any]) -> None:
    """Raise Unreadable where a config is of another class, or has fields that are out of bounds or refused."""
    named = content.get(_NAMES_CLASS.get(file, ""))
    if named is not None and named not in component.classes:
        raise Unreadable(f"it is of a {shown(named)}, and model_index.json names {cls}")
    if file == "scheduler_config.json" and "_class_name" not in content:
        raise Unreadable("it names no '_class_name'")
    inner = content.get("image_processor")  # as transformers 5 nests it
    for fields in (content, *([inner] if isinstance(inner, dict) else [])):
        fields_of(component, cls, fields)


def _pieces(data: bytes) -> list[str]:
    """Return the tokens of a sentencepiece model, by id. Raises Unreadable where it is cut off.

    Its tokens come first in the file, and then how text is split into them, without which it would be split otherwise.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise Unreadable("it is no sentencepiece model, or cut off") from None
    if not (model.pieces and model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
        raise Unreadable("it is no sentencepiece model, or cut off")
    if len(model.pieces) > _MOST_TOKENS:
        raise Unreadable(f"it has {len(model.pieces):,} tokens, and {_MOST_TOKENS:,} is the most that is read")
    return [piece.piece for piece in model.pieces]


def _tokens(content: Mapping[str, Any]) -> list[str]:
    """Return the tokens of a tokenizer.json, by id. Raises Unreadable where it holds none, or too many."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not vocabulary or not isinstance(vocabulary, (dict, list)):
        raise Unreadable("it holds no vocabulary")
    if len(vocabulary) > _MOST_TOKENS:
        raise Unreadable(f"it has {len(vocabulary):,} tokens, and {_MOST_TOKENS:,} is the most that is read")
    _refuse_many(content.get("added_tokens") or ())
    if isinstance(vocabulary, dict):
        return list(vocabulary)
    return [str(entry[0]) if isinstance(entry, list) and entry else "" for entry in vocabulary]


def _refuse_many(added: Any) -> None:
    if not isinstance(added, (dict, list, tuple)) or len(added) > _MOST_ADDED:
        raise Unreadable(f"it adds {shown(added)} to the vocabulary, and {_MOST_ADDED:,} tokens are the most")


def _alike(one: list[str], other: list[str]) -> bool:
    """Return whether two vocabularies have mostly the same tokens at the same ids. One may have more at its end."""
    shared = min(len(one), len(other))
    return 2 * sum(map(str.__eq__, one, other)) > shared


def _loader(component: ComponentSpec, cls: str, files: Mapping[str, bytes]) -> Any:
    """Return the class to load with: a tokenizer's is one that reads the vocabulary that is there."""
    vocabularies = files.keys() & set(_VOCABULARIES)
    names = (cls, *component.classes) if vocabularies else ()
    readers = map(component.class_named, names)
    can_read = (reader for reader in readers if vocabularies & set(getattr(reader, "vocab_files_names", {}).values()))
    return next(can_read, None) or component.class_named(cls)


def _misfit(tokenizer: Any, encoder: Encoder) -> str:
    """Return why a tokenizer is none of an encoder's, the end of a sentence, or ""."""
    size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if size > encoder.rows or encoder.rows - size > min(_SPARE_ROWS, encoder.rows // 2):
        return f"it has {size:,} tokens, and the encoder's embedding {encoder.rows:,} rows"
    if encoder.pad is not None and tokenizer.pad_token_id != encoder.pad:
        return f"its pad_token has the id {tokenizer.pad_token_id}, and {encoder.pad} by the encoder's config.json"
    if encoder.eos and tokenizer.eos_token_id not in encoder.eos:
        return f"its eos_token has the id {tokenizer.eos_token_id}, and {encoder.eos[0]} by the encoder's config.json"
    one, other = (tokenizer(text, add_special_tokens=False).input_ids for text in _PROBES)
    unknown = {tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("▁")}
    if one == other or not {*one, *other} - unknown:
        return f"it makes the same or no tokens of '{_PROBES[0]}' and '{_PROBES[1]}'"
    return ""


def fields_of(component: ComponentSpec, name: str, config: Config) -> dict[str, Any]:
    """Return the fields of a config that its class takes, checked.

    name: the name of the class, as model_index.json has it.

    Raises Unreadable where the config is of another class, where a field is of another kind or out of bounds, or where
    one asks a library for more than numbers.
    """
    refuse_hooks(config)
    named = config.get("_class_name", name)
    if named != name and component.fields is not Scheduler:  # of which one reads another's config
        raise Unreadable(f"its '_class_name' is {shown(named)}, and model_index.json names {name}")
    return fitting(component.fields, config).given()


def refuse_hooks(config: Config) -> None:
    """Raise Unreadable for a field, at any depth, that would have a library take more than numbers from the config."""
    for place, name, value in _walk(config, ""):
        is_file = name.endswith("_file") and name not in _INERT_FILES
        if not (is_file or name in _REFUSED) or value in (None, False, "", [], {}):
            continue
        if isinstance(value, str) and value in _REFUSED.get(name, ()):
            continue
        raise Unreadable(f"its '{shown(place)}' is {shown(value)}, which is refused in a model that others made")


def _walk(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of every field, at any depth. A place is a dotted path."""
    if isinstance(value, dict):
        for name, inner in value.items():
            here = f"{place}.{name}" if place else name
            yield here, name, inner
            yield from _walk(inner, here)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, place)
