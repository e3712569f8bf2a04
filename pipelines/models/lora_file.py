"""What a LoRA file holds: where each of its tensors belongs in a denoiser, by its key and shape, and how its additions
are scaled, by its alphas and settings. No weight is read.

Settings stand in the file's header, where diffusers ≥ 0.34 writes those of its training, or in the adapter_config.json
beside peft's adapter_model.safetensors. Only those are used that scale what the file adds. Others are for training, and
an initialisation such as PiSSA's would have peft change the shared weights. peft takes names of layers for regular
expressions; here they are plain names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...precision.wide import LAYERS
from ...trust.foreign import Foreign, Unreadable, fitting, object_in, parse, read
from ...trust.text import shown
from ..errors import BadLora
from ..families.spec import FamilySpec
from ..safetensors_header import FLOATS, read_header

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]

MOST_ALPHA = 1e6  # published: at most a few times the rank
_MOST_RANK = 2**14  # no layer of these models is wider
_METADATA = "lora_adapter_metadata"
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # starts that leave the base weights alone
_PEFT = ("adapter_model.safetensors", "adapter_config.json")  # the files of a folder as peft saves it
_PARTS = {  # how a key ends → what it holds; differences of a weight and a bias are LyCORIS' and the distilled LoRAs'
    r"\.lora_A((\.[^.]+)?\.weight)?": "A",  # with the adapter's name in it, or without
    r"\.lora_B((\.[^.]+)?\.weight)?": "B",
    r"\.lora_B(\.[^.]+)?\.bias": "bias",
    r"[._]lora(_linear_layer)?[._]down\.weight": "A",
    r"[._]lora(_linear_layer)?[._]up\.weight": "B",
    r"\.lora_up\.bias": "bias",
    r"\.alpha": "alpha",
    r"\.(diff|w_norm)": "weight difference",
    r"\.(diff_b|b_norm)": "bias difference",
}
_OTHERS = {  # in a key → what it is a part of
    r"dora_scale|lora_magnitude_vector": "DoRA",
    r"lokr_": "LoKr",
    r"hada_": "LoHa",
    r"(^|[._])b?oft_": "OFT",
    r"\.[ab][12]\.weight$": "GLoRA",
    r"\.lora_mid\.|\.lora_t[12]\b": "a LoRA in Tucker form",
    r"\.reshape_weight$": "a LoRA that reshapes weights",
    r"lora_embedding_[AB]": "a LoRA of embeddings",
    r"ia3_|\.on_input$": "IA3",
    r"vera_lambda": "VeRA",
    r"\.set_weight$|modules_to_save|base_layer\.": "weights in place of the model's",
}
_START = re.compile(  # one of the words before a layer's name; several may follow each other
    r"(base_model|model|module|pipe|dit|transformer|diffusion_model)\.|(lora_unet|lora_transformer|lycoris)_+"
)
_LOOKS = (  # the first that fits one of the keys is it
    (r"double_blocks\.\d+\.(img|txt)_attn_|token_refiner|context_embedder", "HunyuanVideo's"),
    (r"single_transformer_blocks|double_blocks|single_blocks", "Flux's (or HunyuanVideo's)"),
    (r"^(diffusion_model\.|transformer\.|lora_unet_)?blocks[._]\d+[._](self_attn|cross_attn|ffn|attn\d)", "Wan's"),
    (r"^unet\.|(down|up|input|output)_blocks[._]|mid_block", "Stable Diffusion's or SDXL's UNet"),
    (r"matrix_[AB]|transformer\.layers\.\d+\.", "CogVideoX's in SAT's format, which diffusers' scripts convert"),
    (r"joint_blocks|transformer_blocks[._]\d+[._]attn[._]", "Stable Diffusion 3's or Qwen-Image's"),
    (r"transformer_blocks[._]\d+[._]attn2", "LTX-Video's or PixArt's"),
    (r"^lora_te\d?_|^te\d?\.|text_encoder", "a text encoder's"),
)
_WIDTHS: dict[Shape, str] = {(1920,): "CogVideoX-2B", (3072,): "CogVideoX-5B or 1.5-5B", (4096,): "CogView4"}


_Alpha = Annotated[float, Field(ge=-MOST_ALPHA, le=MOST_ALPHA)]


@dataclass
class Placed:
    """A file's keys, by where they belong."""

    layers: dict[str, dict[str, str]] = field(default_factory=dict)  # with a LoRA → part ("A", "B", …) → key
    ranks: dict[str, int] = field(default_factory=dict)  # layer → rank; 1 where only its bias changes
    differences: dict[str, str] = field(default_factory=dict)  # parameter → key
    shapes: dict[str, Shape] = field(default_factory=dict)  # key → as its layer or parameter takes it
    image_only: list[str] = field(default_factory=list)  # keys of what only a model that takes an image has
    unplaced: list[str] = field(default_factory=list)  # keys that name nothing of the denoiser
    misfits: dict[str, str] = field(default_factory=dict)  # key → the shape that fits, in words
    halves: list[str] = field(default_factory=list)  # layers with an A and no B, or the other way round
    twice: list[str] = field(default_factory=list)  # keys of what another key holds too
    is_lora: bool = False
    by_peft: bool = False  # which writes alphas into a file of its own

    @property
    def alphas(self) -> dict[str, str]:
        """{layer: key}"""
        return {layer: found["alpha"] for layer, found in self.layers.items() if "alpha" in found}

    @property
    def biased(self) -> bool:
        """Whether a layer's bias changes beside its weight: peft then takes one for each layer."""
        return any({"bias", "bias difference"} & found.keys() for found in self.layers.values())


