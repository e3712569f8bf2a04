"""The small files of a model folder: configs, vocabularies, settings. Each is read whole, up to a size limit, and
checked; libraries get only files that passed the check."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..trust.foreign import BOM, Unreadable, check_whole, object_in, parse, read, read_bytes
from ..trust.message import Told, shown
from .errors import BadFolder, LibraryFailed
from .families.spec import ComponentSpec
from .models.on_disk import name_of

if TYPE_CHECKING:
    import torch

MOST_CONFIG_BYTES = 2**20  # limit of a config; the largest published one, a tokenizer_config.json, has 60,000
MOST_VOCABULARY_BYTES = 64 * 2**20  # the largest published one is a tokenizer.json of 20 MB
_VOCABULARIES = ("spiece.model", "tokenizer.json")
_NAMES_CLASS = {"tokenizer_config.json": "tokenizer_class", "preprocessor_config.json": "image_processor_type"}
_MOST_TOKENS = 2**20
_MOST_ADDED = 2**14  # tokens added to the vocabulary; published: 300
_SPARE_ROWS = 512  # rows of an encoder's embedding without a token; published: 28 (T5), 84 (UMT5), 209 (GLM)
_PROBES = ("a red cat sleeps in the sun", "two dogs run over a wide bridge")


@contextmanager
def reading_file(where: str, cls: type[Told] = BadFolder) -> Iterator[None]:
    """Raise `cls`, an error for users, if a file cannot be read or used inside. where: the file, for messages."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise cls("'{}' cannot be read: {}. Check its permissions, and the disk.", where, error) from error
    except (Unreadable, SafetensorError) as error:
        raise cls("'{}' cannot be used: {}. Download it again from its authors.", where, error) from None


