"""LoRA: low-rank additions to a denoiser's layers, in a shell of it. Its own weights are shared and stay as they are.

diffusers reads the keys and peft computes the layers, so that a result is diffusers' own to the bit.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...precision.shells import structural_copy
from ...trust.foreign import Unreadable
from ...trust.text import shown
from ..errors import BadLora
from ..families.spec import FamilySpec
from ..safetensors_header import read_header
from .lora_settings import MOST_ALPHA, Settings, alpha_by_layer, settings_of
from .on_disk import StoredModel

Shape = tuple[int, ...]
LoraKey = tuple[str, int, int, float]

logger = logging.getLogger(__name__)

_MOST_RANK = 2**14  # no layer of these models is wider
_UNSUPPORTED = ("dora_scale", "lora_magnitude_vector", "lokr_", "hada_")
_ENDINGS = {  # of a key → what it holds
    ".lora_A.weight": "A",
    ".lora_B.weight": "B",
    ".lora_B.bias": "bias",
    ".lora.down.weight": "A",
    ".lora.up.weight": "B",
    ".lora_down.weight": "A",
    ".lora_up.weight": "B",
    ".alpha": "alpha",
}
_STARTS = re.compile(r"^(base_model\.model\.)?(transformer\.|diffusion_model\.)?")
_KOHYA = re.compile(r"^lora_(unet|transformer)_+")  # dots are underscores there
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


@dataclass(frozen=True)
class Lora:
    """A LoRA file and how strongly it acts: 1 as it was trained, 0 not at all, negative away from it."""

    path: Path
    scale: float = 1.0
    denoiser: str = ""  # the component that it is added to; "": all that denoise

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise BadLora(f"The scale of '{self.path.name}' is {self.scale}, and must be a finite number, such as 1.")

    @property
    def key(self) -> LoraKey:
        """A key that changes with the file and the scale."""
        try:
            stat = self.path.stat()
        except OSError:
            return (str(self.path), 0, 0, self.scale)
        return (str(self.path), stat.st_size, stat.st_mtime_ns, self.scale)

    def __str__(self) -> str:
        where = f" in {self.denoiser}" if self.denoiser else ""
        return f"LoRA {self.path.name} at {self.scale:g}{where}"


@dataclass(frozen=True)
class LoraWeights:
    """A LoRA file that passed every check, in the denoiser's names."""

    tensors: Mapping[str, torch.Tensor]  # <layer>.lora_A.weight [rank, in], .lora_B.weight [out, rank], .lora_B.bias
    config: Mapping[str, Any]  # of peft's LoraConfig


@dataclass
class _Placed:
    """A file's keys, by where they belong."""

    keys: dict[str, str] = field(default_factory=dict)  # "<layer>.lora_A.weight" → key
    alphas: dict[str, str] = field(default_factory=dict)  # layer → key
    ranks: dict[str, int] = field(default_factory=dict)  # layer → rank
    unplaced: list[str] = field(default_factory=list)  # keys that name no layer of the denoiser
    misfits: dict[str, str] = field(default_factory=dict)  # key → the shape that fits, in words
    halves: list[str] = field(default_factory=list)  # layers with an A and no B, or the other way round
    is_lora: bool = False

    @property
    def biased(self) -> bool:
        return any(name.endswith(".bias") for name in self.keys)


def keys(loras: Sequence[Lora]) -> tuple[LoraKey, ...]:
    """Return the keys of the LoRAs that act: a scale of 0 adds nothing."""
    return tuple(lora.key for lora in loras if lora.scale)


def check_lora(path: Path, family: FamilySpec, denoiser: torch.nn.Module) -> None:
    """Check a file by its header: names, shapes, settings. Reads no weights, and `denoiser` may be a `skeleton`.

    Raises BadLora: no safetensors file, a truncated one, of another model, of a kind that is not supported.
    """
    loader = _loader(family)
    shapes, settings = _header(path)
    shapes = _in_our_names(loader, shapes)
    _config(path.name, _placed(path.name, shapes, family, denoiser), settings, denoiser)