class Names:
    """The names under which files know the layers and parameters of a denoiser: diffusers' and its authors', with dots
    or with underscores."""

    def __init__(self, family: FamilySpec, denoiser: torch.nn.Module):
        self.layers = dict(denoiser.named_modules())
        self.parameters = dict(denoiser.named_parameters())
        own = [name.removesuffix(".weight") for name in self.parameters if not name.endswith(".bias")]
        self._table = family.authors_names
        self._known = {self.authors(name).replace(".", "_"): name for name in own}
        self._known |= {name.replace(".", "_"): name for name in own}

    def authors(self, name: str) -> str:
        """Return what the model's authors call a layer or a parameter."""
        for pattern, there in self._table:
            name = re.sub(pattern, there, name)
        return name

    def weight(self, name: str) -> str:
        """Return the name of a layer's weight, or of the parameter that the name is."""
        return name if name in self.parameters else f"{name}.weight"

    def find(self, stem: str) -> str:
        """Return the layer or parameter that a key without its ending names, "" where there is none."""
        while start := _START.match(stem):  # first: Wan's transformer.blocks are no transformer_blocks of CogVideoX
            stem = stem[start.end() :]
        return self._known.get(stem.replace(".", "_"), "")

    def ends(self, name: str) -> list[str]:
        """Return all ends of a layer's names: 'a.b.c', 'b.c' and 'c' of 'a.b.c'."""
        both = [each.split(".") for each in dict.fromkeys((name, self.authors(name)))]
        return [".".join(parts[first:]) for parts in both for first in range(len(parts))]


def place(name: str, shapes: Mapping[str, Shape], family: FamilySpec, denoiser: torch.nn.Module) -> Placed:
    """Find where each tensor of the file belongs.

    name: the file's, for messages.
    shapes: key → shape.

    Raises BadLora unless every one has a place and fits it, or belongs to what only a model that takes an image has.
    """
    for key in shapes:
        if other := next((word for pattern, word in _OTHERS.items() if re.search(pattern, key)), ""):
            raise _not_plain(name, f"{other} ('{shown(key, 100)}')")
    names = Names(family, denoiser)
    placed = _place(shapes, names, family.image_layers)
    if not placed.is_lora:
        raise BadLora(
            "'{}' holds no LoRA, but {}. Choose a LoRA that was trained on {}.", name, _some(shapes), family.name
        )
    if placed.misfits:
        key, wanted = next(iter(placed.misfits.items()))
        width = _trained_on({key: shapes[key] for key in placed.misfits})
        raise BadLora(
            "'{}' is for another model than this {}: '{}' has the shape {}, where {} fits. {}Choose a LoRA that was "
            "trained on this model.",
            name,
            family.name,
            shown(key, 100),
            list(shapes[key]),
            wanted,
            width,
        )
    if placed.unplaced or not (placed.layers or placed.differences or placed.halves):
        missing = placed.unplaced or placed.image_only
        looks = _looks_like(missing, family, len(getattr(denoiser, family.blocks[0], ())))
        raise BadLora(
            "'{}' is for another model than this {}, which has no place for {}. {}Choose a LoRA that was trained on "
            "this model.",
            name,
            family.name,
            _some(missing),
            looks,
        )
    if placed.twice:
        raise BadLora(
            "'{}' holds the same twice: {}. Its author merged files that do not go together; get it from elsewhere.",
            name,
            _some(placed.twice),
        )
    if placed.halves:
        raise BadLora("'{}' lacks a half of {}: it is not whole. Download it again.", name, _some(placed.halves))
    return placed


