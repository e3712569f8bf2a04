"""Stable Video Diffusion from ComfyUI's single file (models/checkpoints/svd_xt.safetensors), one component at a time.

The file is checked as a whole, by its header, before a weight is read. Loading a component reads its own tensors alone,
one after the other, each straight into the dtype that is wanted; the rest of the file is never in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...precision.policy import as_stored
from ...trust.foreign import Unreadable
from ...trust.message import Message
from ...trust.text import shown
from ..errors import BadFolder
from ..families import svd_keys
from ..families.svd import SVD
from ..families.svd_keys import PREFIXES, Shapes, Source
from ..families.table import VARIANTS
from ..safetensors_header import FLOATS, Header, read_header
from ..small_files import fields_of
from .on_disk import StoredModel, Weights

NUM_FRAMES = 25  # that SVD-XT makes; a file of SVD, which makes 14, has the same keys and shapes
_MAPPED_AT_ONCE = 2**24  # elements
_WORDS = {"unet": "UNet", "vae": "VAE", "image_encoder": "image encoder"}
_GET = "Get svd_xt.safetensors from https://huggingface.co/stabilityai/stable-video-diffusion-img2vid-xt."

CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # a tensor of the file → the parameter
    "": lambda tensor: tensor,
    "linear": lambda tensor: tensor[:, :, 0, 0] if tensor.ndim == 4 else tensor,  # a 1×1 convolution; its bias stays
    "transposed": lambda tensor: tensor.t(),
    "first third": lambda tensor: tensor.chunk(3)[0],  # query, key and value of an attention lie one over the other
    "second third": lambda tensor: tensor.chunk(3)[1],
    "last third": lambda tensor: tensor.chunk(3)[2],
}
MADE: dict[str, Callable[[tuple[int, ...]], torch.Tensor]] = {  # the shape of a parameter that is in no file → it
    "identity": lambda shape: torch.eye(shape[0]).reshape(shape),
    "zeros": torch.zeros,
}


@dataclass(frozen=True)
class SvdComponent:
    """One component of a single file."""

    config: Mapping[str, Any]  # as its config.json would say
    sources: Mapping[str, Source]  # parameter → tensor of the file


@dataclass(frozen=True)
class SvdFile(StoredModel):
    """A single file that passed every check."""

    components: Mapping[str, SvdComponent]  # unet, vae, image_encoder

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        return load_component(self, name, dtype)

    def bare(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        return SVD.components[name].on_meta(self.components[name].config, dtype)

    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        source = {parameter[0]: self.components[name].sources[parameter[0]]}
        return _read(self.path, source, {parameter[0]: torch.empty(0)}, torch.float32)[parameter[0]]

    def unweighted(self, name: str) -> Any:
        return load_unweighted(name)


def read_svd(path: Path, num_frames: int = NUM_FRAMES) -> SvdFile:
    """Check a single file against Stable Video Diffusion's layout, and return what it holds. Only its header is read.

    num_frames: what the UNet's config is to say, and so the default length of a video; the file does not tell.

    Raises BadFolder where it is no safetensors file, a truncated one or another model's (named where it is known), and
    where tensors are missing, left over or of another shape.
    """
    header = _header(path)
    shapes = header.shapes
    _check_is_svd(path.name, shapes)
    components, weights = {}, {}
    for name in PREFIXES:
        config, sources = fit(path.name, name, shapes, num_frames)
        taken = {source.key for source in sources.values() if source.key}
        sizes: Counter[str] = Counter()
        for key in taken:
            tensor = header.tensors[key]
            if tensor.dtype not in FLOATS:
                raise BadFolder(
                    "'{}' holds '{}' as {}: quantised weights are not supported. {}",
                    path.name,
                    key,
                    tensor.dtype,
                    _GET,
                )
            sizes[tensor.dtype] += tensor.n_bytes
        components[name] = SvdComponent(config, sources)
        weights[name] = Weights((path,), sizes.total(), dict(sizes))
    unet, vae = components["unet"].config, components["vae"].config
    return SvdFile(
        path=path,
        family=SVD,
        variant=as_stored(VARIANTS[SVD.variant(unet)], weights["unet"].stored_dtype),
        weights=weights,
        denoiser_config=unet,
        vae_config=vae,
        options={},
        notes=tuple(_notes(shapes)),
        components=components,
    )


def load_component(file: SvdFile | Path, name: str, dtype: torch.dtype) -> torch.nn.Module:
    """Load the "unet", "vae" or "image_encoder" of a single file, in `dtype`, on the CPU, ready to infer.

    Its weights are copies: the file may be moved or replaced afterwards.

    Raises BadFolder as `read_svd` does, and where the file cannot be read.
    """
    if isinstance(file, Path):
        file = read_svd(file)
    component = file.components[name]
    with torch.inference_mode(False), torch.no_grad():
        module = SVD.components[name].on_meta(component.config)
        module.load_state_dict(_read(file.path, component.sources, module.state_dict(), dtype), assign=True)
        _fill_buffers(module)
        if name == "unet":
            _set_eps(module)
    return module.eval().requires_grad_(False)


def load_unweighted(name: str) -> Any:
    """Make the "scheduler" or the "feature_extractor", which no single file holds, as they are published."""
    if name == "scheduler":
        from diffusers import EulerDiscreteScheduler

        return EulerDiscreteScheduler(**svd_keys.SCHEDULER)
    from transformers import CLIPImageProcessor

    return CLIPImageProcessor(**svd_keys.FEATURE_EXTRACTOR)


def fit(
    where: str, name: str, shapes: Shapes, num_frames: int = NUM_FRAMES
) -> tuple[dict[str, Any], dict[str, Source]]:
    """Return the config that the file's shapes tell, and where each parameter of a model with that config comes from.

    where: the file's name, for messages.
    name: "unet", "vae" or "image_encoder".

    Raises BadFolder unless each tensor has a place, and each place a tensor of the right shape.
    """
    here = Message("'{}': its {}", where, _WORDS[name])
    sources, unplaced = svd_keys.sources(name, shapes)
    if unplaced:
        raise BadFolder("{} has {} that Stable Video Diffusion has not. {}", here, _tensors(unplaced), _GET)
    ours = {key: _shape_of(source, shapes) for key, source in sources.items() if source.key}
    try:
        config = _CONFIGS[name](ours, num_frames)
    except (KeyError, ValueError) as error:
        raise BadFolder(
            "{} lacks a tensor that tells its size, or has an odd one ({}). {}", here, error, _GET
        ) from None
    try:
        component = SVD.components[name]
        fields_of(component, component.classes[0], _as_json(config))
        wanted = {key: tuple(tensor.shape) for key, tensor in component.on_meta(config).state_dict().items()}
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, IndexError) as error:  # Unreadable among them
        raise BadFolder("{} has sizes of which no model can be built: {}. {}", here, error, _GET) from error
    missing = sorted(wanted.keys() - sources.keys())
    if missing:
        raise BadFolder("{} lacks {}, in diffusers' names. Download the file again.", here, _tensors(missing))
    extra = sorted(sources[key].key or key for key in sources.keys() - wanted.keys())
    if extra:
        raise BadFolder("{} has {} that a model of its sizes has not. {}", here, _tensors(extra), _GET)
    for key, shape in ours.items():
        if shape != wanted[key]:
            raise BadFolder(
                "{} has '{}' of shape {}, which does not fit {} in diffusers' '{}'. {}",
                here,
                sources[key].key,
                list(shapes[sources[key].key]),
                list(wanted[key]),
                key,
                _GET,
            )
    return config, sources


_CONFIGS: dict[str, Callable[[Shapes, int], dict[str, Any]]] = {
    "unet": svd_keys.unet_config,
    "vae": lambda shapes, _num_frames: svd_keys.vae_config(shapes),
    "image_encoder": lambda shapes, _num_frames: svd_keys.image_encoder_config(shapes),
}


def _as_json(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


def _shape_of(source: Source, shapes: Shapes) -> tuple[int, ...]:
    """Return the shape of the parameter that a tensor becomes, or the tensor's own where it cannot become one."""
    shape = shapes[source.key]
    try:
        return tuple(CHANGES[source.how](torch.empty(shape, device="meta")).shape)
    except (RuntimeError, IndexError):
        return shape


