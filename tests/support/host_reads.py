"""Counts where the host would wait for a device: values read from a run's tensors, and copies between devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_READING = ("_local_scalar_dense", "equal", "nonzero")  # operations whose results the host reads


class HostReads(TorchDispatchMode):
    """Inside `with` and in its thread, counts reads of marked tensors and tensors made from them, and copies between
    devices. Works on the CPU too, where reads cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.copies = 0
        self._marked: dict[int, Any] = {}  # kept, so that no address is reused

    def mark(self, tree: Any) -> None:
        for tensor in pytree.tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._marked[storage.data_ptr()] = storage

    def marked(self, tree: Any) -> bool:
        tensors = (each for each in pytree.tree_leaves(tree) if isinstance(each, torch.Tensor) and not each.is_meta)
        return any(each.untyped_storage().data_ptr() in self._marked for each in tensors)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name == "_to_copy" or name == "copy_":
            self.copies += args[name == "copy_"].device != made.device
        if self.marked((args, kwargs)):
            self.reads[name] += name in _READING
            self.mark(made)
        return made