def _place(shapes: Mapping[str, Shape], names: Names, image_layers: str) -> Placed:
    placed = Placed(by_peft=any(key.startswith("base_model.model.") for key in shapes))
    found: dict[str, dict[str, str]] = {}
    for key, shape in shapes.items():
        stem, part = _parted(key)
        name = names.find(stem)
        placed.is_lora |= bool(part) or "lora" in key
        if not name or not _takes(name, part, names) or (part == "alpha" and math.prod(shape) != 1):
            of_image = part and image_layers and re.search(rf"(^|[._])({image_layers})([._]|$)", stem)
            (placed.image_only if of_image else placed.unplaced).append(key)
        elif part in found.setdefault(name, {}):
            placed.twice.append(key)
        else:
            found[name][part] = key
    for name, keys in found.items():
        _fit(placed, name, keys, shapes, names)
    return placed


def _parted(key: str) -> tuple[str, str]:
    """Return a key without its ending, and what that says it holds: "" where it is not known."""
    key = re.sub(r"\.diff_m$", ".modulation.diff", key)  # LightX2V's, of Wan's tables of modulation
    for pattern, part in _PARTS.items():
        if ending := re.search(rf"({pattern})$", key):
            return key[: ending.start()], part
    return key, ""


def _takes(name: str, part: str, names: Names) -> bool:
    """Return whether a layer, or a parameter that is in none, can have such a part."""
    layer = names.layers.get(name)
    if part == "bias difference":
        return isinstance(layer, LAYERS) or f"{name}.bias" in names.parameters
    return part == "weight difference" or (isinstance(layer, LAYERS) and bool(part))


def _fit(placed: Placed, name: str, found: dict[str, str], shapes: Mapping[str, Shape], names: Names) -> None:
    """Put the parts of a layer, or of a parameter that is in none, where they belong."""
    weight = names.weight(name)
    outputs, *inputs = shape = tuple(names.parameters[weight].shape)
    changes = shapes[found.get("A") or found.get("weight difference") or found[next(iter(found))]]
    if len(shape) > 2 and changes[2:] == shape[2:] and changes[1:2] > shape[1:2]:  # the image is in further channels
        placed.image_only += found.values()
        return
    if found.keys() == {"alpha"} or ("A" in found) != ("B" in found):
        placed.halves.append(name)
        return
    rank = (shapes[found["A"]] or (0,))[0] if "A" in found else 1
    ones = [1] * (len(shape) - 2)
    wanted = {
        "A": (["rank", *inputs], (rank, *inputs)),
        "B": ([outputs, "rank", *ones], (outputs, rank, *ones)),
        "weight difference": ([*shape], shape),
    }
    for part, key in found.items():
        in_words, fits = wanted.get(part, ([outputs], (outputs,))) if part != "alpha" else ([1], shapes[key])
        placed.shapes[key] = fits
        if not _alike(shapes[key], fits) or not 0 < rank <= _MOST_RANK:
            placed.misfits[key] = f"[{', '.join(map(str, in_words))}]"
    if key := found.pop("weight difference", ""):
        placed.differences[weight] = key
    bias, is_linear = f"{name}.bias", isinstance(names.layers.get(name), LAYERS)
    if "bias difference" in found and bias in names.parameters and (key or not is_linear):
        placed.differences[bias] = found.pop("bias difference")
    if {"bias", "bias difference"} <= found.keys():
        placed.twice.append(found["bias difference"])
    elif found.keys() - {"alpha"}:
        placed.layers[name], placed.ranks[name] = found, rank


def _alike(shape: Shape, wanted: Shape) -> bool:
    """Return whether a tensor is of the wanted shape, but that a kernel is written flat, or ones behind it."""
    same = shape[:1] == wanted[:1] and math.prod(shape) == math.prod(wanted)
    return shape == wanted or (same and (len(shape) == 2 or shape[: len(wanted)] == wanted))


def left_out(placed: Placed) -> str:
    """Name what was left out, with * for the numbers of blocks; "" where nothing was."""
    named = dict.fromkeys(re.sub(r"(?<=blocks[._])\d+", "*", _parted(key)[0]) for key in placed.image_only)
    return f"{len(placed.image_only)} tensors: {shown(', '.join(named), 1000)}" if named else ""


