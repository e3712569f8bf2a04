"""The files of a model folder beside its weights: configs, vocabularies, settings. Each is read whole, within a limit,
and checked; a library is given those that were checked and no others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trust.foreign import BOM, Unreadable, check_whole, object_in, parse, read, read_bytes
from ..trust.message import Told
from ..trust.text import shown
from .config_fields import fields_of
from .errors import BadFolder, LibraryFailed
from .families.components import ComponentSpec
from .models.on_disk import name_of

if TYPE_CHECKING:
    import torch

MOST_CONFIG_BYTES = 2**20  # of a config; the largest published one, a tokenizer_config.json, has 60,000
MOST_VOCABULARY_BYTES = 64 * 2**20  # the largest published one is a tokenizer.json of 20 MB
_VOCABULARIES = ("spiece.model", "tokenizer.json")
_NAMES_CLASS = {"tokenizer_config.json": "tokenizer_class", "preprocessor_config.json": "image_processor_type"}
_MOST_TOKENS = 2**20
_MOST_ADDED = 2**14  # tokens beside those of the vocabulary; published: 300
_SPARE_ROWS = 512  # of an encoder's embedding, without a token of their own; published: 28 (T5), 84 (UMT5), 209 (GLM)
_PROBES = ("a red cat sleeps in the sun", "two dogs run over a wide bridge")


@contextmanager
def reading_file(where: str, cls: type[Told] = BadFolder) -> Iterator[None]:
    """Raise `cls`, an error for people, for a file that cannot be read or used. where: the file, for messages."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise cls("'{}' cannot be read: {}. Check its permissions, and the disk.", where, error) from error
    except (Unreadable, SafetensorError) as error:
        raise cls("'{}' cannot be used: {}. Download it again, from its authors.", where, error) from None


def read_json(path: Path, file: str) -> dict[str, Any]:
    """Read a JSON object, with or without a byte order mark. path: the model folder. file: the config, in it.

    Raises BadFolder where it is not there, too large, or no JSON object.
    """
    if not (path / file).exists():
        raise BadFolder(
            "'{}' has no {}. Choose a folder in diffusers format, which holds it, or download the model again.",
            name_of(path),
            file,
        )
    with reading_file(f"{name_of(path)}/{file}"):
        check_whole(path / file)
        return dict(object_in(read(path / file, limit=MOST_CONFIG_BYTES)))


def load(path: Path, name: str, component: ComponentSpec, cls: str) -> Any:
    """Load a component without weights, from those of its files that are read and were checked.

    path: the model folder.
    name: the component, and its folder.
    cls: its class in model_index.json.
    Raises BadFolder where one that the class needs is missing, where one of them is too large, cut off, a pointer of
    Git LFS or of something else, and where two vocabularies differ.
    """
    where = f"{name_of(path)}/{name}"
    files: dict[str, bytes] = {}
    vocabularies: list[list[str]] = []
    for file in component.files:
        if (path / name / file).exists():
            with explaining(where, cls), reading_file(f"{where}/{file}"):
                files[file], tokens = _checked(path / name / file, component, cls)
                vocabularies += [tokens] if tokens else []
    for group in component.needs:
        if not files.keys() & set(group):
            raise BadFolder("'{}' has no {}. The download is incomplete: fetch it again.", where, " or ".join(group))
    if len(vocabularies) > 1 and not _alike(*vocabularies):
        raise BadFolder(
            "'{}' holds two vocabularies: spiece.model and tokenizer.json have other tokens. Download both again, of "
            "the same model.",
            where,
        )
    with tempfile.TemporaryDirectory(prefix="onediff-guard-") as folder, explaining(where, cls):
        for file, data in files.items():
            (Path(folder) / file).write_bytes(data)
        return _loader(component, cls, files).from_pretrained(folder, local_files_only=True)


@lru_cache(maxsize=32)  # a folder is checked when it is fetched, opened and diagnosed
def check_loads(
    path: Path, name: str, component: ComponentSpec, cls: str, encoder: torch.nn.Module | None, fingerprint: str
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
            *(where, cls, type(error).__name__, shown(str(error), 500)),
        ) from error


