"""The fields of a config.json that somebody else wrote: those that its class takes, each of the kind of the class's own
default, or of an example where that is null, and within bounds that are far beyond every published model.

What a config could ask of a library beyond numbers (a kernel of the hub, a quantiser, other files) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..trust.foreign import Unreadable
from ..trust.text import shown
from .families.components import ComponentSpec

_REFUSED = re.compile(
    r"_?(attn|experts)_implementation(_internal)?|kernel_config|use_kernels"  # kernels of the hub
    r"|(quantization|compression|fusion|distributed|per_layer)_config"  # other weights than the files hold
    r"|(?!special_tokens_map).*_file|transformers_weights|base_model_name_or_path|init_inputs"  # other files
    r"|_use_default_values|sp_model_kwargs"  # hides fields; settings of a sampling tokenizer
)
_HARMLESS = (None, False, "", [], {}, "eager", "sdpa")  # the last two: kernels that are built in
_WORD = re.compile(r"[\w.-]{1,64}")
_MOST_VALUES = 64  # in a list or an object
_MOST_WHOLE, _MOST = 2**20, 1e9  # channels and vocabularies; other numbers
_MOST_OF = {  # what is built, or is computed, as often
    **dict.fromkeys(("num_layers", "num_hidden_layers", "num_decoder_layers"), 256),  # published: 42
    **dict.fromkeys(("layers_per_block", "transformer_layers_per_block", "num_res_blocks"), 16),
    **dict.fromkeys(("height", "width", "shortest_edge", "longest_edge", "size", "crop_size", "image_size"), 4096),
    **dict.fromkeys(("sample_height", "sample_width", "sample_frames", "num_frames", "pos_embed_max_size"), 4096),
    **dict.fromkeys(("extra_ids", "steps_offset"), 1000),
    "num_train_timesteps": 100_000,
    "resample": 5,
    "partial_rotary_factor": 1,
}
_MAY_BE_0 = re.compile(r"dropout|_token_id$")  # though the class's own default is above 0
_MAY_BE_NULL = re.compile(  # though the class's own default is not
    r"\w+_token_id|out_channels|num_key_value_heads|qk_norm|scale_factor_\w+|use_\w+_sigmas"
    r"|(base|max)_(shift|image_seq_len)"
)
_MAY_BE_LIST = re.compile(  # though the class's own default is one number
    r"\w+_token_id|sample_size|(transformer_)?layers_per_block|cross_attention_dim"
)
_MAY_BE_ONE = re.compile(
    r"\w+_token_id|num_attention_heads|image_(mean|std)|(crop_)?size"
)  # where the example is several
_LENGTHS = {"sample_size": 2, "rope_axes_dim": 2}  # of lists
_EXAMPLES: Mapping[str, Any] = {  # what fits where the class's own default is null or an empty list
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
    """Return the fields of a config that its class takes, checked.

    name: the name of the class, as model_index.json has it.
    Raises Unreadable where the config is of another class, where a field is of another kind or out of bounds, or where
    one asks a library for more than numbers.
    """
    _refuse_hooks(config)
    named = config.get("_class_name", name)
    if named != name and component.weights:  # one scheduler reads another's config
        raise Unreadable(f"its '_class_name' is {shown(named)}, and model_index.json names {name}")
    defaults = component.defaults(name)
    fields = {field: value for field, value in config.items() if field in defaults}
    for field, value in fields.items():
        default = defaults[field]
        may_be_null = default is None or _MAY_BE_NULL.fullmatch(field)
        if not (value is None and may_be_null) and not (value == [] == default):
            _check(field, value, _EXAMPLES.get(field) if default in (None, []) else default)
    return fields


def _refuse_hooks(value: Any, place: str = "") -> None:
    """Raise Unreadable for a field, at any depth, that would have a library take more than numbers from the config."""
    if isinstance(value, list):
        for inner in value:
            _refuse_hooks(inner, place)
    elif isinstance(value, dict):
        for name, inner in value.items():
            here = f"{place}.{name}" if place else name
            if _REFUSED.fullmatch(name) and inner not in _HARMLESS:
                raise Unreadable(f"its '{shown(here)}' is {shown(inner)}, which is refused in a model that others made")
            _refuse_hooks(inner, here)


def _check(field: str, value: Any, example: Any) -> None:
    """Raise Unreadable unless a value is of the kind of an example, and within bounds. An example of None stands for a
    name or a number."""
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
        kind = f"a list{length}, each of it " if is_list else "an object, each field of it " if is_object else ""
        raise Unreadable(f"its '{shown(field)}' is {shown(value, 20)}, where {kind}{_wanted(field, inner)} belongs")


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
    """Return in words what belongs into a field."""
    if isinstance(example, bool):
        return "true or false"
    if isinstance(example, str):
        return "a name"
    lowest, most = _bounds(field, example)
    bounds = f"{'above' if _is_positive(field, example) else 'of at least'} {lowest:,.0f} and at most {most:,.0f}"
    return f"{'' if example is not None else 'a name or '}a {'whole ' * isinstance(example, int)}number {bounds}"