def read_lora(path: Path, family: FamilySpec, denoiser: torch.nn.Module) -> LoraWeights:
    """Check a file and read it. Raises BadLora as check_lora does, and where a weight is not finite."""
    check_lora(path, family, denoiser)
    _, settings = _header(path)
    tensors = _loader(family).lora_state_dict(_tensors(path))  # a path in capitals it would take for a pickle's
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    placed = _placed(path.name, shapes, family, denoiser)
    if broken := next((key for key, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()), None):
        raise BadLora(
            f"'{path.name}' is damaged: '{shown(broken)}' holds values that are not finite. Download it again, "
            "or train it again at a lower learning rate."
        )
    alphas = {layer: float(tensors[key].reshape(-1)[0]) for layer, key in placed.alphas.items()}
    config = _config(path.name, placed, settings, denoiser, alphas)
    return LoraWeights({name: tensors[key] for name, key in placed.keys.items()}, config)


def with_loras(denoiser: torch.nn.Module, loras: Sequence[Lora], family: FamilySpec) -> torch.nn.Module:
    """A shell of `denoiser`, for inference, whose layers have the LoRAs added, each by its own scale.

    The denoiser shares its weights with the shell and is not touched: to unload a LoRA is to use the denoiser. Where
    no LoRA acts (none, or all at scale 0), it is the denoiser itself that is returned. Added weights are in the dtype
    and on the device of the layer that they are added to.

    Raises BadLora.
    """
    for lora in loras:
        check_lora(lora.path, family, denoiser)
    acting = [lora for lora in loras if lora.scale]
    if not acting:
        return denoiser
    names = [f"lora_{index}" for index in range(len(acting))]  # not the files': compiled code is kept by name
    with torch.inference_mode(False), torch.no_grad():
        shell: Any = structural_copy(denoiser)
        for name, lora in zip(names, acting, strict=True):
            weights = read_lora(lora.path, family, denoiser)
            logger.info("adding %s to %s at %g", lora.path.name, type(denoiser).__name__, lora.scale)
            tensors = {key: _as_layer(lora.path.name, key, tensor, denoiser) for key, tensor in weights.tensors.items()}
            with warnings.catch_warnings():  # peft's, that it is not the first adapter: that is meant
                warnings.filterwarnings("ignore", "Already found a `peft_config`")
                shell.load_lora_adapter(
                    tensors, prefix=None, adapter_name=name, metadata=dict(weights.config), low_cpu_mem_usage=True
                )
        shell.set_adapters(names, [lora.scale for lora in acting])
        _scales_as_tensors(shell)
    return shell.eval().requires_grad_(False)


def _scales_as_tensors(shell: torch.nn.Module) -> None:
    """peft's scales as scalar tensors: a number would be a constant of what is compiled, and each scale a new graph."""
    for layer in shell.modules():
        if isinstance(scaling := getattr(layer, "scaling", None), dict):
            scaling |= {name: torch.tensor(scale, dtype=torch.float32) for name, scale in scaling.items()}


def skeleton(model: StoredModel) -> torch.nn.Module:
    """The model's denoiser without weights (on the meta device): enough to check a LoRA before anything is loaded."""
    return model.family.components[model.family.denoiser].on_meta(model.denoiser_config)


def _loader(family: FamilySpec) -> Any:
    """Return the diffusers pipeline class, which knows how a LoRA of this family is stored. Raises BadLora."""
    import diffusers
    from diffusers.utils import USE_PEFT_BACKEND

    if not USE_PEFT_BACKEND:
        raise BadLora("LoRA needs the Python package peft, which is missing or too old. Install requirements.txt.")
    pipeline = getattr(diffusers, family.pipeline)
    if not hasattr(pipeline, "lora_state_dict"):
        raise BadLora(
            f"diffusers {diffusers.__version__} has no LoRA for {family.name}. Use CogVideoX, Wan or CogView4, or no "
            "LoRA."
        )
    return pipeline


def _header(path: Path) -> tuple[dict[str, Shape], Settings]:
    """Return {key: shape} and diffusers' settings of a whole safetensors file. Raises BadLora."""
    if path.suffix.lower() != ".safetensors":
        raise BadLora(
            f"'{path.name}' is no safetensors file: other formats can run code when they are opened. "
            "Get the LoRA as .safetensors."
        )
    if not path.is_file():
        raise BadLora(f"'{path}' is not there. Choose another LoRA, or put the file back.")
    try:
        header = read_header(path)
        return header.shapes, settings_of(path.name, header.metadata)
    except (OSError, Unreadable) as error:
        raise _not_whole(path, error) from None