def _read(
    path: Path, sources: Mapping[str, Source], places: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    state: dict[str, torch.Tensor] = {}
    try:
        for part in _parts(sources, places):
            with safe_open(path, framework="pt") as file:  # maps the file: a tensor's pages are read when it is cast
                for key in part:
                    source = sources[key]
                    if source.key:
                        tensor = CHANGES[source.how](file.get_tensor(source.key))
                    else:
                        tensor = MADE[source.how](tuple(places[key].shape))
                    state[key] = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
                    del tensor
    except (SafetensorError, OSError) as error:
        raise BadFolder("'{}' could not be read: {}. Was it replaced? Load it again.", path.name, error) from error
    return state


def _parts(sources: Mapping[str, Source], places: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    """Yield the names of parameters that are read from one map of the file: the pages that are read count as this
    process's memory until the map is let go of."""
    part, elements = [], 0
    for key in sources:
        part.append(key)
        elements += places[key].numel()
        if elements >= _MAPPED_AT_ONCE:
            yield part
            part, elements = [], 0
    yield part


def _fill_buffers(module: torch.nn.Module) -> None:
    """Fill the buffers that no checkpoint holds: CLIP's position ids."""
    for name, buffer in list(module.named_buffers()):
        owner, _, attribute = name.rpartition(".")
        if buffer.is_meta and attribute == "position_ids":
            ids = torch.arange(buffer.shape[-1]).expand(buffer.shape)
            module.get_submodule(owner).register_buffer(attribute, ids, persistent=False)
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if empty:
        raise RuntimeError(f"{type(module).__name__} has a buffer that this version does not know: {empty[0]}.")


def _set_eps(unet: torch.nn.Module) -> None:
    for name, norm in unet.named_modules():
        if ".resnets." in name and isinstance(norm, torch.nn.GroupNorm):
            norm.eps = svd_keys.UNET_RESNET_EPS


def _header(path: Path) -> Header:
    if path.suffix.lower() != ".safetensors":
        raise BadFolder(
            "'{}' is not a .safetensors file. Others hold pickled weights, which can run code when loaded and are "
            "refused. {}",
            path.name,
            _GET,
        )
    try:
        return read_header(path)
    except FileNotFoundError:
        raise BadFolder("'{}' is not there any more. Choose another file.", path.name) from None
    except (OSError, Unreadable) as error:
        raise BadFolder(
            "'{}' is not a whole safetensors file ({:,} bytes): {}. Delete it and download it again.",
            path.name,
            path.stat().st_size,
            error,
        ) from None


def _check_is_svd(where: str, shapes: Shapes) -> None:
    """Raise a BadFolder that says what the file is, or what it lacks, where it is not all of an SVD checkpoint."""
    svd = any(key.startswith(svd_keys.SIGNATURE) for key in shapes)
    for what, parts in svd_keys.OTHERS:
        if (not svd or svd_keys.SIGNATURE in parts) and all(any(part in key for key in shapes) for part in parts):
            raise BadFolder("'{}' is {}, not a Stable Video Diffusion checkpoint. {}", where, what, _GET)
    if not svd:
        first = f" (the first is '{shown(min(shapes))}')" if shapes else ""
        raise BadFolder(
            "'{}' is not an SVD checkpoint: none of its {} tensors{} is '{}*'. {}",
            where,
            len(shapes),
            first,
            svd_keys.SIGNATURE,
            _GET,
        )
    lacking = [
        f"its {_WORDS[name]} ({prefix}*)"
        for name, prefix in PREFIXES.items()
        if not any(key.startswith(prefix) for key in shapes)
    ]
    if lacking:
        raise BadFolder("'{}' is a part of Stable Video Diffusion without {}. {}", where, " and ".join(lacking), _GET)
    if svd_keys.TEMPORAL_DECODER not in shapes:
        raise BadFolder(
            "'{}' has the VAE that decodes frame by frame (svd_image_decoder), which is not supported. {}",
            where,
            _GET,
        )


def _notes(shapes: Shapes) -> list[str]:
    known = (*PREFIXES.values(), *svd_keys.UNUSED)
    unknown = sorted(key for key in shapes if not key.startswith(known))
    return [Message("the file has {} that no component uses", _tensors(unknown))] if unknown else []


def _tensors(keys: list[str]) -> str:
    return f"{len(keys)} tensor{'s' * (len(keys) > 1)} ('{shown(keys[0], 100)}'{' and others' * (len(keys) > 1)})"