def header(path: Path) -> tuple[dict[str, Shape], Settings]:
    """Return {key: shape} and the settings of a whole safetensors file. Raises BadLora."""
    if path.suffix.lower() != ".safetensors":
        raise BadLora(
            "'{}' is no safetensors file: other formats can run code when they are opened. Get the LoRA as "
            ".safetensors.",
            path.name,
        )
    if not path.is_file():
        raise BadLora("'{}' is not there. Choose another LoRA, or put the file back.", path)
    try:
        found = read_header(path)
        settings = settings_of(path, found.metadata)
    except (OSError, Unreadable) as error:
        raise not_whole(path, error) from None
    whole = (key for key, tensor in found.tensors.items() if tensor.dtype not in FLOATS and math.prod(tensor.shape) > 1)
    if key := next(whole, ""):
        raise _not_plain(path.name, f"'{shown(key, 100)}' as {found.tensors[key].dtype}")
    return found.shapes, settings


def not_whole(path: Path, error: Exception) -> BadLora:
    return BadLora("'{}' cannot be read ({}): it is not whole. Download it again.", path.name, error)


def files_of(path: Path) -> tuple[Path, ...]:
    """Return the file, and the settings beside it where it is of a folder as peft saves it."""
    config = path.with_name(_PEFT[1])
    return (path, config) if path.name == _PEFT[0] and config.is_file() else (path,)


def _some(keys: Iterable[str]) -> str:
    """'3 tensors, such as …'"""
    found = sorted(keys)
    return f"{len(found)} tensor{'s' * (len(found) != 1)}, such as '{shown(found[0], 100)}'" if found else "nothing"


def _looks_like(keys: Iterable[str], family: FamilySpec, blocks: int) -> str:
    """Return a sentence on the model that keys without a place look like, "" where it is not known.

    blocks: how many the denoiser has.
    """
    keys = list(keys)
    numbers = [int(n) for key in keys for n in re.findall(r"(?<!single_)transformer_blocks[._](\d{1,6})[._]attn1", key)]
    if any(number >= blocks for number in numbers):
        return f"It reaches block {max(numbers) + 1}, and this model has {blocks}. "
    for pattern, whose in _LOOKS:
        if any(re.search(pattern, key) for key in keys):
            known = f"Its keys look like {whose}"
            own = whose == f"{family.name}'s"
            return f"{known}, under names that are not known here: get it in another format. " if own else f"{known}. "
    return ""


def _trained_on(misfits: Mapping[str, Shape]) -> str:
    """Return a sentence on the model whose width the shapes show, "" where it is not known."""
    for key, shape in misfits.items():
        if re.search(r"attn1[._]to_(q|k|v|out[._]0)\.lora(_A|_down|\.down)\.weight", key) and shape[1:] in _WIDTHS:
            return f"Its width of {shape[1]} is that of {_WIDTHS[shape[1:]]}. "
    return ""


class Settings(Foreign):
    """The fields of peft's LoraConfig that are used: what scales the additions, and what rules the file out. Ranks are
    in the tensors' shapes."""

    peft_type: str | None = None
    init_lora_weights: bool | str | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None
    lora_alpha: _Alpha | None = None
    alpha_pattern: dict[str, _Alpha] | None = None  # layer, or the end of its name → alpha


def settings_of(path: Path, metadata: Mapping[str, str]) -> Settings:
    """Return how a LoRA file says that its additions are scaled, in its header or in the settings beside it.

    metadata: what its safetensors header holds beside the tensors.

    Raises BadLora for settings that cannot be honoured, and Unreadable where they are no settings.
    """
    name, known = path.name, beside(path) or {}
    if _METADATA in metadata:
        known = object_in(parse(metadata[_METADATA]))
    settings = fitting(Settings, {key.removeprefix("transformer."): value for key, value in known.items()})
    if settings.peft_type not in (None, "LORA"):
        raise _not_plain(name, shown(settings.peft_type))
    if settings.init_lora_weights not in _PLAIN_STARTS:
        raise BadLora(
            "'{}' was trained on weights changed by '{}', not on the model's own. Have its author convert it to a "
            "plain LoRA (peft's save_pretrained does, with path_initial_model_for_weight_conversion).",
            name,
            shown(settings.init_lora_weights),
        )
    if settings.use_dora:
        raise _not_plain(name, "DoRA")
    return settings


def beside(path: Path) -> Mapping[str, Any] | None:
    """Return the settings beside the file of a folder as peft saves it; None where there are none. Raises BadLora."""
    *_, config = files_of(path)
    try:
        return object_in(read(config)) if config != path else None
    except (OSError, Unreadable) as error:
        raise not_whole(config, error) from None


def _not_plain(name: str, kind: str) -> BadLora:
    return BadLora(
        "'{}' holds {}, and only LoRA and differences of weights and biases are supported. Get it as a plain LoRA.",
        name,
        kind,
    )