def read_json(path: Path, file: str) -> dict[str, Any]:
    """Read a JSON object, with or without a byte order mark. path: the model folder. file: the config, in it. Raises
    BadFolder where it is not there, too large, or no JSON object."""
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

    path: the model folder. name: the component, and its folder. cls: its class in model_index.json.
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
            raise BadFolder("'{}' has no {}. The download is incomplete: download it again.", where, " or ".join(group))
    if len(vocabularies) > 1 and not _alike(*vocabularies):
        raise BadFolder(
            "'{}' holds two vocabularies: spiece.model and tokenizer.json have different tokens. Download both "
            "again, from the same model.",
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
    """Load a component without weights, and check that a tokenizer fits its text encoder.

    encoder: the text encoder; None if the component is no tokenizer.
    fingerprint: of the component's files; the check is repeated when it changes.
    Raises BadFolder if the component cannot be loaded, if the tokenizer's size or special tokens do not fit the
    encoder, and if it makes the same tokens of two prompts.
    """
    del fingerprint
    loaded, where = load(path, name, component, cls), f"{name_of(path)}/{name}"
    with explaining(where, cls):
        wrong = _misfit(loaded, encoder) if encoder else ""
    if wrong:
        raise BadFolder("'{}' does not fit the text encoder: {}. Download both again, from one model.", where, wrong)


@contextmanager
def explaining(where: str, cls: str) -> Iterator[None]:
    """Turn a library's error while it loads a component into BadFolder; LibraryFailed and out-of-memory errors
    pass unchanged. where: the component's folder, for messages. cls: its class, for messages."""
    try:
        yield
    except (BadFolder, LibraryFailed, MemoryError):
        raise
    except ImportError as error:
        raise BadFolder(
            "'{}' needs a Python package that is not installed: {} Install the pack's requirements.txt (it includes "
            "sentencepiece and protobuf) and restart.",
            where,
            shown(str(error).strip().splitlines()[0], 200),
        ) from error
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # torch's: compared by name, so that torch is not imported
            raise
        raise BadFolder(
            "'{}' could not be loaded as {}: {}: {}. Its files passed the check. If they are the authors' own, update "
            "transformers; else download them again.",
            *(where, cls, type(error).__name__, shown(str(error), 500)),
        ) from error


def _checked(file: Path, component: ComponentSpec, cls: str) -> tuple[bytes, list[str]]:
    """Return a file's bytes, without a byte order mark, and a vocabulary's tokens by id, [] for other files. Raises
    OSError, or Unreadable if the file cannot be used."""
    check_whole(file)
    data = read_bytes(file, limit=MOST_VOCABULARY_BYTES if file.name in _VOCABULARIES else MOST_CONFIG_BYTES)
    if file.name == "spiece.model":
        return data, _pieces(data)
    data = data.removeprefix(BOM)
    content = object_in(parse(data))
    if file.name == "tokenizer.json":
        return data, _tokens(content)
    if file.name == "added_tokens.json":
        _refuse_many(content)
        return data, []
    named = content.get(_NAMES_CLASS.get(file.name, ""))
    if named is not None and named not in component.classes:
        raise Unreadable(f"it is for {shown(named)}, but model_index.json names {cls}")
    if file.name == "scheduler_config.json" and "_class_name" not in content:
        raise Unreadable("it names no '_class_name'")
    inner = content.get("image_processor")  # transformers 5 nests the fields here
    for fields in (content, *([inner] if isinstance(inner, dict) else [])):
        fields_of(component, cls, fields)
    return data, []


def _pieces(data: bytes) -> list[str]:
    """Return the tokens of a sentencepiece model, by id. Raises Unreadable if it is cut off.

    The file holds the tokens first, then the rules that split text. A file cut off between them still loads, but
    splits text differently.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        model.ParseFromString(data)
    except DecodeError:
        model.Clear()
    if not (model.pieces and model.HasField("trainer_spec") and model.HasField("normalizer_spec")):
        raise Unreadable("it is not a sentencepiece model, or is cut off")
    _refuse_many(model.pieces, _MOST_TOKENS)
    return [piece.piece for piece in model.pieces]


def _tokens(content: Mapping[str, Any]) -> list[str]:
    """Return the tokens of a tokenizer.json, by id. Raises Unreadable if it holds none, or too many."""
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
    """Raise Unreadable for more than `most` tokens, which a library would take minutes to load."""
    if not hasattr(tokens, "__len__") or len(tokens) > most:
        raise Unreadable(f"its tokens are {shown(tokens)}; the limit is {most:,}")


def _alike(one: list[str], other: list[str]) -> bool:
    """Return whether two vocabularies have the same tokens at most ids. One may be longer."""
    return 2 * sum(map(str.__eq__, one, other)) > min(len(one), len(other))


def _loader(component: ComponentSpec, cls: str, files: Mapping[str, bytes]) -> Any:
    """Return the class that loads the component; for a tokenizer, a class that can read its vocabulary file."""
    vocabularies = files.keys() & set(_VOCABULARIES)
    names = (cls, *component.classes) if vocabularies else ()
    readers = map(component.class_named, names)
    can_read = (reader for reader in readers if vocabularies & set(getattr(reader, "vocab_files_names", {}).values()))
    return next(can_read, None) or component.class_named(cls)


def _misfit(tokenizer: Any, encoder: Any) -> str:
    """Return why a tokenizer does not fit a text encoder, as the end of a sentence; "" if it fits."""
    size, rows = 1 + max(tokenizer.get_vocab().values(), default=-1), encoder.get_input_embeddings().num_embeddings
    if size > rows or rows - size > min(_SPARE_ROWS, rows // 2):
        return f"it has {size:,} tokens, but the encoder's embedding has {rows:,} rows"
    for token in ("pad_token", "eos_token"):
        found, wanted = getattr(tokenizer, f"{token}_id"), getattr(encoder.config, f"{token}_id")
        known = [one for one in (wanted if isinstance(wanted, (list, tuple)) else [wanted]) if one is not None]
        if known and min(known) >= 0 and found not in known:
            return f"its {token} has the id {found}, but the encoder's config.json says {known[0]}"
    one, other = (tokenizer(text, add_special_tokens=False).input_ids for text in _PROBES)
    unknown = {tokenizer.unk_token_id, tokenizer.convert_tokens_to_ids("▁")}
    if one == other or not {*one, *other} - unknown:
        return f"'{_PROBES[0]}' and '{_PROBES[1]}' give the same tokens, or none"
    return ""


# Fields by which a config makes a library load or run something: a kernel of the hub, a quantiser, other files
_REFUSED = re.compile(
    r"_?(attn|experts)_implementation(_internal)?|kernel_config|use_kernels"  # kernels of the hub
    r"|(quantization|compression|fusion|distributed|per_layer)_config"  # other weights than the files hold
    r"|(?!special_tokens_map).*_file|transformers_weights|base_model_name_or_path|init_inputs"  # other files
    r"|_use_default_values|sp_model_kwargs"  # hidden fields; settings of a sampling tokenizer
)
_HARMLESS = (None, False, "", [], {}, "eager", "sdpa")  # the last two: built-in kernels
_WORD = re.compile(r"[\w.-]{1,64}")
_MOST_VALUES = 64  # entries of a list or an object
_MOST_WHOLE, _MOST = 2**20, 1e9  # limits of integers (channels, vocabularies) and of other numbers
_MOST_OF = {  # lower limits, of fields that multiply what is built or computed
    **dict.fromkeys(("num_layers", "num_hidden_layers", "num_decoder_layers"), 256),  # published: 42
    **dict.fromkeys(("layers_per_block", "transformer_layers_per_block", "num_res_blocks"), 16),
    **dict.fromkeys(("height", "width", "shortest_edge", "longest_edge", "size", "crop_size", "image_size"), 4096),
    **dict.fromkeys(("sample_height", "sample_width", "sample_frames", "num_frames", "pos_embed_max_size"), 4096),
    **dict.fromkeys(("extra_ids", "steps_offset"), 1000),
    "num_train_timesteps": 100_000,
    "resample": 5,
    "partial_rotary_factor": 1,
}
_MAY_BE_0 = re.compile(r"dropout|_token_id$")  # although the class's default is above 0
_MAY_BE_NULL = re.compile(  # although the class's default is not null
    r"\w+_token_id|out_channels|num_key_value_heads|qk_norm|scale_factor_\w+|use_\w+_sigmas"
    r"|(base|max)_(shift|image_seq_len)"
)
_MAY_BE_LIST = re.compile(  # although the class's default is one number
    r"\w+_token_id|sample_size|(transformer_)?layers_per_block|cross_attention_dim"
)
_MAY_BE_ONE = re.compile(
    r"\w+_token_id|num_attention_heads|image_(mean|std)|(crop_)?size"
)  # although the example is a list or an object
_LENGTHS = {"sample_size": 2, "rope_axes_dim": 2}  # lengths of lists
_EXAMPLES: Mapping[str, Any] = {  # values that fit, of fields whose default is null or an empty list
    **dict.fromkeys(("patch_size", "patch_size_t", "ofs_embed_dim", "image_dim", "added_kv_proj_dim"), 1),
    **dict.fromkeys(("pos_embed_seq_len", "decoder_base_dim", "num_decoder_layers", "sample_size"), 1),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "extra_ids", "resample"), 0),
    **dict.fromkeys(("sigma_min", "sigma_max", "shift_terminal"), 1.0),
    **dict.fromkeys(("rescale_factor", "rope_theta", "partial_rotary_factor"), 1.0),
    **dict.fromkeys(("legacy", "add_bos_token", "add_eos_token", "is_gated_act", "tie_word_embeddings"), True),
    **dict.fromkeys(("do_center_crop", "do_convert_rgb", "do_normalize", "do_rescale", "do_resize"), True),
    **dict.fromkeys(("latents_mean", "latents_std", "image_mean", "image_std", "attn_scales"), (0.0,)),
    "dense_act_fn": "relu",
    "shift_factor": 0.0,
    "trained_betas": (1.0,),
    "disable_corrector": (0,),
    "size": {"height": 1},
    "crop_size": {"height": 1},
    "rope_scaling": {"rope_type": None},
    "rope_parameters": {"rope_type": None},
}


def fields_of(component: ComponentSpec, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that its class takes, checked: each has the type of the class's default, or of an
    example if the default is null, and is within bounds far beyond every published model.

    name: the class in model_index.json.
    Raises Unreadable if the config is of another class, if a field has another type or is out of bounds, and if a
    field would make a library load or run something.
    """
    _refuse_hooks(config)
    named = config.get("_class_name", name)
    if named != name and component.weights:  # one scheduler reads another's config
        raise Unreadable(f"its '_class_name' is {shown(named)}, but model_index.json names {name}")
    defaults = component.defaults(name)
    fields = {field: value for field, value in config.items() if field in defaults}
    for field, value in fields.items():
        default = defaults[field]
        may_be_null = default is None or _MAY_BE_NULL.fullmatch(field)
        if not (value is None and may_be_null) and not (value == [] == default):
            _check(field, value, _EXAMPLES.get(field) if default in (None, []) else default)
    return fields


def _refuse_hooks(value: Any, place: str = "") -> None:
    """Raise Unreadable for a field, at any depth, by which a config makes a library load or run something."""
    if isinstance(value, list):
        for inner in value:
            _refuse_hooks(inner, place)
    elif isinstance(value, dict):
        for name, inner in value.items():
            here = f"{place}.{name}" if place else name
            if _REFUSED.fullmatch(name) and inner not in _HARMLESS:
                raise Unreadable(f"its '{shown(here)}' is {shown(inner)}, which can load or run code and is refused")
            _refuse_hooks(inner, here)


def _check(field: str, value: Any, example: Any) -> None:
    """Raise Unreadable unless a value has the type of an example and is within bounds. The example None allows a name
    or a number."""
    is_list, is_object = isinstance(example, (list, tuple)), isinstance(example, dict)
    inner = next(iter(example.values() if is_object else example)) if is_list or is_object else example
    if isinstance(value, dict) and is_object and len(value) <= _MOST_VALUES:
        for name, each in value.items():
            if each is not None:
                _check(name, each, inner)
        return
    if isinstance(value, list):
        fits = is_list or example is None or _MAY_BE_LIST.fullmatch(field)
        fits = fits and 0 < len(value) <= _MOST_VALUES and len(value) == _LENGTHS.get(field, len(value))
        fits = fits and all(_fits(field, each, inner) for each in value)
    else:
        fits = (not (is_list or is_object) or _MAY_BE_ONE.fullmatch(field)) and _fits(field, value, inner)
    if not fits:
        length = f" of {_LENGTHS[field]}" if field in _LENGTHS else ""
        kind = f"a list{length}, with each value " if is_list else "an object, with each field " if is_object else ""
        raise Unreadable(f"its '{shown(field)}' is {shown(value, 20)}, expected {kind}{_wanted(field, inner)}")


def _fits(field: str, value: Any, example: Any) -> bool:
    if isinstance(value, str) and not _WORD.fullmatch(value):
        return False
    if isinstance(value, (bool, str)) or isinstance(example, (bool, str)):
        return example is None or type(value) is type(example)
    if not isinstance(value, int if isinstance(example, int) else (int, float)):
        return False
    lowest, most = _bounds(field, example)
    return lowest <= value <= most and not (value == 0 and _is_positive(field, example))


def _bounds(field: str, example: Any) -> tuple[float, float]:
    most = _MOST_OF.get(field, _MOST_WHOLE if isinstance(example, int) else _MOST)
    if _is_positive(field, example):
        return 0, most
    return (-1 if field.endswith("_token_id") else 0) if isinstance(example, int) else -most, most


def _is_positive(field: str, example: Any) -> bool:
    return isinstance(example, (int, float)) and example > 0 and not _MAY_BE_0.search(field)


def _wanted(field: str, example: Any) -> str:
    """Return a description of a field's valid values."""
    if isinstance(example, bool):
        return "true or false"
    if isinstance(example, str):
        return "a name"
    lowest, most = _bounds(field, example)
    bounds = f"{'above' if _is_positive(field, example) else 'of at least'} {lowest:,.0f} and at most {most:,.0f}"
    return f"{'' if example is not None else 'a name or '}a {'whole ' * isinstance(example, int)}number {bounds}"
