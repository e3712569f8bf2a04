"""A diffusers-format folder on disk, which is checked as a whole before a weight is read."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.policy import Variant, as_stored
from ...trust.foreign import Unreadable, fitting
from ...trust.message import Message, joined
from ...trust.text import listed, shown
from ..errors import BadFolder, LibraryFailed
from ..families.components import ComponentSpec
from ..families.spec import FamilySpec
from ..families.table import FAMILIES, VARIANTS
from ..small_files import (
    MOST_CONFIG_BYTES,
    Encoder,
    check_fields,
    check_loads,
    checked_files,
    explaining,
    load,
    read_json,
)
from .on_disk import StoredModel, Weights, name_of
from .weight_files import check_fit, weights_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelFolder(StoredModel):
    """A folder that passed every check."""

    classes: Mapping[str, str]  # component → class in model_index.json
    fields: Mapping[str, Mapping[str, Any]]  # component with weights → what its class takes of its config.json

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        options: dict[str, Any] = {"torch_dtype": dtype}
        if self.family.components[name].library == "transformers":  # which would take any field of config.json
            config = self.family.components[name].class_named(self.classes[name]).config_class
            options = {"dtype": dtype, "config": config.from_dict(dict(self.fields[name]))}
        loader = reader = self.family.components[name].class_named(self.classes[name])
        if self.family.components[name].library == "diffusers":
            reader = _with_config(loader, _read_config(self.path, name))
        with explaining(f"{self.name}/{name}", self.classes[name]):
            module, found = reader.from_pretrained(
                self.path / name, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
        module.__class__ = loader
        lost = {str(key) for what in ("missing_keys", "mismatched_keys", "error_msgs") for key in found[what]}
        lost |= {key for key, tensor in module.state_dict().items() if tensor.is_meta}
        if lost:
            raise BadFolder(
                "'{}/{}' was loaded without {} of its tensors, such as '{}': its files are not those that were "
                "checked. Load it again.",
                self.name,
                name,
                len(lost),
                shown(min(lost)),
            )
        return module

    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        from safetensors import safe_open

        for file in self.weights[name].files:
            with safe_open(file, framework="pt") as tensors:
                if known := set(parameter).intersection(tensors.keys()):
                    return tensors.get_tensor(known.pop())
        import torch

        whole = self.component(name, torch.float32)  # stored by another name, which its class knows
        return whole.get_parameter(parameter[0]).detach()

    def unweighted(self, name: str) -> Any:
        return load(self.path, name, self.family.components[name], self.classes[name])

    def unknown_fields(self, name: str) -> list[str]:
        if self.family.components[name].library != "diffusers":
            return []
        import diffusers

        known = signature(getattr(diffusers, self.classes[name]).__init__).parameters
        config = _read_config(self.path, name)
        unknown = sorted(key for key in config if key not in known and not key.startswith("_"))
        if not unknown:
            return []
        return [
            Message(
                "{}: config.json has fields that diffusers {} ignores: {}", name, diffusers.__version__, listed(unknown)
            )
        ]

    def bare(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        return self.family.components[name].on_meta(self.fields[name], dtype, name=self.classes[name])


def inspect(path: Path, expected: FamilySpec) -> ModelFolder:
    """Check a folder against a family, and return what it holds.

    Only JSON and safetensors headers are read, no weights. Each component is built without memory, to compare it with
    the headers.

    Raises BadFolder where it is no diffusers folder or one of another pipeline, where a component is missing, pickled
    or truncated, where a config makes no sense or reaches for more than the folder, and where tensors are missing, left
    over or of other shapes.
    """
    index = read_json(path / "model_index.json", missing=_no_index(path), limit=MOST_CONFIG_BYTES)
    found = shown(index.get("_class_name") or "pipeline without a name")
    if found != expected.pipeline:
        others = f" It belongs to {FAMILIES[found].name}." if found in FAMILIES else ""
        raise BadFolder(
            "'{}' holds a {}, not a {}.{} Choose a {} folder.",
            name_of(path),
            found,
            expected.pipeline,
            others,
            expected.name,
        )
    expected = expected.of(index)
    classes, weights, configs, fields, modules = {}, {}, {}, {}, {}
    for name, component in expected.components.items():
        classes[name] = component_class(path, index, name, component)
        if not (path / name).is_dir():
            raise BadFolder("'{}' has no '{}' folder. The download is incomplete: fetch it again.", name_of(path), name)
        if component.weights:
            configs[name] = _read_config(path, name)
            where = f"{name_of(path)}/{name}/config.json"
            fields[name] = check_fields(where, component, classes[name], configs[name])
            weights[name], tensors = weights_of(path, name, component.library)
            if _can_build():
                where = f"'{name_of(path)}/{name}'"
                module = modules[name] = _on_meta(where, component, classes[name], fields[name])
                check_fit(where, module, tensors, sharded=weights[name].sharded)
                configs[name] = _with_defaults(module, configs[name]) if name == "vae" else configs[name]
    for name, component in expected.components.items():
        if not component.weights and not modules:
            checked_files(path, name, component, classes[name])
        elif not component.weights:
            encoder = _encoder(modules["text_encoder"]) if name == "tokenizer" else None
            check_loads(path, name, component, classes[name], encoder, fingerprint(path / name))
    options = _options(path, expected, index)
    denoiser_config = configs[expected.denoiser]
    variant = as_stored(VARIANTS[expected.variant(denoiser_config)], weights[expected.denoiser].stored_dtype)
    return ModelFolder(
        path=path,
        family=expected,
        variant=variant,
        classes=classes,
        fields=fields,
        weights=weights,
        denoiser_config=denoiser_config,
        vae_config=configs["vae"],
        options=options,
        notes=(*_unlike(variant, denoiser_config), *_mixed(weights)),
    )


def family_of(path: Path) -> FamilySpec:
    """Return the family that a folder's model_index.json names. Raises BadFolder where it is none of ours."""
    index = read_json(path / "model_index.json", missing=_no_index(path), limit=MOST_CONFIG_BYTES)
    found = shown(index.get("_class_name") or "pipeline without a name")
    if found not in FAMILIES:
        raise BadFolder("'{}' holds a {}. Known: {}.", name_of(path), found, ", ".join(FAMILIES))
    return FAMILIES[found].of(index)


