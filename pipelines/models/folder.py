"""Models on disk: finds a model's family, and checks a folder in diffusers' format as a whole before weights are read.
`single_file.py` reads the other format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.machine import first_line
from ...precision.policy import Variant, as_stored
from ...trust.foreign import Unreadable, fitting
from ...trust.message import Message, joined, listed, shown
from ..errors import BadFolder, LibraryFailed
from ..families import svd_keys
from ..families.spec import ComponentSpec, FamilySpec
from ..families.svd import SVD
from ..families.table import FAMILIES, VARIANTS
from ..small_files import check_loads, explaining, fields_of, load, read_json, reading_file
from .on_disk import StoredModel, Weights, header_text, name_of
from .weight_files import check_fit, weights_of

if TYPE_CHECKING:
    import torch


INDEX = "model_index.json"


@dataclass(frozen=True)
class ModelFolder(StoredModel):
    """A folder that passed every check."""

    classes: Mapping[str, str]  # component → class in model_index.json

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        options: dict[str, Any] = {"torch_dtype": dtype}
        loader = reader = self.family.components[name].class_named(self.classes[name])
        if self.family.components[name].library == "transformers":  # which takes any field of config.json
            options = {"dtype": dtype, "config": loader.config_class.from_dict(dict(self.configs[name]))}
        else:
            reader = _with_config(loader, {"_class_name": self.classes[name], **self.configs[name]})
        with explaining(f"{self.name}/{name}", self.classes[name]):
            module, found = reader.from_pretrained(
                self.path / name, local_files_only=True, use_safetensors=True, output_loading_info=True, **options
            )
        module.__class__ = loader
        lost = {str(key) for what in ("missing_keys", "mismatched_keys", "error_msgs") for key in found[what]}
        lost |= {key for key, tensor in module.state_dict().items() if tensor.is_meta}
        if lost:
            raise BadFolder(
                "'{}/{}' was loaded without {} of its tensors, such as '{}': its files changed after the check. Load "
                "it again.",
                *(self.name, name, len(lost), shown(min(lost))),
            )
        return module

    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        from safetensors import safe_open

        for file in self.weights[name].files:
            with safe_open(file, framework="pt") as tensors:
                if known := set(parameter).intersection(tensors.keys()):
                    return tensors.get_tensor(known.pop())
        import torch

        whole = self.component(name, torch.float32)  # stored under an older name, which its class knows
        return whole.get_parameter(parameter[0]).detach()

    def unweighted(self, name: str) -> Any:
        return load(self.path, name, self.family.components[name], self.classes[name])


def inspect(path: Path, expected: FamilySpec) -> ModelFolder:
    """Check a folder against a family, and return the model.

    Reads small files and safetensors headers, no weights. Each component is built on "meta" and compared with the
    headers.
    Raises BadFolder if it is no diffusers folder or another pipeline's, if a component is missing, pickled or
    truncated, if a config is invalid or would load other files, and if tensors are missing, surplus or have wrong
    shapes.
    """
    index = read_json(path, INDEX)
    found = shown(index.get("_class_name") or "pipeline without a name")
    if found != expected.pipeline:
        others = f" It belongs to {FAMILIES[found].name}." if found in FAMILIES else ""
        facts = name_of(path), found, expected.pipeline, others, expected.name
        raise BadFolder("'{}' holds a {}, not a {}.{} Choose a {} folder.", *facts)
    expected = expected.of(index)
    classes = {name: component_class(path, index, name, spec) for name, spec in expected.components.items()}
    weights, configs, fields, modules = {}, {}, {}, {}
    not_built = _why_not_built()
    for name in expected.weighted:
        component, where = expected.components[name], f"{name_of(path)}/{name}"
        configs[name] = read_json(path, f"{name}/config.json")
        weights[name], tensors = weights_of(path, name, component.library)
        if not not_built:
            with reading_file(f"{where}/config.json"):
                fields[name] = fields_of(component, classes[name], configs[name])
            modules[name] = _on_meta(where, component, fields[name])
            check_fit(where, modules[name], tensors, sharded=weights[name].sharded)
    for name, component in expected.components.items():
        if modules and not component.weights:
            encoder = modules["text_encoder"] if name == "tokenizer" else None
            check_loads(path, name, component, classes[name], encoder, fingerprint(path / name))
    with reading_file(f"{name_of(path)}/{INDEX}"):
        options = fitting(expected.options, index).model_dump(exclude_unset=True)
    denoiser_config = configs[expected.denoiser]
    with reading_file(f"{name_of(path)}/{expected.denoiser}/config.json"):
        try:
            known = VARIANTS[expected.variant(denoiser_config)]
        except TypeError as error:  # the fields are unchecked if no module can be built
            raise Unreadable(f"its fields have unexpected types ({error})") from None
        variant = as_stored(known, weights[expected.denoiser].stored_dtype)
    return ModelFolder(
        path=path,
        family=expected,
        variant=variant,
        classes=classes,
        weights=weights,
        configs=fields,
        denoiser_config=denoiser_config,
        vae_config={**getattr(modules.get("vae"), "config", {}), **configs["vae"]},
        options=options,
        notes=(
            *_unlike(variant, denoiser_config),
            *_mixed(weights),
            *_ignored(expected, configs, fields),
            *([Message("configs were not compared with diffusers: {}", not_built)] if not_built else []),
        ),
    )


def is_single_file(path: Path) -> bool:
    """Return whether a path is a single file's, existing or not, and not a folder's."""
    return path.is_file() or (path.suffix.lower() == ".safetensors" and not path.is_dir())


def open_model(path: Path, expected: FamilySpec) -> StoredModel:
    """Check a model against a family, by JSON and safetensors headers alone, and return what it holds. Raises BadFolder
    where it is no model of the family, or not whole."""
    if not is_single_file(path):
        return inspect(path, expected)
    if expected is not SVD:
        raise BadFolder(
            "'{}' is a file. Only {} loads from one: choose a {} folder.", path.name, SVD.name, expected.name
        )
    from .single_file import read_svd

    return read_svd(path)


def family_of(path: Path) -> FamilySpec:
    """Return the family that a folder's model_index.json names, or for a file the only family that has such. Raises
    BadFolder where it is none of ours."""
    if is_single_file(path):
        return SVD
    index = read_json(path, INDEX)
    found = shown(index.get("_class_name") or "pipeline without a name")
    if found not in FAMILIES:
        raise BadFolder("'{}' holds a {}. Supported: {}.", name_of(path), found, ", ".join(FAMILIES))
    return FAMILIES[found].of(index)


def is_known(path: Path) -> bool:
    """Return whether a folder or a single file looks like a model of a known family, for a loader's list; False if it
    cannot be read. Loading checks everything, and reports what is wrong.
    """
    with suppress(OSError):
        stat = (path if path.is_file() else path / INDEX).stat()
        return _pipeline(path, stat.st_size, stat.st_mtime_ns) in FAMILIES
    return False


@lru_cache(maxsize=2**14)
def _pipeline(path: Path, _size: int, _modified: int) -> str:
    """Return the diffusers pipeline of a model_index.json or a checkpoint; "" if it is unknown or unreadable.

    The answer is cached until the file's size or time changes.
    """
    with suppress(OSError, ValueError):  # Unreadable and BadFolder among them
        if not is_single_file(path):
            return str(read_json(path, INDEX).get("_class_name", ""))
        texts = header_text(path).decode().split('"')  # among them the keys. Parsing a hundred headers takes seconds
        return "" if svd_keys.why_not_svd(texts) else SVD.pipeline
    return ""


def component_class(path: Path, index: Mapping[str, Any], name: str, component: ComponentSpec) -> str:
    """Return a component's class in model_index.json. Raises BadFolder if the component does not accept it."""
    entry = index.get(name)
    found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    if found not in component.classes:
        raise BadFolder(
            "'{}': model_index.json names {} as {}, but a {} is needed. Download the model again, or use the original "
            "one.",
            *(name_of(path), shown(found) if found else "nothing", name, " or a ".join(component.classes)),
        )
    return found


