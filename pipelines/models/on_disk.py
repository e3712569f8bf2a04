"""A checked model on disk: its family and configs, the headers of its safetensors files, and the loading of its
components, one at a time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.policy import Variant
from ...trust.foreign import Unreadable, check_whole
from ...trust.message import Message, shown
from ..families.spec import FamilySpec

if TYPE_CHECKING:
    import torch

_MOST_BYTES = 32 * 2**20  # limit of a header; the largest published one, with its trainer's notes, has 2 MB
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}  # safetensors' names of dtypes


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        bits = re.match(r"[A-Z]+(\d+)", self.dtype)  # BOOL has no number
        return prod(self.shape) * int(bits[1] if bits else 8) // 8


@dataclass(frozen=True)
class Header:
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def bytes_by_dtype(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for tensor in tensors.values():
        counted[tensor.dtype] += tensor.n_bytes
    return dict(counted)


def read_header(file: Path) -> Header:
    """Read a safetensors header. Raises OSError, or Unreadable if the file is not whole."""
    from safetensors import SafetensorError, safe_open

    _length(file)
    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118, it is no dictionary
            tensors = {name: Tensor(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
            return Header(tensors, opened.metadata() or {})
    except SafetensorError as error:
        raise Unreadable(f"it has {file.stat().st_size:,} bytes ({shown(str(error), 200)})") from None


def header_text(file: Path) -> bytes:
    """Return a header's JSON, not parsed. Raises OSError, or Unreadable if the header is cut off."""
    length, size = _length(file), file.stat().st_size
    if length > size - 8:
        raise Unreadable(f"its header is cut off after {size:,} bytes")
    with file.open("rb") as stream:
        stream.seek(8)
        return stream.read(length)


def _length(file: Path) -> int:
    """Return the bytes of a header, from the file's first 8 bytes. Raises OSError, or Unreadable if it is no
    file, or if its header is larger than any model's."""
    check_whole(file)
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
    if _MOST_BYTES < length < file.stat().st_size:
        raise Unreadable(f"its header has {length:,} bytes; the limit is {_MOST_BYTES:,}")
    return length


@dataclass(frozen=True)
class Weights:
    """The safetensors files of one component."""

    files: tuple[Path, ...]
    n_bytes: int
    dtypes: Mapping[str, int]  # safetensors' dtype ("F16", "BF16", "F32") → bytes

    @property
    def sharded(self) -> bool:
        return len(self.files) > 1

    @property
    def stored_dtype(self) -> str:
        """The dtype of most bytes."""
        return max(self.dtypes, key=lambda name: self.dtypes[name])


def name_of(path: Path) -> str:
    """Return a model's name for users: its folder's or file's name; in the hub's cache, where folders are named after
    commits, the hub id."""
    repository, snapshots = ("", "", *path.parts)[-3:-1]
    if snapshots == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


@dataclass(frozen=True)
class StoredModel(ABC):
    """A folder or a file that passed every check."""

    path: Path
    family: FamilySpec
    variant: Variant  # from its config and the dtype of its weights
    weights: Mapping[str, Weights]
    configs: Mapping[str, Mapping[str, Any]]  # component with weights → the fields of its config that its class takes
    denoiser_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    options: Mapping[str, Any]  # arguments of the diffusers pipeline
    notes: tuple[str, ...]  # unusual facts, for the report

    @property
    def name(self) -> str:
        return name_of(self.path)

    @abstractmethod
    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """Load a component in `dtype`, on the CPU. Raises BadFolder if its files cannot be read."""

    def bare(self, name: str, dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Build a component on "meta", as if loaded in `dtype`; None: as its class makes it."""
        return self.family.components[name].on_meta(self.configs[name], dtype)

    @abstractmethod
    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        """Read the stored values of one parameter of a component. Raises BadFolder if they cannot be read.

        parameter: the names of the parameter, several if it is tied.
        """

    @abstractmethod
    def unweighted(self, name: str) -> Any:
        """Load the tokenizer, the image processor or the scheduler. Raises BadFolder if it cannot be read."""


def hooked(module: torch.nn.Module) -> torch.nn.Module:
    """Install the hooks by which transformers 5 records layers' outputs, and return the module. transformers installs
    them at the first request, once per model object; a shallow copy is another object, whose layers would record
    twice."""
    try:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks as install
    except ImportError:  # transformers 4
        return module
    for model in module.modules():
        if getattr(model, "_can_record_outputs", None):
            install(model)  # pyright: ignore[reportArgumentType]
    return module


_listener: ContextVar[Callable[[str], None] | None] = ContextVar("who is told what is read", default=None)


@contextmanager
def listening(tell: Callable[[str], None]) -> Generator[None]:
    """Have `tell` called with a line before weights are read; it may raise, to interrupt."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_reading(name: str, n_bytes: int) -> None:
    """Call the listener, if any, with the component that is about to be read and its bytes."""
    from ...precision.memory import size

    if tell := _listener.get():
        tell(Message("loading the weights of {}, {}", name, size(n_bytes)))
