"""A model on disk that passed every check: what it is, and how its components are read, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...precision.policy import Variant
from ...trust.message import Message
from ..families.spec import FamilySpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Weights:
    """The safetensors files of one component."""

    files: tuple[Path, ...]
    n_bytes: int
    dtypes: Mapping[str, int]  # safetensors' name of a dtype ("F16", "BF16", "F32") → bytes in it

    @property
    def sharded(self) -> bool:
        return len(self.files) > 1

    @property
    def stored_dtype(self) -> str:
        """The dtype that most bytes are in."""
        return max(self.dtypes, key=lambda name: self.dtypes[name])


def name_of(path: Path) -> str:
    """Return what people call a model: its folder's or file's name. In the hub's cache, where folders are named after
    commits, it is the hub id."""
    repository, snapshots = ("", "", *path.parts)[-3:-1]
    if snapshots == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


@dataclass(frozen=True)
class StoredModel(ABC):
    """A folder or a file that passed every check."""

    path: Path
    family: FamilySpec
    variant: Variant  # as its config and its stored weights show it
    weights: Mapping[str, Weights]
    configs: Mapping[str, Mapping[str, Any]]  # component with weights → what its class takes of its config
    denoiser_config: Mapping[str, Any]
    vae_config: Mapping[str, Any]
    options: Mapping[str, Any]  # of the diffusers pipeline
    notes: tuple[str, ...]  # what is unusual about it, in words

    @property
    def name(self) -> str:
        return name_of(self.path)

    @abstractmethod
    def component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """Load a component in `dtype`, on the CPU. Raises BadFolder where its files cannot be read."""

    def bare(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """Build a component without values, on "meta", as it would be loaded in `dtype`."""
        return self.family.components[name].on_meta(self.configs[name], dtype)

    @abstractmethod
    def stored(self, name: str, parameter: Sequence[str]) -> torch.Tensor:
        """Read the stored values of one parameter of a component. Raises BadFolder where they cannot be read.

        parameter: the names of the parameter, several where it is tied.
        """

    @abstractmethod
    def unweighted(self, name: str) -> Any:
        """Load the tokenizer, the image processor or the scheduler. Raises BadFolder where it cannot be read."""


def hooked(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module with the hooks by which transformers 5 records layers' outputs. It puts them on layers when it
    first is asked for them, once for each model object: a shell is another one, and its layers would record twice."""
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
    """Have `tell` given a line before anything is read; it may raise, to interrupt."""
    token = _listener.set(tell)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_reading(name: str, n_bytes: int) -> None:
    """Say that a component is read now, to whoever listens."""
    from ...precision.memory import size

    if tell := _listener.get():
        tell(Message("loading the weights of {}, {}", name, size(n_bytes)))
