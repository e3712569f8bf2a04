"""Stable Video Diffusion from ComfyUI's single file (models/checkpoints/svd_xt.safetensors), one component at a time.

The file is checked as a whole, by its header, before weights are read. Loading a component reads only its own tensors,
one after the other, each straight into the wanted dtype; the rest of the file is never in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ...precision.policy import as_stored
from ...trust.message import Message, listed, shown
from ..errors import BadFolder
from ..families import svd_keys
from ..families.svd import SVD
from ..families.svd_keys import PREFIXES
from ..families.table import VARIANTS
from ..small_files import fields_of, reading_file
from .on_disk import StoredModel, Tensor, Weights, bytes_by_dtype, read_header
from .weight_files import check_fit

_GET = "Get svd_xt.safetensors from https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt."


@dataclass(frozen=True)
class SvdFile(StoredModel):
    """A single file that passed every check."""

    keys: Mapping[str, Mapping[str, str]]  # component → parameter → key; "": a no-op, not in the file

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """Load a component in `dtype`, on the CPU, for inference. Weights are copies, so the file may be replaced."""
        with torch.inference_mode(False), torch.no_grad():
            module = SVD.components[name].on_meta(self.configs[name])
            shapes = {key: tensor.shape for key, tensor in module.state_dict().items()}
            module.load_state_dict(self._read(self.keys[name], shapes, dtype), assign=True)
            _fill_buffers(module)
            if name == "unet":
                for part, norm in module.named_modules():
                    if ".resnets." in part and isinstance(norm, torch.nn.GroupNorm):
                        norm.eps = svd_keys.UNET_RESNET_EPS
        return module.eval().requires_grad_(False)

    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        key = self.keys[name][parameter[0]]
        shape = () if key else self.bare(name, torch.float32).get_parameter(parameter[0]).shape
        return self._read({parameter[0]: key}, {parameter[0]: shape}, torch.float32)[parameter[0]]

    def unweighted(self, name: str) -> Any:
        """Return the "scheduler" or the "feature_extractor", with the published settings; single files lack them."""
        made = svd_keys.SCHEDULER if name == "scheduler" else svd_keys.FEATURE_EXTRACTOR
        return SVD.components[name].class_named()(**made)

    def _read(
        self, keys: Mapping[str, str], shapes: Mapping[str, Sequence[int]], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Return {parameter: values}. keys: {parameter: key, or ""}. shapes: of parameters that the file lacks."""
        state: dict[str, torch.Tensor] = {}
        with reading_file(self.name), safe_open(self.path, framework="pt") as file:  # a tensor is read when it is cast
            for name, key in keys.items():
                tensor = _converted(file.get_tensor(key), key, name) if key else _neutral(shapes[name])
                state[name] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return state


def read_svd(path: Path) -> SvdFile:
    """Check a single file against Stable Video Diffusion's layout, and return what it holds. Only its header is read.
    Raises BadFolder where it is no safetensors file, a truncated one or another model's, and where tensors are missing,
    left over or of another shape."""
    if path.suffix.lower() != ".safetensors":
        raise BadFolder(
            "'{}' is not a .safetensors file. Other files hold pickled weights, which can run code when loaded and "
            "are refused. {}",
            path.name,
            _GET,
        )
    with reading_file(path.name):
        header = read_header(path)
    if why := svd_keys.why_not_svd(header.tensors):
        raise BadFolder("'{}' is not a Stable Video Diffusion checkpoint: {}. {}", path.name, why, _GET)
    configs, keys, weights = {}, {}, {}
    for name in PREFIXES:
        configs[name], keys[name] = fit(path.name, name, header.tensors)
        sizes = bytes_by_dtype({key: header.tensors[key] for key in keys[name].values() if key})
        weights[name] = Weights((path,), sum(sizes.values()), sizes)
    known = (*PREFIXES.values(), *svd_keys.UNUSED)
    unused = sorted(key for key in header.tensors if not key.startswith(known))
    return SvdFile(
        path=path,
        family=SVD,
        variant=as_stored(VARIANTS[SVD.variant(configs["unet"])], weights["unet"].stored_dtype),
        weights=weights,
        configs=configs,
        denoiser_config=configs["unet"],
        vae_config=configs["vae"],
        options={},
        notes=(Message("the file holds unused tensors: {}", listed(unused, 3, limit=100)),) if unused else (),
        keys=keys,
    )