def _in_our_names(loader: Any, shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Return the shapes as diffusers names the tensors, or as they are where it makes no sense of the names. It takes
    Wan's LoRAs in their authors' names too, and writes an alpha into the tensors that it scales. It counts up to the
    number of the last block, so names with such as no model has are not given to it."""
    if any(re.search(r"\d{4}", key) for key in shapes):
        return shapes
    stubs = {
        key: torch.ones(shape) if math.prod(shape) == 1 else torch.empty(shape, device="meta")
        for key, shape in shapes.items()
    }
    try:
        return {key: tuple(tensor.shape) for key, tensor in loader.lora_state_dict(stubs).items()}
    except Exception:  # noqa: BLE001, whatever a converter makes of others' names: what has no place is said later
        return shapes


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise _not_whole(path, error) from None


def _not_whole(path: Path, error: Exception) -> BadLora:
    return BadLora(f"'{path.name}' cannot be read ({error}): it is not whole. Download it again.")


def _placed(name: str, shapes: Mapping[str, Shape], family: FamilySpec, denoiser: torch.nn.Module) -> _Placed:
    """Find where each tensor of the file belongs. Raises BadLora unless every one has a place, and fits it."""
    layers = dict(denoiser.named_modules())
    placed = _place(shapes, layers)
    if unsupported := [key for key in shapes if any(word in key for word in _UNSUPPORTED)]:
        raise BadLora(
            f"'{name}' is a DoRA, LoKr or LoHa ('{shown(unsupported[0], 100)}'), and of these only plain LoRA is "
            "supported. Get the plain LoRA of it."
        )
    if not placed.is_lora:
        raise BadLora(f"'{name}' holds no LoRA, but {_some(shapes)}. Choose a LoRA that was trained on {family.name}.")
    if placed.misfits:
        key, wanted = next(iter(placed.misfits.items()))
        width = _trained_on({key: shapes[key] for key in placed.misfits})
        raise BadLora(
            f"'{name}' is for another model than this {family.name}: '{shown(key, 100)}' has the shape "
            f"{list(shapes[key])}, where {wanted} fits. {width}Choose a LoRA that was trained on this model."
        )
    if placed.unplaced:
        looks = _looks_like(placed.unplaced, family, len(getattr(denoiser, family.blocks[0], ())))
        raise BadLora(
            f"'{name}' is for another model than this {family.name}, which has no place for {_some(placed.unplaced)}. "
            f"{looks}Choose a LoRA that was trained on this model."
        )
    if placed.halves:
        raise BadLora(f"'{name}' lacks a half of {_some(placed.halves)}: it is not whole. Download it again.")
    return placed


def _config(
    name: str,
    placed: _Placed,
    settings: Settings,
    denoiser: torch.nn.Module,
    alphas: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """peft's LoraConfig. Without alphas in the file, or in its header, an addition is taken as it is: alpha = rank."""
    rank = Counter(placed.ranks.values()).most_common(1)[0][0]
    patterns = {layer: r for layer, r in placed.ranks.items() if r != rank}
    scaling: dict[str, Any] = {"lora_alpha": rank, "alpha_pattern": _anchored(patterns)}
    if alphas:
        if odd := [key for key, alpha in alphas.items() if not abs(alpha) <= MOST_ALPHA]:
            raise BadLora(f"'{name}' is damaged: the alpha of '{odd[0]}' is {alphas[odd[0]]:g}. Download it again.")
        scaling["alpha_pattern"] = _anchored({layer: alphas.get(layer, r) for layer, r in placed.ranks.items()})
    elif settings.lora_alpha is not None:
        by_layer = alpha_by_layer(name, settings, placed.ranks, denoiser)
        scaling = {"lora_alpha": settings.lora_alpha, "alpha_pattern": _anchored(by_layer)}
        scaling |= {"use_rslora": True} if settings.use_rslora else {}
    return {
        "r": rank,
        "rank_pattern": _anchored(patterns),
        "target_modules": sorted(placed.ranks),
        "lora_bias": placed.biased,
        **scaling,
    }


def _anchored(by_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Make patterns for peft that match one layer each, and none whose name ends alike."""
    return {f"^{layer}": value for layer, value in by_layer.items()}


def _as_layer(name: str, key: str, tensor: torch.Tensor, denoiser: torch.nn.Module) -> torch.Tensor:
    weight = denoiser.get_parameter(f"{key.rpartition('.lora_')[0]}.weight")
    cast = tensor.to(weight.device, weight.dtype)
    if not torch.isfinite(cast).all():
        raise BadLora(
            f"'{name}': '{key}' reaches {tensor.abs().max():.3g}, which does not fit {weight.dtype}. "
            "Choose precision 'bf16' or 'fp32'."
        )
    return cast


def _some(keys: Iterable[str]) -> str:
    """'3 tensors, such as …'"""
    found = sorted(keys)
    return f"{len(found)} tensor{'s' * (len(found) != 1)}, such as '{shown(found[0], 100)}'" if found else "nothing"


def _place(shapes: Mapping[str, Shape], layers: Mapping[str, torch.nn.Module]) -> _Placed:
    """Find where the tensors of a file belong in a denoiser with these layers."""
    placed = _Placed()
    underscored = {name.replace(".", "_"): name for name in layers}
    parts: dict[str, dict[str, str]] = {}
    for key in shapes:
        ending = next((ending for ending in _ENDINGS if key.endswith(ending)), "")
        placed.is_lora |= "lora" in key
        stem = key.removesuffix(ending)
        layer = underscored.get(_KOHYA.sub("", stem), "") if _KOHYA.match(stem) else _STARTS.sub("", stem)
        fits = _ENDINGS.get(ending) != "alpha" or math.prod(shapes[key]) == 1
        if ending and fits and isinstance(layers.get(layer), (torch.nn.Linear, torch.nn.Conv2d)):
            parts.setdefault(layer, {})[_ENDINGS[ending]] = key
        else:
            placed.unplaced.append(key)
    for layer, found in parts.items():
        if not {"A", "B"} <= found.keys():
            placed.halves.append(layer)
            continue
        weight = layers[layer].weight
        assert isinstance(weight, torch.Tensor)
        _fit(placed, layer, found, shapes, tuple(weight.shape))
    return placed


def _fit(placed: _Placed, layer: str, found: Mapping[str, str], shapes: Mapping[str, Shape], weight: Shape) -> None:
    """weight: the shape of the layer's own, [out, in] or [out, in, height, width]."""
    outputs, *inputs = weight
    rank = (shapes[found["A"]] or (0,))[0]
    ones = [1] * (len(weight) - 2)
    wanted = {"A": (["rank", *inputs], [rank, *inputs]), "B": ([outputs, "rank", *ones], [outputs, rank, *ones])}
    if "bias" in found:
        wanted["bias"] = ([outputs], [outputs])
    for part, (in_words, fits) in wanted.items():
        if list(shapes[found[part]]) != fits or not 0 < rank <= _MOST_RANK:
            placed.misfits[found[part]] = f"[{', '.join(map(str, in_words))}]"
        kind = {"A": "lora_A.weight", "B": "lora_B.weight", "bias": "lora_B.bias"}[part]
        placed.keys[f"{layer}.{kind}"] = found[part]
    placed.ranks[layer] = rank
    if "alpha" in found:
        placed.alphas[layer] = found["alpha"]


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
            return f"{known}, in a format that diffusers does not read: get it in another. " if own else f"{known}. "
    return ""


def _trained_on(misfits: Mapping[str, Shape]) -> str:
    """Return a sentence on the model whose width the shapes show, "" where it is not known."""
    for key, shape in misfits.items():
        if re.search(r"attn1[._]to_(q|k|v|out[._]0)\.lora(_A|_down|\.down)\.weight", key) and shape[1:] in _WIDTHS:
            return f"Its width of {shape[1]} is that of {_WIDTHS[shape[1:]]}. "
    return ""