def list_folders(roots: Iterable[Path], depth: int = 3) -> dict[str, Path]:
    """Find the diffusers-format folders under the roots, at most `depth` levels below. Returns {name relative to its
    root, with forward slashes: path}.

    If two roots hold the same name, the first one wins. Unreadable folders are skipped, and links to folders that were
    searched already.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for folder in _walk(root, depth, {}):
            found.setdefault(folder.name if folder == root else folder.relative_to(root).as_posix(), folder)
    return dict(sorted(found.items()))


def files_below(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yield the files in a folder and below whose lower-case name ends with the suffix, in a fixed order. Links to
    folders are followed, except to a folder above them."""
    above: dict[str, frozenset[str]] = {str(folder): frozenset()}  # folder → real paths of the folders above it
    for place, folders, names in os.walk(folder, followlinks=True):
        real, parents = os.path.realpath(place), above.pop(str(Path(place)))
        if real in parents:
            folders.clear()
            continue
        folders.sort()
        above |= {str(Path(place, name)): parents | {real} for name in folders}
        named = (Path(place, name) for name in sorted(names) if name.lower().endswith(suffix))
        yield from filter(Path.is_file, named)


def fingerprint(path: Path) -> str:
    """Return a hash that changes when a file of the folder, or the single file, is added, removed or rewritten. It
    covers the real path, names, sizes in bytes and times; also the change time, since a copy may keep the modification
    time of its original."""
    digest = hashlib.sha256(os.fsencode(os.path.realpath(path)))
    for file in [path] if path.is_file() else files_below(path):
        stat = file.stat()
        digest.update(os.fsencode(file.relative_to(path).as_posix()))
        digest.update(f":{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns};".encode())
    return digest.hexdigest()


