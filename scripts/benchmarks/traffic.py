"""The memory traffic of a call, counted on tensors that have a shape and no values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from comfyui_onediff_guard.precision.activation_estimate import FusedAttention
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS, WEIGHTS, AMAX, SCALING, REST = "products", "weights", "largest values", "scaling and casts", "everything else"
_OF_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})
_NO_TRAFFIC = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"})


class Traffic(TorchDispatchMode):
    """Each kernel reads its inputs once from memory, and writes its outputs: no cache, and nothing fused but attention.
    Views are free.

    weights: their use outside of products is counted separately.
    """

    def __init__(self, weights: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.calls = 0  # calls of PyTorch functions by the network
        self._weights = {_storage(weight) for weight in weights if weight.ndim > 1}
        self._of_mode = False

    @contextmanager
    def counting(self) -> Generator[Traffic]:
        with self, _FusedAttention(self):
            yield self

    @contextmanager
    def of_mode(self) -> Generator[None]:
        """Count operations inside as belonging to a product."""
        before, self._of_mode = self._of_mode, True
        try:
            yield
        finally:
            self._of_mode = before

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        written = _tensors(made)
        given = _tensors((args, {key: value for key, value in (kwargs or {}).items() if key != "out"}))
        if name not in _NO_TRAFFIC and not _is_view(func):
            self.add(self._kind(name, given), [*given, *written])
        return made

    def add(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        self.bytes[kind] += sum(map(_bytes, tensors))
        self.kernels[kind] += 1

    def _kind(self, name: str, given: list[torch.Tensor]) -> str:
        if name in _OF_PRODUCTS:
            return PRODUCTS
        if any(_storage(tensor) in self._weights for tensor in given):
            return WEIGHTS
        if not self._of_mode:
            return REST
        return AMAX if name == "linalg_vector_norm" else SCALING


class CountedProducts(ScaledHalfMatmulMode):
    """Scales every layer, and counts the operations around products."""

    def __init__(self, dtype: torch.dtype, traffic: Traffic):
        super().__init__(dtype)
        self.traffic = traffic

    def compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.traffic.calls += 1
        return super().compute(func, args, kwargs)

    def _layer(self, *args: Any, **kwargs: Any) -> Any:
        with self.traffic.of_mode():
            return super()._layer(*args, **kwargs)

    def _attention(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self.traffic.of_mode():
            return super()._attention(*args, **kwargs)


class _FusedAttention(FusedAttention):
    """Fused attention that is counted in `traffic`."""

    def __init__(self, traffic: Traffic):
        super().__init__()
        self._traffic = traffic

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        made = super().attention(query, key, value)
        self._traffic.add(PRODUCTS, [query, key, value, made])
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return each tensor once."""
    return list({id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values())


def _bytes(tensor: torch.Tensor) -> int:
    """Return the bytes in memory: for an expanded tensor, those of its storage."""
    return min(math.prod(tensor.shape) * tensor.element_size(), tensor.untyped_storage().nbytes())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(func: Any) -> bool:
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)
