"""Maps a LoRA file's tensors to a denoiser's layers, by key and shape, and reads how they are scaled, from its alphas
and settings. No weight is read.

Settings are in the file's header, where diffusers ≥ 0.34 writes them, or in the adapter_config.json next to peft's
adapter_model.safetensors. Only settings that scale the additions are used. The others are for training, and an
initialisation such as PiSSA's would have peft change the shared weights. peft reads names of layers as regular
expressions; here they are plain names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...precision.scaled_products import LAYERS
from ...trust.foreign import Foreign, Unreadable, fitting, object_in, parse, read
from ...trust.message import shown
from ..families.spec import FamilySpec
from .on_disk import FLOATS, read_header

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

MOST_ALPHA = 1e6  # published: at most a few times the rank
_MOST_RANK = 2**14  # no layer of these models is wider
_METADATA = "lora_adapter_metadata"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # initialisations that keep the base weights
_PEFT = ("adapter_model.safetensors", "adapter_config.json")  # the files that peft saves
_PARTS = {  # end of a key → part; LyCORIS' and distilled LoRAs hold differences of weights and biases
    r"\.lora_A((\.[^.]+)?\.weight)?": "A",  # with or without the adapter's name
    r"\.lora_B((\.[^.]+)?\.weight)?": "B",
    r"\.lora_B(\.[^.]+)?\.bias": "bias",
    r"[._]lora(_linear_layer)?[._]down\.weight": "A",
    r"[._]lora(_linear_layer)?[._]up\.weight": "B",
    r"\.lora_up\.bias": "bias",
    r"\.alpha": "alpha",
    r"\.(diff|w_norm)": "weight difference",
    r"\.(diff_b|b_norm)": "bias difference",
}
_START = re.compile(  # a prefix of a layer's name; a name may have several
    r"(base_model|model|module|pipe|dit|transformer|diffusion_model)\.|(lora_unet|lora_transformer|lycoris)_+"
)
_Alpha = Annotated[float, Field(ge=-MOST_ALPHA, le=MOST_ALPHA)]


@dataclass
class Placed:
    """A file's keys, by the layers and parameters that they belong to."""

    layers: dict[str, dict[str, str]] = field(default_factory=dict)  # layer with a LoRA → part ("A", "B", …) → key
    ranks: dict[str, int] = field(default_factory=dict)  # layer → rank; 1 if only its bias changes
    differences: dict[str, str] = field(default_factory=dict)  # parameter → key
    shapes: dict[str, Shape] = field(default_factory=dict)  # key → shape for its layer or parameter
    image_only: list[str] = field(default_factory=list)  # keys of layers that only image-to-video models have
    by_peft: bool = False  # peft's file, whose alphas are in a separate file

    @property
    def alphas(self) -> dict[str, str]:
        """{layer: key of its alpha}"""
        return {layer: found["alpha"] for layer, found in self.layers.items() if "alpha" in found}

    @property
    def biased(self) -> bool:
        """Whether a layer with a LoRA also changes its bias: peft then needs a bias for each layer."""
        return any({"bias", "bias difference"} & found.keys() for found in self.layers.values())

    @property
    def left_out(self) -> str:
        """The ignored tensors, with * for the numbers of blocks; "" if there are none."""
        named = dict.fromkeys(re.sub(r"(?<=blocks[._])\d+", "*", _parted(key)[0]) for key in self.image_only)
        return f"{len(self.image_only)} tensors: {shown(', '.join(named), 1000)}" if named else ""


class LayerNames:
    """The names of a denoiser's layers and parameters in LoRA files: diffusers' and its authors', with dots or with
    underscores."""

    def __init__(self, family: FamilySpec, denoiser: torch.nn.Module):
        self.layers = dict(denoiser.named_modules())
        self.parameters = dict(denoiser.named_parameters())
        own = [name.removesuffix(".weight") for name in self.parameters if not name.endswith(".bias")]
        self._table = family.authors_names
        self._known = {self.authors(name).replace(".", "_"): name for name in own}
        self._known |= {name.replace(".", "_"): name for name in own}

    def authors(self, name: str) -> str:
        """Return the authors' name of a layer or a parameter."""
        for pattern, there in self._table:
            name = re.sub(pattern, there, name)
        return name

    def find(self, stem: str) -> str:
        """Return the layer or parameter that a key, without its ending, names; "" if there is none."""
        while start := _START.match(stem):  # before "." → "_": Wan's transformer.blocks are not transformer_blocks
            stem = stem[start.end() :]
        return self._known.get(stem.replace(".", "_"), "")

    def ends(self, name: str) -> list[str]:
        """Return all ends of a layer's names: 'a.b.c', 'b.c' and 'c' of 'a.b.c'."""
        both = [each.split(".") for each in dict.fromkeys((name, self.authors(name)))]
        return [".".join(parts[first:]) for parts in both for first in range(len(parts))]


