"""The settings in a LoRA file's header, where diffusers ≥ 0.34 writes those of its training.

Only those are used that scale what the file adds. Others are for training, and an initialisation such as PiSSA's would
have peft change the shared weights. peft takes names of layers for regular expressions; here they are plain names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ...trust.foreign import Foreign, fitting, object_in, parse
from ...trust.text import shown
from ..errors import BadLora

if TYPE_CHECKING:
    import torch

MOST_ALPHA = 1e6  # published: at most a few times the rank
_METADATA = "lora_adapter_metadata"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # starts that leave the base weights alone

_Alpha = Annotated[float, Field(ge=-MOST_ALPHA, le=MOST_ALPHA)]


class Settings(Foreign):
    """The fields of peft's LoraConfig that are used: what scales the additions, and what rules the file out. Ranks are
    in the tensors' shapes."""

    init_lora_weights: bool | str | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    lora_alpha: _Alpha | None = None
    alpha_pattern: dict[str, _Alpha] | None = None  # layer, or the end of its name → alpha


def settings_of(name: str, metadata: Mapping[str, str]) -> Settings:
    """Return how a LoRA file says that its additions are scaled.

    name: the file's name, for messages.
    metadata: what its safetensors header holds beside the tensors.

    Raises BadLora for settings that cannot be honoured, and Unreadable where they are no settings.
    """
    known = object_in(parse(metadata[_METADATA])) if _METADATA in metadata else {}
    settings = fitting(Settings, {key.removeprefix("transformer."): value for key, value in known.items()})
    if settings.init_lora_weights not in _PLAIN_STARTS:
        raise BadLora(
            f"'{name}' was trained on weights changed by '{shown(settings.init_lora_weights)}', not on the model's "
            "own. Have its author convert it to a plain LoRA (peft's save_pretrained does, with "
            "path_initial_model_for_weight_conversion)."
        )
    if settings.use_dora:
        raise BadLora(f"'{name}' is a DoRA, and only plain LoRA is supported. Get the plain LoRA of it.")
    return settings


def alpha_by_layer(name: str, settings: Settings, layers: Iterable[str], denoiser: torch.nn.Module) -> dict[str, float]:
    """Map each of `layers` that has an alpha of its own to that. Of two names that fit, the first counts, as in peft.

    name: the file's name, for messages.
    layers: names of the layers that the file adds to.

    Raises BadLora where no layer of the denoiser has a name that the settings give, or one that ends with it.
    """
    alphas = {pattern.removeprefix("^"): alpha for pattern, alpha in (settings.alpha_pattern or {}).items()}
    if unknown := alphas.keys() - {end for layer, _ in denoiser.named_modules() if layer for end in _ends(layer)}:
        raise BadLora(
            f"'{name}': its header has an alpha for '{shown(min(unknown))}', which is no layer of this model. Have its "
            "author write the names of layers, such as attn1.to_q: patterns are not supported."
        )
    order = list(alphas)
    fits = {layer: [end for end in _ends(layer) if end in alphas] for layer in layers}
    return {layer: alphas[min(ends, key=order.index)] for layer, ends in fits.items() if ends}


def _ends(layer: str) -> list[str]:
    """Return all ends of a layer's name: 'a.b.c', 'b.c' and 'c' of 'a.b.c'."""
    parts = layer.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]