def fit(where: str, name: str, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config that the file's shapes tell, and where each parameter of a model with that config comes from.

    where: for messages. name: of the component. tensors: what the file's header says.
    Raises BadFolder unless each tensor has a place, and each place a tensor of the right shape.
    """
    prefix, spec = PREFIXES[name], SVD.components[name]
    mine = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    try:
        config = svd_keys.CONFIGS[name]({key: tensor.shape for key, tensor in mine.items()})
        fields_of(spec, spec.classes[0], config)
        module = spec.on_meta(config)
    except (LookupError, ValueError, TypeError, RuntimeError, ArithmeticError) as error:  # Unreadable among them
        facts = where, spec.classes[0], type(error).__name__, shown(str(error), 200), _GET
        raise BadFolder("'{}': no {} can be built from the sizes of its tensors ({}: {}). {}", *facts) from error
    keys: dict[str, str] = {}
    for parameter in module.state_dict():
        key = svd_keys.key_of(name, parameter, config)
        keys[parameter] = next((prefix + one for one in (key, parameter) if one in mine), "")
    found = {parameter: _as_converted(tensors[key], key, parameter) for parameter, key in keys.items() if key}
    left = mine.keys() - {key.removeprefix(prefix) for key in keys.values()} - {"vision_model.embeddings.position_ids"}
    for parameter in ("quant_conv.weight", "quant_conv.bias"):
        if name == "vae" and not keys[parameter]:
            found[parameter] = Tensor("F32", tuple(module.get_parameter(parameter).shape))
    check_fit(f"{where}/{name}", module, found | {prefix + key: mine[key] for key in left})
    return config, keys


def _converted(tensor: torch.Tensor, key: str, parameter: str) -> torch.Tensor:
    """Return a tensor of the file in the layout of diffusers' or transformers' parameter."""
    if ".in_proj_" in key:  # query, key and value are concatenated
        return tensor.chunk(3)["qkv".index(parameter.rpartition("_proj.")[0][-1])]
    if key.endswith(".visual.proj"):
        return tensor.t()
    if ".attn_1." in key and tensor.ndim == 4:  # a 1×1 convolution; a linear layer in diffusers
        return tensor[:, :, 0, 0]
    return tensor


def _as_converted(tensor: Tensor, key: str, parameter: str) -> Tensor:
    """Return a header's tensor with the parameter's shape; unchanged if it cannot be converted."""
    try:
        shape = _converted(torch.empty(tensor.shape, device="meta"), key, parameter).shape
    except (RuntimeError, IndexError):
        return tensor
    return Tensor(tensor.dtype, tuple(shape))


def _neutral(shape: Sequence[int]) -> torch.Tensor:
    """Return the weight or the bias of a 1×1 convolution that changes nothing."""
    return torch.eye(shape[0]).reshape(*shape) if len(shape) > 1 else torch.zeros(*shape)


def _fill_buffers(module: torch.nn.Module) -> None:
    """Fill the buffers that no checkpoint holds: CLIP's position ids."""
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta and name.endswith("position_ids"):
            owner = module.get_submodule(name.rpartition(".")[0])
            ids = torch.arange(buffer.shape[-1]).expand(buffer.shape)
            owner.register_buffer("position_ids", ids, persistent=False)
    if empty := [name for name, buffer in module.named_buffers() if buffer.is_meta]:
        raise RuntimeError(f"{type(module).__name__} has a buffer that this version does not know: {empty[0]}.")