def place(shapes: Mapping[str, Shape], family: FamilySpec, denoiser: torch.nn.Module) -> Placed:
    """Find where each tensor of a file belongs. shapes: key → shape. Raises Unreadable unless every one has a place and
    fits it, or belongs to what only a model that takes an image has."""
    names, parts = LayerNames(family, denoiser), {key: _parted(key) for key in shapes}
    if unknown := [key for key, (_, part) in parts.items() if not part]:
        raise not_plain(_some(unknown))
    placed = Placed(by_peft=any(key.startswith("base_model.model.") for key in shapes))
    found: dict[str, dict[str, str]] = {}
    nowhere: list[str] = []
    for key, (stem, part) in parts.items():
        layer = names.find(stem)
        if not layer or not _takes(layer, part, names) or (part == "alpha" and math.prod(shapes[key]) != 1):
            of_image = family.image_layers and re.search(rf"(^|[._])({family.image_layers})([._]|$)", stem)
            (placed.image_only if of_image else nowhere).append(key)
        elif part in found.setdefault(layer, {}):
            raise _twice(key, found[layer][part])
        else:
            found[layer][part] = key
    if not shapes:
        raise Unreadable("it holds no tensors")
    if nowhere:
        raise Unreadable(f"this {family.name} has no place for {_some(nowhere)}")
    for layer, keys in found.items():
        _fit(placed, layer, keys, shapes, names)
    if not (placed.layers or placed.differences):
        raise Unreadable(f"this {family.name} has no place for {_some(placed.image_only)}")
    return placed


def _parted(key: str) -> tuple[str, str]:
    """Return a key without its ending, and the part that the ending names; "" if it is unknown."""
    key = re.sub(r"\.diff_m$", ".modulation.diff", key)  # LightX2V's name for Wan's modulation tables
    for pattern, part in _PARTS.items():
        if ending := re.search(rf"({pattern})$", key):
            return key[: ending.start()], part
    return key, ""


def _takes(name: str, part: str, names: LayerNames) -> bool:
    """Return whether a layer, or a parameter outside of layers, can have such a part."""
    layer = names.layers.get(name)
    if part == "bias difference":
        return isinstance(layer, LAYERS) or f"{name}.bias" in names.parameters
    return part == "weight difference" or (isinstance(layer, LAYERS) and bool(part))


def _fit(placed: Placed, layer: str, found: dict[str, str], shapes: Mapping[str, Shape], names: LayerNames) -> None:
    """Add the parts of a layer, or of a parameter outside of layers, to `placed`. Raises Unreadable for misfits."""
    weight = layer if layer in names.parameters else f"{layer}.weight"
    outputs, *inputs = shape = tuple(names.parameters[weight].shape)
    changes = shapes[found.get("A") or found.get("weight difference") or found[next(iter(found))]]
    if len(shape) > 2 and changes[2:] == shape[2:] and changes[1:2] > shape[1:2]:  # the image's channels
        placed.image_only += found.values()
        return
    if found.keys() == {"alpha"} or ("A" in found) != ("B" in found):
        raise Unreadable(f"it has only one of the two matrices of '{layer}'")
    rank = (shapes[found["A"]] or (0,))[0] if "A" in found else 1
    if not 0 < rank <= _MOST_RANK:
        raise Unreadable(f"the rank of '{layer}' is {rank}, expected 1 to {_MOST_RANK:,}")
    wanted = {
        "A": (rank, *inputs),
        "B": (outputs, rank, *[1] * (len(inputs) - 1)),
        "weight difference": shape,
        "alpha": shapes.get(found.get("alpha", ""), ()),
    }
    for part, key in found.items():
        placed.shapes[key] = fits = wanted.get(part, (outputs,))
        if not _alike(shapes[key], fits):
            raise Unreadable(f"'{shown(key, 100)}' has the shape {list(shapes[key])}, expected {list(fits)}")
    if key := found.pop("weight difference", ""):
        placed.differences[weight] = key
    bias, is_linear = f"{layer}.bias", isinstance(names.layers.get(layer), LAYERS)
    if "bias difference" in found and bias in names.parameters and (key or not is_linear):
        placed.differences[bias] = found.pop("bias difference")
    if {"bias", "bias difference"} <= found.keys():
        raise _twice(found["bias"], found["bias difference"])
    if found.keys() - {"alpha"}:
        placed.layers[layer], placed.ranks[layer] = found, rank


