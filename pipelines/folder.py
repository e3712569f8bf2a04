"""A diffusers-format folder on disk: checked whole before a weight is read."""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import BadFolder
from .families import FAMILIES, ComponentSpec, FamilySpec

_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEMS = ("diffusion_pytorch_model", "model")  # file names that from_pretrained looks for
_MAX_HEADER = 100 * 2**20  # safetensors' own limit


@dataclass(frozen=True)
class Weights:
    """The safetensors files of one component."""

    files: tuple[Path, ...]
    n_bytes: int
    stored_dtype: str  # safetensors' name of the dtype that most bytes are in: "F16", "BF16", "F32"

    def bytes_in(self, dtype: str) -> int:
        """What they take once loaded in "fp16", "bf16" or "fp32"."""
        return self.n_bytes * (4 if dtype == "fp32" else 2) // (4 if self.stored_dtype == "F32" else 2)


@dataclass(frozen=True)
class ModelFolder:
    """A folder that passed every check."""

    path: Path
    family: FamilySpec
    variant: str
    classes: Mapping[str, str]  # component → class in model_index.json
    weights: Mapping[str, Weights]
    denoiser_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]


def inspect(path: Path, expected: FamilySpec) -> ModelFolder:
    """Check a folder against a family. Reads JSON and safetensors headers, no weights.

    Raises BadFolder: not a diffusers folder, another pipeline, a component that is missing, pickled or truncated.
    """
    index = _read_json(path / "model_index.json", missing=f"'{path.name}' is not a diffusers-format folder: it has no "
                       "model_index.json. Choose the folder that holds it, or download the model again.")  # fmt: skip
    found = index.get("_class_name")
    if found != expected.pipeline:
        others = f" It belongs to {FAMILIES[found].name}." if found in FAMILIES else ""
        raise BadFolder(
            f"'{path.name}' holds a {found or 'pipeline without a name'}, not a {expected.pipeline}.{others} "
            f"Choose a {expected.name} folder."
        )
    classes, weights = {}, {}
    for name, component in expected.components.items():
        classes[name] = _component_class(path, index, name, component)
        if component.weights:
            weights[name] = _weights(path, name)
    denoiser_config = _read_config(path, expected.denoiser)
    return ModelFolder(
        path=path,
        family=expected,
        variant=expected.variant(denoiser_config),
        classes=classes,
        weights=weights,
        denoiser_config=denoiser_config,
        vae_config=_read_config(path, "vae"),
    )


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
    """Changes when a file of the folder is added, removed or rewritten (by names, sizes and times)."""
    digest = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        stat = file.stat()
        digest.update(f"{file.relative_to(path).as_posix()}:{stat.st_size}:{stat.st_mtime_ns};".encode())
    return digest.hexdigest()


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
            f"'{path.name}': model_index.json names {found or 'nothing'} as {name}, "
            f"but a {' or a '.join(component.classes)} is needed. Download the model again, or use the original one."
        )
    if not (path / name).is_dir():
        raise BadFolder(f"'{path.name}' has no '{name}' folder. The download is incomplete: fetch it again.")
    return found


def _weights(path: Path, name: str) -> Weights:
    folder = path / name
    _read_config(path, name)
    files = _weight_files(path, folder)
    dtypes: Counter[str] = Counter()
    for file in files:
        dtypes.update(_header_bytes_by_dtype(file, path))
    return Weights(tuple(files), sum(file.stat().st_size for file in files), dtypes.most_common(1)[0][0])


def _weight_files(path: Path, folder: Path) -> list[Path]:
    where = f"'{path.name}/{folder.name}'"
    for stem in _STEMS:
        index = folder / f"{stem}.safetensors.index.json"
        if (folder / f"{stem}.safetensors").is_file():
            return [folder / f"{stem}.safetensors"]
        if not index.is_file():
            continue
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
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
    where = file.relative_to(path.parent).as_posix()
    size = file.stat().st_size
    broken = f"'{where}' is not a whole safetensors file ({size:,} bytes)"
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER + 1
        if length > min(_MAX_HEADER, size - 8):
            raise BadFolder(f"{broken}: its header is cut off. Delete it and download it again.")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise BadFolder(f"{broken}: its header is not JSON. Delete it and download it again.") from None
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
    if size != expected:
        raise BadFolder(f"{broken}: its header promises {expected:,}. Delete it and download it again.")
    counted: Counter[str] = Counter()
    for entry in tensors:
        start, end = entry["data_offsets"]
        counted[entry["dtype"]] += end - start
    return counted or Counter({"F32": 0})


def _read_config(path: Path, name: str) -> dict[str, Any]:
    where = f"'{path.name}/{name}'"
    return _read_json(path / name / "config.json", missing=f"{where} has no config.json: fetch it again.")


def _read_json(file: Path, *, missing: str = "") -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadFolder(missing or f"'{file}' is missing.") from None
    except (OSError, ValueError) as error:
        raise BadFolder(f"'{file}' cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(content, dict):
        raise BadFolder(f"'{file}' holds a {type(content).__name__} where a JSON object belongs. Download it again.")
    return content
