"""A diffusers-format folder on disk: checked whole before a weight is read."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..precision.policy import VARIANTS, Variant, as_stored
from .errors import BadFolder
from .families import FAMILIES, ComponentSpec, FamilySpec
from .stored import StoredModel, Weights, name_of

if TYPE_CHECKING:
    import torch

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEMS = ("diffusion_pytorch_model", "model")  # file names that from_pretrained looks for
_MAX_HEADER = 100 * 2**20  # safetensors' own limit


@dataclass(frozen=True)
class ModelFolder(StoredModel):
    """A folder that passed every check."""

    classes: Mapping[str, str]  # component → class in model_index.json

    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        dtype_option = "dtype" if self.family.components[name].library == "transformers" else "torch_dtype"
        return self._from_pretrained(name, use_safetensors=True, **{dtype_option: dtype})

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
        return self._from_pretrained(name)

    def unknown_fields(self, name: str) -> list[str]:
        if self.family.components[name].library != "diffusers":
            return []
        import diffusers

        known = signature(getattr(diffusers, self.classes[name]).__init__).parameters
        config = _read_config(self.path, name)
        unknown = sorted(key for key in config if key not in known and not key.startswith("_"))
        if not unknown:
            return []
        return [f"{name}: config.json has fields that diffusers {diffusers.__version__} ignores: {', '.join(unknown)}"]

    def _from_pretrained(self, name: str, **options: Any) -> Any:
        import diffusers
        import torch
        import transformers

        spec = self.family.components[name]
        library = {"diffusers": diffusers, "transformers": transformers}[spec.library]
        # a folder saved by another transformers may name a class that this one calls otherwise
        loader = getattr(library, self.classes[name], None) or getattr(library, spec.classes[0])
        try:
            return loader.from_pretrained(self.path / name, local_files_only=True, **options)
        except torch.OutOfMemoryError:
            raise
        except ImportError as error:
            raise BadFolder(
                f"'{self.name}/{name}' needs a Python package that is not installed: "
                f"{str(error).strip().splitlines()[0]} Install the pack's requirements.txt (sentencepiece and protobuf "
                "are in it) and start again."
            ) from error
        except Exception as error:
            raise BadFolder(
                f"'{self.name}/{name}' could not be loaded as {self.classes[name]}: "
                f"{type(error).__name__}: {error}. Download that folder again."
            ) from error


def inspect(path: Path, expected: FamilySpec) -> ModelFolder:
    """Check a folder against a family. Reads JSON and safetensors headers, no weights.

    Raises BadFolder: not a diffusers folder, another pipeline, a component that is missing, pickled or truncated.
    """
    index = read_json(path / "model_index.json", missing=_no_index(path))
    found = str(index.get("_class_name") or "pipeline without a name")
    if found != expected.pipeline:
        others = f" It belongs to {FAMILIES[found].name}." if found in FAMILIES else ""
        raise BadFolder(
            f"'{name_of(path)}' holds a {found}, not a {expected.pipeline}.{others} Choose a {expected.name} folder."
        )
    classes, weights = {}, {}
    for name, component in expected.components.items():
        classes[name] = _component_class(path, index, name, component)
        if component.weights:
            weights[name] = _weights(path, name)
    denoiser_config = _read_config(path, expected.denoiser)
    variant = _variant(path, expected, denoiser_config, weights[expected.denoiser])
    return ModelFolder(
        path=path,
        family=expected,
        variant=variant,
        classes=classes,
        weights=weights,
        denoiser_config=denoiser_config,
        vae_config=_read_config(path, "vae"),
        notes=(*_unlike(variant, denoiser_config), *_mixed(weights)),
    )


def family_of(path: Path) -> FamilySpec:
    """The family that a folder's model_index.json names. Raises BadFolder where it is none of ours."""
    index = read_json(path / "model_index.json", missing=_no_index(path))
    found = str(index.get("_class_name") or "pipeline without a name")
    if found not in FAMILIES:
        raise BadFolder(f"'{name_of(path)}' holds a {found}. Known: {', '.join(FAMILIES)}.")
    return FAMILIES[found]


def list_folders(roots: Iterable[Path], depth: int = 3) -> dict[str, Path]:
    """Diffusers-format folders under the roots: {name relative to its root, with forward slashes: path}.

    The first root wins where two hold the same name. A folder that cannot be read is passed over.
    """
    found: dict[str, Path] = {}
    for root in roots:
        for folder in _walk(root, depth):
            name = folder.relative_to(root).as_posix()
            found.setdefault(folder.name if name == "." else name, folder)
    return dict(sorted(found.items()))