def _why_not_built() -> str:
    """Return why no module can be built; "" if they can. `doctor` also checks folders when PyTorch or diffusers is
    broken, and loads nothing."""
    try:
        import diffusers  # noqa: F401
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        return first_line(error)
    return ""


def _on_meta(where: str, component: ComponentSpec, fields: Mapping[str, Any]) -> torch.nn.Module:
    """Return the module that a config describes, without memory. It is shared, and must not be changed. Raises
    BadFolder where no module can be built from the config."""
    try:
        return _built(component, json.dumps(fields, sort_keys=True))
    except (LibraryFailed, MemoryError):
        raise
    except Exception as error:  # a class can raise anything for odd sizes
        what = component.classes[0], type(error).__name__, shown(str(error), 200)
        try:
            component.on_meta({})
        except Exception:  # noqa: BLE001, not the file's fault; `error` has the cause
            raise LibraryFailed(
                "No {} can be built here, with any config.json ({}: {}). Install requirements.txt of this pack again.",
                *what,
            ) from error
        raise BadFolder(
            "'{}': no {} can be built from its config.json ({}: {}). Download it again.", where, *what
        ) from error


@lru_cache(maxsize=16)  # a folder is checked repeatedly, and SVD's UNet takes 0.4 s
def _built(component: ComponentSpec, fields: str) -> torch.nn.Module:
    return component.on_meta(json.loads(fields))


def _with_config(loader: Any, config: Mapping[str, Any]) -> Any:
    """Return a subclass of a diffusers class that uses `config` as its config.json: diffusers would read the file
    again, and fails at a byte order mark."""
    reads = classmethod(lambda *_, **__: deepcopy(dict(config)))
    return type(loader.__name__, (loader,), {"_dict_from_json_file": reads, "__module__": loader.__module__})


def _unlike(variant: Variant, config: Mapping[str, Any]) -> Iterator[str]:
    found = [
        Message("{} {} instead of {}", key, config[key], value)
        for key, value in variant.sizes.items()
        if config.get(key, value) != value
    ]
    if found:
        yield Message("unknown variant ({}): treated as {}", joined(", ", found), variant.name)


def _mixed(weights: Mapping[str, Weights]) -> Iterator[str]:
    for name, component in weights.items():
        if len(component.dtypes) > 1:
            total = sum(component.dtypes.values())
            shares = ", ".join(f"{dtype} {n / total:.0%}" for dtype, n in component.dtypes.items())
            yield Message("{} is stored in several dtypes ({}): loaded in the one of its plan", name, shares)


def _walk(folder: Path, depth: int, seen: dict[Path, int]) -> Iterator[Path]:
    """Yield the diffusers-format folders. seen: depth to which each real folder was searched, so that a thousand links
    to it cost nothing."""
    with suppress(OSError):
        if (folder / INDEX).is_file():
            yield folder
        elif depth > 0 and folder.is_dir() and seen.get(real := folder.resolve(), 0) < depth:
            seen[real] = depth
            for child in sorted(folder.iterdir(), key=lambda child: (child.is_symlink(), child)):
                if child.is_dir() and not child.name.startswith("."):
                    yield from _walk(child, depth - 1, seen)


def _ignored(
    family: FamilySpec, configs: Mapping[str, Mapping[str, Any]], fields: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a note for each config with fields that its diffusers class ignores. transformers takes any field."""
    for name, config in configs.items():
        unknown = sorted(key for key in config.keys() - fields.get(name, config).keys() if not key.startswith("_"))
        if unknown and family.components[name].library == "diffusers":
            from diffusers import __version__ as version

            yield Message("{}: config.json has fields that diffusers {} ignores: {}", name, version, listed(unknown))
