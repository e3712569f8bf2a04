"""Simulated offload in parts for a machine without a second device.

A replacement for diffusers' ModuleGroup stores the offloaded weights and leaves NaN in their place: a computation with
one of them gives NaN.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.precision import scaled_products
from diffusers.hooks import group_offloading


class Apart(group_offloading.ModuleGroup):
    """Weights that are NaN until they are loaded. As with a stream, loaded tensors keep their identity, and buffers of
    modules stay on the device."""

    here: set[Apart]
    at_rest: dict[torch.Tensor, torch.Tensor]

    @property
    def tensors(self):
        modules = [t for module in self.modules for t in (*module.parameters(), *module.buffers())]
        return list(dict.fromkeys([*modules, *self.parameters, *self.buffers]))

    def onload_(self):
        if self not in Apart.here:
            for tensor in self.tensors:
                tensor.data = self.kept[tensor]
                Apart.at_rest.pop(tensor, None)
            Apart.here.add(self)

    def offload_(self):
        if self in Apart.here or not hasattr(self, "kept"):
            self.kept = {tensor: Apart.at_rest.get(tensor, tensor.data) for tensor in self.tensors}
            buffers = {buffer for module in self.modules for buffer in module.buffers()}
            for tensor in [tensor for tensor in self.tensors if tensor not in buffers]:
                Apart.at_rest[tensor] = self.kept[tensor]
                tensor.data = torch.full_like(tensor.data, torch.nan if tensor.is_floating_point() else 2**30)
            Apart.here.discard(self)


@contextmanager
def simulated_offload() -> Iterator[None]:
    """Inside `with`, weights that an offload in parts has not loaded are NaN."""
    gc.collect()
    bounds = scaled_products.output_bounds
    with ExitStack() as held:
        held.enter_context(mock.patch.object(group_offloading, "ModuleGroup", Apart))
        for module in (handles, offloading, stores):
            held.enter_context(mock.patch.object(module, "brings_parts_to", return_value=True))
        Apart.here, Apart.at_rest = set(), {}
        at_rest = lambda weight: bounds(Apart.at_rest.get(weight, weight))  # noqa: E731
        held.enter_context(mock.patch.object(scaled_products, "output_bounds", at_rest))  # once, in main memory
        yield
    Apart.here, Apart.at_rest = set(), {}