def _alike(shape: Shape, wanted: Shape) -> bool:
    """Return whether a tensor has the wanted shape, possibly with a flattened kernel or with trailing ones."""
    same = shape[:1] == wanted[:1] and math.prod(shape) == math.prod(wanted)
    return shape == wanted or (same and (len(shape) == 2 or shape[: len(wanted)] == wanted))


def header(path: Path) -> tuple[dict[str, Shape], LoraSettings]:
    """Return {key: shape} and the settings of a whole safetensors file. Raises OSError, or Unreadable."""
    if path.suffix.lower() != ".safetensors":
        raise Unreadable("it is not a safetensors file, and other formats can run code when opened")
    found = read_header(path)
    for key, tensor in found.tensors.items():
        if tensor.dtype not in FLOATS and math.prod(tensor.shape) > 1:
            raise not_plain(f"'{shown(key, 100)}' as {tensor.dtype}")
    return {key: tensor.shape for key, tensor in found.tensors.items()}, settings_of(path, found.metadata)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the file, and the settings next to it if peft saved both."""
    config = path.with_name(_PEFT[1])
    return (path, config) if path.name == _PEFT[0] and config.is_file() else (path,)


def _some(keys: Collection[str]) -> str:
    """Return '3 tensors, such as …'."""
    return f"{len(keys)} tensor{'s' * (len(keys) != 1)}, such as '{shown(min(keys), 100)}'"


class LoraSettings(Foreign):
    """The used fields of peft's LoraConfig: they scale the additions, or show that the file is not supported. The ranks
    follow from the tensors' shapes."""

    peft_type: str | None = None
    init_lora_weights: bool | str | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    lora_alpha: _Alpha | None = None
    alpha_pattern: dict[str, _Alpha] | None = None  # layer, or the end of its name → alpha


def settings_of(path: Path, metadata: Mapping[str, str]) -> LoraSettings:
    """Return a LoRA file's settings, from its header or from the file next to it.

    metadata: the metadata of its safetensors header.
    Raises OSError, or Unreadable if the settings are invalid or not supported.
    """
    known = object_in(parse(metadata[_METADATA])) if _METADATA in metadata else beside(path) or {}
    settings = fitting(LoraSettings, {key.removeprefix("transformer."): value for key, value in known.items()})
    if settings.peft_type not in (None, "LORA"):
        raise not_plain(shown(settings.peft_type))
    if settings.init_lora_weights not in _PLAIN_STARTS:
        raise Unreadable(
            f"it was trained on weights changed by '{shown(settings.init_lora_weights)}'. peft's save_pretrained makes "
            "a plain LoRA of it, with path_initial_model_for_weight_conversion"
        )
    if settings.use_dora:
        raise not_plain("DoRA")
    return settings


def beside(path: Path) -> Mapping[str, Any] | None:
    """Return the settings that peft saved next to the file; None if there are none. Raises OSError, or Unreadable."""
    *_, config = files_of(path)
    return object_in(read(config)) if config != path else None


def not_plain(kind: str) -> Unreadable:
    return Unreadable(f"it holds {kind}, but only LoRA and differences of weights and biases are supported")


def _twice(*keys: str) -> Unreadable:
    return Unreadable(f"it holds the same tensor twice, as {' and '.join(shown(key, 100) for key in keys)}")
