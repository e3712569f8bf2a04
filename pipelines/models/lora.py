"""Adds LoRAs to a shallow copy of a denoiser. The denoiser's own weights are shared and stay unchanged.

peft computes the low-rank additions, so results equal diffusers' bit by bit. Differences of whole weights, and of
norms' biases, are summed up in copies of the few layers that have them.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ...precision.loaded_weights import LEAST_NORMAL
from ...precision.shallow_copy import keep_in_fp32, structural_copy
from ...trust.foreign import Unreadable
from ...trust.message import Message, shown
from ..errors import BadLora
from ..families.spec import FamilySpec
from ..small_files import reading_file
from .lora_layouts import MOST_ALPHA, LayerNames, LoraSettings, Placed, beside, files_of, header, place

LoraKey = tuple[str, int, int, float]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lora:
    """A LoRA file and its scale: 1 as trained, 0 off, negative in the opposite direction."""

    path: Path
    scale: float = 1.0
    denoiser: str = ""  # the component that it is added to; "": all denoisers
    notes: tuple[str, ...] = ()  # lines for the report, from `check_lora`

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise BadLora(
                "The scale of '{}' is {}, but must be a finite number, such as 1.", self.path.name, self.scale
            )

    @property
    def key(self) -> LoraKey:
        """A key that changes with the file and the scale."""
        try:
            stats = [file.stat() for file in files_of(self.path)]
        except OSError:
            return (str(self.path), 0, 0, self.scale)
        times = sum(it.st_mtime_ns + it.st_ctime_ns for it in stats)  # a copy may keep the time of its original
        return (str(self.path), sum(it.st_size for it in stats), times, self.scale)

    @property
    def beside(self) -> Mapping[str, Any] | None:
        """The settings that peft saved next to the file; None if there are none. Raises BadLora."""
        with reading_file(self.path.name, BadLora):
            return beside(self.path)

    def __str__(self) -> str:
        where = f" in {self.denoiser}" if self.denoiser else ""
        return f"LoRA {self.path.name} at {self.scale:g}{where}"


@dataclass(frozen=True)
class LoraWeights:
    """The tensors of a checked LoRA file, by the denoiser's names."""

    tensors: Mapping[str, torch.Tensor]  # <layer>.lora_A.weight [rank, in], .lora_B.weight [out, rank], .lora_B.bias
    config: Mapping[str, Any]  # fields of peft's LoraConfig
    differences: Mapping[str, torch.Tensor]  # parameter → the difference to add, in its shape


def keys(loras: Sequence[Lora]) -> tuple[LoraKey, ...]:
    """Return the keys of the LoRAs whose scale is not 0."""
    return tuple(lora.key for lora in loras if lora.scale)


def check_lora(path: Path, family: FamilySpec, denoiser: torch.nn.Module) -> tuple[str, ...]:
    """Check a file by its header: names, shapes, settings. Reads no weights; `denoiser` may be on "meta".

    Returns lines for the report: the ignored parts of the file, and assumptions.
    Raises BadLora if it is no whole safetensors file, another model's, or of an unsupported kind.
    """
    _check_family(family)
    with reading_file(path.name, BadLora):
        shapes, settings = header(path)
        placed = place(shapes, family, denoiser)
        _alphas(placed, settings, LayerNames(family, denoiser), {})
    return tuple(_notes(path.name, placed, settings))


def _notes(name: str, placed: Placed, settings: LoraSettings) -> Iterator[str]:
    if what := placed.left_out:
        yield Message("LoRA {}: ignored what only image-to-video models have: {}", name, what)
    if placed.by_peft and settings.lora_alpha is None and not placed.alphas:
        yield Message(
            "LoRA {}: peft's adapter_config.json is not beside it, so its alpha is assumed to be its rank", name
        )