def fingerprint(path: Path) -> str:
    """Changes when a file of the folder is added, removed or rewritten (by names, sizes and times), or a single one."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        stat = file.stat()
        digest.update(f"{file.relative_to(path).as_posix()}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


def read_json(file: Path, *, missing: str = "") -> dict[str, Any]:
    """A JSON object. Raises BadFolder, with `missing` where the file is not there."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFolder(missing or f"'{file}' is missing.") from None
    except (OSError, ValueError) as error:
        raise BadFolder(f"'{file}' cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(content, dict):
        raise BadFolder(f"'{file}' holds a {type(content).__name__} where a JSON object belongs. Download it again.")
    return content


def _no_index(path: Path) -> str:
    return (
        f"'{name_of(path)}' is not a diffusers-format folder: it has no model_index.json. "
        "Choose the folder that holds it, or download the model again."
    )


def _variant(path: Path, family: FamilySpec, config: Mapping[str, Any], weights: Weights) -> Variant:
    try:
        name = family.variant(config)
    except TypeError as error:
        raise BadFolder(
            f"'{name_of(path)}/{family.denoiser}/config.json' holds a value of the wrong kind ({error}). "
            "Download it again."
        ) from None
    return as_stored(VARIANTS[name], weights.stored_dtype)


def _unlike(variant: Variant, config: Mapping[str, Any]) -> Iterator[str]:
    found = [
        f"{key} {config[key]} instead of {value}"
        for key, value in variant.sizes.items()
        if config.get(key, value) != value
    ]
    if found:
        yield f"laid out like {variant.name}, but with {', '.join(found)}: planned like it"


def _mixed(weights: Mapping[str, Weights]) -> Iterator[str]:
    for name, component in weights.items():
        if len(component.dtypes) > 1:
            total = sum(component.dtypes.values())
            shares = ", ".join(f"{dtype} {n / total:.0%}" for dtype, n in component.dtypes.items())
            yield f"{name} is stored in several dtypes ({shares}): loaded in one, that of its plan"


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        if (folder / "model_index.json").is_file():
            yield folder
        elif depth > 0 and folder.is_dir():
            for child in sorted(folder.iterdir()):
                if child.is_dir() and not child.name.startswith("."):
                    yield from _walk(child, depth - 1)
    except OSError:
        return


def _component_class(path: Path, index: Mapping[str, Any], name: str, component: ComponentSpec) -> str:
    entry = index.get(name)
    found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
    if found not in component.classes:
        raise BadFolder(
            f"'{name_of(path)}': model_index.json names {found or 'nothing'} as {name}, "
            f"but a {' or a '.join(component.classes)} is needed. Download the model again, or use the original one."
        )
    if not (path / name).is_dir():
        raise BadFolder(f"'{name_of(path)}' has no '{name}' folder. The download is incomplete: fetch it again.")
    return found


def _weights(path: Path, name: str) -> Weights:
    folder = path / name
    _read_config(path, name)
    files = _weight_files(path, folder)
    dtypes: Counter[str] = Counter()
    for file in files:
        dtypes.update(_header_bytes_by_dtype(file, path))
    return Weights(tuple(files), sum(file.stat().st_size for file in files), dict(dtypes))


def _weight_files(path: Path, folder: Path) -> list[Path]:
    where = f"'{name_of(path)}/{folder.name}'"
    for stem in _STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
        if not index.is_file():
            continue
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
            raise BadFolder(f"'{name_of(path)}/{folder.name}/{index.name}' has no weight_map. Fetch that file again.")
        names = sorted(set(shards.values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise BadFolder(f"{where} lacks {', '.join(missing) or 'every shard'}. Fetch the missing files again.")
        return [folder / name for name in names]
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if others:
        raise BadFolder(
            f"{where} holds {', '.join(others)}, but no {' or '.join(f'{stem}.safetensors' for stem in _STEMS)}. "
            "Rename the file that you want to use to that (a variant such as fp16 works)."
        )
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise BadFolder(
            f"{where} holds pickled weights ({pickled[0]}), which can run code when loaded and are refused. "
            "Get the model in safetensors format."
        )
    raise BadFolder(f"{where} holds no .safetensors file. The download is incomplete: fetch it again.")


def _header_bytes_by_dtype(file: Path, path: Path) -> Counter[str]:
    """Bytes per dtype, from the header; raises BadFolder where file and header disagree."""
    where = f"{name_of(path)}/{file.relative_to(path).as_posix()}"
    size = file.stat().st_size
    broken = f"'{where}' is not a whole safetensors file ({size:,} bytes)"
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size - 8):
            raise BadFolder(f"{broken}: its header is cut off. Delete it and download it again.")
        counted: Counter[str] = Counter()
        end = 0
        try:
            for name, entry in json.loads(stream.read(length)).items():
                if name != "__metadata__":
                    begin, until = entry["data_offsets"]
                    counted[entry["dtype"]] += until - begin
                    end = max(end, until)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise BadFolder(f"{broken}: its header is no list of tensors. Delete it and download it again.") from None
    expected = 8 + length + end
    if size != expected:
        raise BadFolder(f"{broken}: its header promises {expected:,}. Delete it and download it again.")
    return counted or Counter({"F32": 0})


def _read_config(path: Path, name: str) -> dict[str, Any]:
    where = f"'{name_of(path)}/{name}'"
    return read_json(path / name / "config.json", missing=f"{where} has no config.json: fetch it again.")