def component_class(path: Path, index: Mapping[str, Any], name: str, component: ComponentSpec) -> str:
    """Return the class that model_index.json names for a component. Raises BadFolder where it is not one of its own."""
    entry = index.get(name)
    found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    if found not in component.classes:
        raise BadFolder(
            "'{}': model_index.json names {} as {}, but a {} is needed. Download the model again, or use the original "
            "one.",
            name_of(path),
            shown(found) if found else "nothing",
            name,
            " or a ".join(component.classes),
        )
    return found


def list_folders(roots: Iterable[Path], depth: int = 3) -> dict[str, Path]:
    """Find the diffusers-format folders under the roots, at most `depth` levels below. Returns {name relative to its
    root, with forward slashes: path}.

    The first root wins where two hold the same name. A folder that cannot be read is passed over, and so is a link to
    one that was looked through already.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for folder in _walk(root, depth, {}):
            name = folder.relative_to(root).as_posix()
            found.setdefault(folder.name if name == "." else name, folder)
    return dict(sorted(found.items()))


def fingerprint(path: Path) -> str:
    """Return a hash that changes when a file of the folder is added, removed or rewritten, or when the single file is.
    It is made of names, sizes in bytes and times."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        stat = file.stat()
        digest.update(os.fsencode(file.relative_to(path).as_posix()))
        digest.update(f":{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def _no_index(path: Path) -> str:
    return (
        f"'{name_of(path)}' is not a diffusers-format folder: it has no model_index.json. "
        "Choose the folder that holds it, or download the model again."
    )


def _options(path: Path, family: FamilySpec, index: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return fitting(family.options, index).given()
    except Unreadable as error:
        raise BadFolder("'{}/model_index.json' cannot be used: {}. Download it again.", name_of(path), error) from None


def _can_build() -> bool:
    """Return whether modules can be built. Where PyTorch or diffusers are broken they cannot: `doctor` tells that, and
    nothing is loaded."""
    try:
        import diffusers  # noqa: F401
        import torch  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


def _on_meta(where: str, component: ComponentSpec, name: str, fields: Mapping[str, Any]) -> torch.nn.Module:
    """Return the module that a config describes, without memory. It is shared, and must not be changed.

    Raises BadFolder where no module can be built from the config.
    """
    try:
        return _built(component, name, json.dumps(fields, sort_keys=True))
    except (LibraryFailed, MemoryError):
        raise
    except Exception as error:  # whatever a class makes of sizes
        if not _builds_of_defaults(component, name):
            raise LibraryFailed(
                "No {} can be built here, whatever its config.json says ({}: {}). Install requirements.txt of this "
                "pack again.",
                name,
                type(error).__name__,
                shown(str(error), 200),
            ) from error
        raise BadFolder(
            "{}: no {} can be built from its config.json ({}: {}). Download it again.",
            where,
            name,
            type(error).__name__,
            shown(str(error), 200),
        ) from error


def _builds_of_defaults(component: ComponentSpec, name: str) -> bool:
    """Return whether a class can be built of its own defaults. Where it cannot, no file is to blame."""
    try:
        component.on_meta({}, name=name)
    except Exception:  # noqa: BLE001, which the first one explains
        return False
    return True


@lru_cache(maxsize=16)  # a folder is checked when it is fetched, opened and diagnosed: SVD's UNet takes 0.4 s each time
def _built(component: ComponentSpec, name: str, fields: str) -> torch.nn.Module:
    return component.on_meta(json.loads(fields), name=name)


def _with_config(loader: Any, config: Mapping[str, Any]) -> Any:
    """Return a class of diffusers that takes this for what its config.json holds: diffusers would read the file again,
    and no byte order mark."""
    reads = classmethod(lambda *_, **__: deepcopy(dict(config)))
    return type(loader.__name__, (loader,), {"_dict_from_json_file": reads, "__module__": loader.__module__})


def _encoder(module: Any) -> Encoder:
    """Return what a text encoder needs of its tokenizer."""
    pad, eos = module.config.pad_token_id, module.config.eos_token_id
    ends = eos if isinstance(eos, (list, tuple)) else [eos]
    return Encoder(
        module.get_input_embeddings().num_embeddings,
        None if pad is None or pad < 0 else pad,
        tuple(token for token in ends if token is not None and token >= 0),
    )


def _with_defaults(module: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of diffusers, filled up with its class's defaults."""
    return {**module.config, **config}


def _unlike(variant: Variant, config: Mapping[str, Any]) -> Iterator[str]:
    found = [
        Message("{} {} instead of {}", key, config[key], value)
        for key, value in variant.sizes.items()
        if config.get(key, value) != value
    ]
    if found:
        yield Message("laid out like {}, but with {}: planned like it", variant.name, joined(", ", found))


def _mixed(weights: Mapping[str, Weights]) -> Iterator[str]:
    for name, component in weights.items():
        if len(component.dtypes) > 1:
            total = sum(component.dtypes.values())
            shares = ", ".join(f"{dtype} {n / total:.0%}" for dtype, n in component.dtypes.items())
            yield Message("{} is stored in several dtypes ({}): loaded in one, that of its plan", name, shares)


def _walk(folder: Path, depth: int, seen: dict[Path, int]) -> Iterator[Path]:
    """seen: to what depth each real folder was looked through."""
    try:
        if (folder / "model_index.json").is_file():
            yield folder
        elif depth > 0 and folder.is_dir() and seen.get(real := folder.resolve(), 0) < depth:
            seen[real] = depth
            for child in sorted(folder.iterdir(), key=lambda child: (child.is_symlink(), child)):
                if child.is_dir() and not child.name.startswith("."):
                    yield from _walk(child, depth - 1, seen)
    except OSError:
        return


def _read_config(path: Path, name: str) -> dict[str, Any]:
    where = f"'{name_of(path)}/{name}'"
    missing = f"{where} has no config.json: fetch it again."
    return read_json(path / name / "config.json", missing=missing, limit=MOST_CONFIG_BYTES)
