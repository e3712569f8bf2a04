"""What a component's config.json may say: the fields that its class takes, each of a kind and within bounds, as its
family's module names them. What a config could ask of a library beyond numbers (a kernel from the hub, a quantiser,
other files) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...trust.foreign import Unreadable, fitting
from ...trust.text import shown
from ..families.components import ComponentSpec, Scheduler
from ..families.layouts import Config

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