def read_lora(path: Path, family: FamilySpec, denoiser: torch.nn.Module) -> LoraWeights:
    """Check a file and read it. Raises BadLora as `check_lora` does, and if a weight is not finite."""
    names = LayerNames(family, denoiser)
    with reading_file(path.name, BadLora):
        _, settings = header(path)
        tensors = load_file(path)
        placed = place({key: tuple(tensor.shape) for key, tensor in tensors.items()}, family, denoiser)
        if broken := next((key for key, tensor in tensors.items() if not torch.isfinite(tensor.float()).all()), None):
            raise Unreadable(f"it is damaged: '{shown(broken)}' holds NaN or infinite values")
        known = {layer: float(tensors[key].reshape(-1)[0]) for layer, key in placed.alphas.items()}
        alphas, is_rs = _alphas(placed, settings, names, known)
    fitted = {key: tensors[key].reshape(shape) for key, shape in placed.shapes.items()}
    added: dict[str, torch.Tensor] = {}
    for layer, parts in placed.layers.items():
        rank = placed.ranks[layer]
        unscaled = math.sqrt(rank) if is_rs else rank  # with this alpha, peft scales by 1
        outputs, *inputs = names.parameters[f"{layer}.weight"].shape
        down = fitted[parts["A"]] if "A" in parts else torch.zeros(rank, *inputs)
        up = fitted[parts["B"]] if "B" in parts else torch.zeros(outputs, rank, *[1] * (len(inputs) - 1))
        if "bias difference" in parts:  # alpha does not scale a bias difference
            up, alphas[layer] = up.float() * (alphas[layer] / unscaled), unscaled
        (down, of_down), (up, of_up) = _held_by_fp16(down), _held_by_fp16(up)
        alphas[layer] /= of_down * of_up
        added |= {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
        if placed.biased:
            bias = parts.get("bias") or parts.get("bias difference")
            added[f"{layer}.lora_B.bias"] = fitted[bias] * (of_down * of_up) if bias else torch.zeros(outputs)
    differences = {name: fitted[key] for name, key in placed.differences.items()}
    return LoraWeights(added, _config(placed, alphas, is_rs), differences)


def _held_by_fp16(matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return a matrix and the factor that it was multiplied by: 1, or a power of two if fp16 would underflow."""
    peak = matrix.float().abs().max().item() if matrix.numel() else 0.0
    if not 0 < peak < LEAST_NORMAL:
        return matrix, 1.0
    louder = 2.0 ** min(-math.floor(math.log2(peak * 2**6)), 100)  # within float32's range
    return matrix.float() * louder, louder


def with_loras(denoiser: torch.nn.Module, loras: Sequence[Lora], family: FamilySpec) -> torch.nn.Module:
    """Return a shallow copy of `denoiser`, for inference, with the LoRAs added, each at its scale.

    The denoiser is not changed and shares its weights with the copy: to unload a LoRA, use the denoiser. Without LoRAs,
    or if all scales are 0, the denoiser itself is returned. Added weights have the dtype and device of their layer.
    Raises BadLora.
    """
    for lora in loras:
        check_lora(lora.path, family, denoiser)
    acting = [lora for lora in loras if lora.scale]
    if not acting:
        return denoiser
    with torch.inference_mode(False), torch.no_grad():
        shell: Any = structural_copy(denoiser)
        read = [read_lora(lora.path, family, denoiser) for lora in acting]
        _add_differences(shell, acting, read)
        fitting = [
            {key: _as_layer(lora.path.name, key, tensor, shell) for key, tensor in weights.tensors.items()}
            for lora, weights in zip(acting, read, strict=True)
        ]
        scales: dict[str, float] = {}
        for index, (lora, weights, tensors) in enumerate(zip(acting, read, fitting, strict=True)):
            logger.info("adding %s to %s at %g", lora.path.name, type(denoiser).__name__, lora.scale)
            if not tensors:
                continue
            adapter = f"lora_{index}"  # not the file's name: compiled code depends on it
            scales[adapter] = lora.scale
            with warnings.catch_warnings():  # peft's, for a second adapter and for biases: both intended
                warnings.filterwarnings("ignore", "Already found a `peft_config`|`lora_bias=True` was passed")
                shell.load_lora_adapter(
                    tensors, prefix=None, adapter_name=adapter, metadata=dict(weights.config), low_cpu_mem_usage=True
                )
        if scales:
            shell.set_adapters([*scales], [*scales.values()])
        _scales_as_tensors(shell)
    return shell.eval().requires_grad_(False)


def _add_differences(shell: torch.nn.Module, loras: Sequence[Lora], read: Sequence[LoraWeights]) -> None:
    """Give layers with differences their own parameters. Layers without children keep the sums in float32 and compute
    in it: in bf16, a norm's weight near 1 would lose a difference of 1e-3."""
    sums: dict[str, dict[str, torch.Tensor]] = {}
    for lora, weights in zip(loras, read, strict=True):
        for path, difference in weights.differences.items():
            owner, _, name = path.rpartition(".")
            weight = shell.get_parameter(path)
            exact = torch.promote_types(weight.dtype, torch.float32)
            changed = sums.setdefault(owner, {})
            changed[name] = changed.get(name, weight.to(exact)) + lora.scale * difference.to(weight.device, exact)
    for owner, changed in sums.items():
        part = shell.get_submodule(owner)
        dtype = part.get_parameter(next(iter(changed))).dtype
        own = dict(part._parameters)
        if alone := not part._modules:  # else its children would compute in float32 too
            own = {name: each if each is None else _parameter(each.clone()) for name, each in own.items()}
        own |= {name: _parameter(weight if alone else weight.to(dtype)) for name, weight in changed.items()}
        part.__dict__["_parameters"] = own
        if alone and dtype.itemsize < torch.float32.itemsize:
            keep_in_fp32(part, dtype)


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _scales_as_tensors(shell: torch.nn.Module) -> None:
    """Make peft's scales scalar tensors: a number would be a graph's constant, and each scale a new graph."""
    for layer in shell.modules():
        if isinstance(scaling := getattr(layer, "scaling", None), dict):
            scaling |= {name: torch.tensor(scale, dtype=torch.float32) for name, scale in scaling.items()}


def _check_family(family: FamilySpec) -> None:
    """Raise BadLora if diffusers has no LoRAs for the family, or peft is missing."""
    import diffusers
    from diffusers.utils import USE_PEFT_BACKEND

    if not USE_PEFT_BACKEND:
        raise BadLora("LoRA needs the Python package peft, which is missing or too old. Install requirements.txt.")
    if not hasattr(getattr(diffusers, family.pipeline), "lora_state_dict"):
        raise BadLora(
            "diffusers {} has no LoRA for {}. Use CogVideoX, Wan or CogView4, or no LoRA.",
            diffusers.__version__,
            family.name,
        )


def _alphas(
    placed: Placed, settings: LoraSettings, names: LayerNames, known: Mapping[str, float]
) -> tuple[dict[str, float], bool]:
    """Return the alpha of each layer, and whether the root of its rank divides it, and not the rank. Without alphas in
    the file, or in its settings, an addition is taken as it is: alpha = rank. known: layer → alpha in the file. Raises
    Unreadable for an alpha out of bounds, and for one of what is no layer of the denoiser."""
    if odd := [layer for layer, alpha in known.items() if not abs(alpha) <= MOST_ALPHA]:
        raise Unreadable(f"it is damaged: the alpha of '{odd[0]}' is {known[odd[0]]:g}")
    if known or settings.lora_alpha is None:
        return {layer: known.get(layer, float(rank)) for layer, rank in placed.ranks.items()}, False
    patterns = {pattern.removeprefix("^"): alpha for pattern, alpha in (settings.alpha_pattern or {}).items()}
    if unknown := patterns.keys() - {end for layer in names.layers if layer for end in names.ends(layer)}:
        raise Unreadable(f"its header has an alpha for '{shown(min(unknown))}', which is not a layer of this model")
    alphas, order = {}, [*patterns]  # if two names fit a layer, the first counts, as in peft
    for layer in placed.ranks:
        fits = sorted((end for end in names.ends(layer) if end in patterns), key=order.index)
        alphas[layer] = patterns[fits[0]] if fits else settings.lora_alpha
    return alphas, bool(settings.use_rslora)


def _config(placed: Placed, alphas: Mapping[str, float], is_rs: bool) -> dict[str, Any]:  # peft's LoraConfig
    rank = Counter(placed.ranks.values()).most_common(1)[0][0] if placed.ranks else 1
    return {
        "r": rank,
        "rank_pattern": _anchored({layer: r for layer, r in placed.ranks.items() if r != rank}),
        "target_modules": sorted(placed.ranks),
        "lora_bias": placed.biased,
        "lora_alpha": rank,
        "alpha_pattern": _anchored({layer: alpha for layer, alpha in alphas.items() if alpha != rank}),
        "use_rslora": is_rs,
    }


def _anchored(by_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by patterns for peft that match only that layer, and no layer whose name ends with its name."""
    return {f"^{layer}": value for layer, value in by_layer.items()}


def _as_layer(name: str, key: str, tensor: torch.Tensor, shell: torch.nn.Module) -> torch.Tensor:
    weight = shell.get_parameter(f"{key.rpartition('.lora_')[0]}.weight")
    cast = tensor.to(weight.device, weight.dtype)
    if not torch.isfinite(cast).all():
        facts = name, key, tensor.abs().max(), weight.dtype
        raise BadLora("'{}': '{}' reaches {:.3g}, which does not fit {}. Choose precision 'bf16' or 'fp32'.", *facts)
    return cast