def _checked(file: Path, component: ComponentSpec, cls: str) -> tuple[bytes, list[str]]:
    """Return what a file holds, without a byte order mark, and the tokens of a vocabulary, by id. Raises OSError, or
    Unreadable where it cannot be used."""
    check_whole(file)
    if file.name == "spiece.model":
        data = read_bytes(file, limit=MOST_VOCABULARY_BYTES)
        return data, _pieces(data)
    data = read_bytes(file, limit=MOST_VOCABULARY_BYTES if file.name in _VOCABULARIES else MOST_CONFIG_BYTES)
    data = data.removeprefix(BOM)
    content = object_in(parse(data))
    if file.name == "tokenizer.json":
        return data, _tokens(content)
    if file.name == "added_tokens.json":
        _refuse_many(content)
        return data, []
    named = content.get(_NAMES_CLASS.get(file.name, ""))
    if named is not None and named not in component.classes:
        raise Unreadable(f"it is of a {shown(named)}, and model_index.json names {cls}")
    if file.name == "scheduler_config.json" and "_class_name" not in content:
        raise Unreadable("it names no '_class_name'")
    inner = content.get("image_processor")  # as transformers 5 nests it
    for fields in (content, *([inner] if isinstance(inner, dict) else [])):
        fields_of(component, cls, fields)
    return data, []


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
        model.Clear()
    if not (model.pieces and model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
        raise Unreadable("it is no sentencepiece model, or cut off")
    _refuse_many(model.pieces, _MOST_TOKENS)
    return [piece.piece for piece in model.pieces]


def _tokens(content: Mapping[str, Any]) -> list[str]:
    """Return the tokens of a tokenizer.json, by id. Raises Unreadable where it holds none, or too many."""
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not vocabulary or not isinstance(vocabulary, (dict, list)):
        raise Unreadable("it holds no vocabulary")
    _refuse_many(vocabulary, _MOST_TOKENS)
    _refuse_many(content.get("added_tokens") or [])
    if isinstance(vocabulary, dict):
        return list(vocabulary)
    return [str(entry[0]) if isinstance(entry, list) and entry else "" for entry in vocabulary]


def _refuse_many(tokens: Any, most: int = _MOST_ADDED) -> None:
    """Raise Unreadable for more tokens than any model has: a library takes minutes for them."""
    if not hasattr(tokens, "__len__") or len(tokens) > most:
        raise Unreadable(f"it has {shown(tokens)} for tokens, and {most:,} is the most that is read")


def _alike(one: list[str], other: list[str]) -> bool:
    """Return whether two vocabularies have mostly the same tokens at the same ids. One may have more at its end."""
    return 2 * sum(map(str.__eq__, one, other)) > min(len(one), len(other))


def _loader(component: ComponentSpec, cls: str, files: Mapping[str, bytes]) -> Any:
    """Return the class to load with: a tokenizer's is one that reads the vocabulary that is there."""
    vocabularies = files.keys() & set(_VOCABULARIES)
    names = (cls, *component.classes) if vocabularies else ()
    readers = map(component.class_named, names)
    can_read = (reader for reader in readers if vocabularies & set(getattr(reader, "vocab_files_names", {}).values()))
    return next(can_read, None) or component.class_named(cls)


def _misfit(tokenizer: Any, encoder: Any) -> str:
    """Return why a tokenizer is none of an encoder's, the end of a sentence, or ""."""
    size, rows = 1 + max(tokenizer.get_vocab().values(), default=-1), encoder.get_input_embeddings().num_embeddings
    if size > rows or rows - size > min(_SPARE_ROWS, rows // 2):
        return f"it has {size:,} tokens, and the encoder's embedding {rows:,} rows"
    for token in ("pad_token", "eos_token"):
        found, wanted = getattr(tokenizer, f"{token}_id"), getattr(encoder.config, f"{token}_id")
        known = [one for one in (wanted if isinstance(wanted, (list, tuple)) else [wanted]) if one is not None]
        if known and min(known) >= 0 and found not in known:
            return f"its {token} has the id {found}, and {known[0]} by the encoder's config.json"
    one, other = (tokenizer(text, add_special_tokens=False).input_ids for text in _PROBES)
    unknown = {tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("▁")}
    if one == other or not {*one, *other} - unknown:
        return f"it makes the same or no tokens of '{_PROBES[0]}' and '{_PROBES[1]}'"
    return ""
