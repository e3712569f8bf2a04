"""Activation memory of a call, estimated beforehand on tensors that have a shape and no values.

The network runs once on PyTorch's "meta" device, where nothing is computed or allocated. Each tensor is counted from
its creation until its release. The peak is a lower bound for a caching allocator; workspaces of cuDNN and cuBLAS, and
fragmentation, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .kernels import LEAN, Kernels
from .shallow_copy import structural_copy, without_hooks
from .upcast import TraceableMode

META = torch.device("meta")


def on_meta(value: Any) -> Any:
    """Return a copy of a nest with its tensors on "meta": same shape, strides and dtype. A module becomes a structural
    copy, with only the hooks of `add_hook`; the module itself is not changed."""
    if isinstance(value, torch.nn.Module):
        return _without_weights(value)
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), value)


def _without_weights(module: torch.nn.Module) -> torch.nn.Module:
    shell = structural_copy(module)
    made: dict[torch.Tensor, torch.Tensor] = {}  # a tensor with two names is copied once

    def empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and tensor not in made:
            bare = tensor.detach().to(META)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[tensor] = torch.nn.Parameter(bare, requires_grad=False) if is_parameter else bare
        return None if tensor is None else made[tensor]

    for part in shell.modules():
        part.__dict__.update(without_hooks(part))
        for kind in ("_parameters", "_buffers"):
            part.__dict__[kind] = {name: empty(tensor) for name, tensor in part.__dict__[kind].items()}
    return shell


@contextmanager
def counting(kernels: Kernels = LEAN) -> Generator[ActivationMemoryMode]:
    """Count the tensors made inside, on "meta", results included. Earlier tensors are not counted.

    kernels: those of the device that the estimate is for.
    """
    with torch.no_grad(), ActivationMemoryMode(kernels) as memory, FusedAttention(memory.attends_in_full):
        yield memory


class ActivationMemoryMode(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still alive."""

    def __init__(self, kernels: Kernels = LEAN) -> None:
        super().__init__()
        self.most = 0
        self.kernels = kernels
        self.lacks: dict[str, None] = {}  # reasons for which kernels need more memory than others, each once
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self._counted = 0  # their bytes, including tensors released since the last look

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return False  # e.g. whether a mask lets all through: the other branch needs more memory
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default and made.is_meta and _channels_last(args[1]):
            made = torch.empty_like(made, memory_format=torch.channels_last)  # as kernels lay it out, but not "meta"
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            if storage._cdata not in given:  # else a view, or written in place
                self._hold(storage)
        if func is torch.ops.aten.convolution.default:
            self._note(self._unfolded(made, *args) + _laid_out_anew(args[0], args[1]))
        return made

    def attends_in_full(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether attention is computed without a fused kernel."""
        return self._lacks(self.kernels.attention(*args, **kwargs))

    def _lacks(self, why: str) -> bool:
        self.lacks |= {why: None} if why else {}
        return bool(why)

    def _unfolded(self, made: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *_: Any) -> int:
        """Return the bytes of a convolution's unfolded input, one sample at a time; 0 if the kernel does not unfold."""
        in_space = weight.shape[2:]
        if len(in_space) != 3 or in_space.numel() == 1 or not self._lacks(self.kernels.conv3d(given.dtype)):
            return 0
        return weight[0].numel() * made.shape[2:].numel() * made.element_size()

    def _hold(self, storage: torch.UntypedStorage) -> None:
        known = self._held.get(storage._cdata)
        if known and not known[0].expired():
            return
        self._counted += storage.nbytes() - (known[1] if known else 0)
        self._held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._note()

    def _note(self, more: int = 0) -> None:
        if self._counted + more > self.most:
            self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
            self._counted = sum(n_bytes for _, n_bytes in self._held.values())
            self.most = max(self.most, self._counted + more)

    def each_shape_once(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call so that it runs once for each shape of its arguments: tiles and chunks are counted once."""
        known: dict[Any, tuple[int, Any]] = {}

        def once(*args: Any, **kwargs: Any) -> Any:
            key = shapes_of((args, kwargs))
            given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            if key not in known:
                with ActivationMemoryMode(self.kernels) as inside:
                    made = call(*args, **kwargs)
                places = {id(tensor): place for place, tensor in enumerate(given)}
                known[key] = inside.most, pytree.tree_map_only(torch.Tensor, lambda t: _Like.of(t, places), made)
                return made
            most, made = known[key]
            self._note(most)
            return pytree.tree_map_only(_Like, lambda like: like.made(given), made)

        return once


@dataclass(frozen=True)
class _Like:
    """The metadata of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    place: int | None = None  # its position, if it is one of the arguments

    @classmethod
    def of(cls, tensor: torch.Tensor, places: Mapping[int, int]) -> _Like:
        return cls(tensor.shape, tensor.dtype, places.get(id(tensor)))

    def made(self, given: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a tensor with this metadata."""
        if self.place is not None:
            return given[self.place]
        return torch.empty(self.shape, dtype=self.dtype, device=META)


class FusedAttention(TraceableMode):
    """Counts attention as one kernel that stores no scores; as PyTorch's "math" attention if no kernel takes a
    call."""

    def __init__(self, unless: Callable[..., object] = LEAN.attention):
        """unless: returns whether no kernel takes a call."""
        super().__init__()
        self._unless = unless

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not F.scaled_dot_product_attention or self._unless(*args, **kwargs):
            return func(*args, **kwargs)
        return self.attention(*args, **kwargs)

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the output, in the memory layout of CUDA's kernels."""
        del key
        *batch, heads, tokens, _width = query.shape
        return query.new_empty(*batch, tokens, heads, value.shape[-1]).transpose(-3, -2)


def _channels_last(tensor: torch.Tensor) -> bool:
    """Return whether a 4D tensor is channels-last, and not contiguous as well."""
    last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def _laid_out_anew(given: torch.Tensor, weight: torch.Tensor) -> int:
    """Return the bytes of a convolution's copy of its input in the memory layout of its weights."""
    lies_so = given.is_contiguous(memory_format=torch.channels_last) if given.ndim == 4 else True
    return given.nbytes if _channels_last(weight) and not lies_so else 0


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def shapes_of(tree: Any) -> Any:
    """Return a hashable key of the arguments' shapes and dtypes."""
    leaves, structure = pytree.tree_flatten(tree)
    return str(structure), tuple(
        _Like(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    )
