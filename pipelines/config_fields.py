"""The fields of a config.json that somebody else wrote: those that its class takes, each of the kind of the class's own
default, and within bounds that are far beyond every published model.

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
}
_MAY_BE_0 = re.compile(r"dropout|_token_id$")  # though the class's own default is above 0


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
        _check(field, value, defaults[field])
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


def _check(field: str, value: Any, default: Any, depth: int = 0) -> None:
    """Raise Unreadable unless a value, or each in a list, is of the kind of its default. None fits all, and all fits a
    default of None."""
    if isinstance(default, (list, tuple)):
        default = default[0] if default else None
    if isinstance(value, (list, dict)):
        if len(value) > _MOST_VALUES or depth > 2 or (isinstance(value, dict) and default is not None):
            raise Unreadable(f"its '{shown(field)}' is {shown(value, 20)}, where {_wanted(field, default)} belongs")
        named = value.items() if isinstance(value, dict) else ((field, inner) for inner in value)
        for name, inner in named:
            _check(name, inner, default, depth + 1)
    elif value is not None and not _fits(field, value, default):
        raise Unreadable(f"its '{shown(field)}' is {shown(value)}, where {_wanted(field, default)} belongs")


def _fits(field: str, value: Any, default: Any) -> bool:
    if isinstance(value, bool):
        return default is None or isinstance(default, bool)
    if isinstance(value, str):
        return (default is None or isinstance(default, str)) and _WORD.fullmatch(value) is not None
    most, is_positive = _most(field, default), _is_positive(field, default)
    fits_kind = default is None or (isinstance(default, (int, float)) and not isinstance(default, bool))
    fits_bounds = (value > 0 if is_positive else -most <= value) and value <= most
    return fits_kind and fits_bounds and not (isinstance(default, int) and value % 1)


def _most(field: str, default: Any) -> float:
    return _MOST_OF.get(field, _MOST_WHOLE if isinstance(default, int) else _MOST)


def _is_positive(field: str, default: Any) -> bool:
    return isinstance(default, (int, float)) and default > 0 and not _MAY_BE_0.search(field)


def _wanted(field: str, default: Any) -> str:
    """Return in words what belongs into a field."""
    if isinstance(default, bool):
        return "true or false"
    if isinstance(default, str):
        return "a name"
    most = f"{_most(field, default):,.0f}"
    bounds = f"above 0 and at most {most}" if _is_positive(field, default) else f"between -{most} and {most}"
    return f"{'' if default is not None else 'a name or '}a {'whole ' * isinstance(default, int)}number {bounds}"
