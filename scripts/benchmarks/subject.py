"""The subject of all contestants in a process: one set of weights, one step's arguments, and that step in fp32."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import diffusers
import torch
from comfyui_onediff_guard.demo.small_model import make_stream_overflow
from comfyui_onediff_guard.pipelines.weights.components import ComponentStore
from comfyui_onediff_guard.pipelines.weights.placement import lay_out, main_memory
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from denoisers import Call, Model, Size, build, step
from faulty import faulty
from measure import synchronize
from random_model import store
from stream_peaks import stream_peak

STREAM_PEAK = 5e5  # of a hot stream; fp16's maximum is 65504
PAGE_LOCKED = 2.0  # bytes of main memory per byte of a page-locked copy: PyTorch rounds up


class Exact(NamedTuple):
    """One step in strict fp32."""

    output: torch.Tensor  # in main memory
    seconds: float
    stream_peak: float  # max |x| after its blocks


@dataclass(frozen=True)
class Subject:
    name: str
    model: Model
    size: Size
    device: torch.device
    dtype: str  # "bf16" or "fp16"
    hot: bool = False  # the residual stream is made to peak at STREAM_PEAK

    @cached_property
    def components(self) -> ComponentStore:
        signature = inspect.signature(getattr(diffusers, self.model.kind).__init__)
        defaults = {name: each.default for name, each in signature.parameters.items() if name != "self"}
        config = {**defaults, **self.model.config, **self.size.config}
        return self._store(config, self._hot if self.hot else self._random)

    def of(self, module: torch.nn.Module, dtype: str = "") -> Subject:
        """Return the same with another denoiser, of the same config."""
        other = replace(self, dtype=dtype or self.dtype)
        other.__dict__["components"] = other._store(module.config, lambda _: module)
        return other

    @cached_property
    def failing(self) -> Subject:
        """The same with one layer whose half-precision output has a NaN."""
        return self.of(faulty(self.module, self.model.fails))

    @cached_property
    def in_bf16(self) -> Subject:
        """The same with a copy in bf16."""
        with torch.inference_mode(False):
            return self.of(torch.nn.Module.to(copy.deepcopy(self.module), torch.bfloat16), "bf16")

    @cached_property
    def channels_last(self) -> Subject:
        """The same with a copy whose 2D convolutions have channels-last weights."""
        with torch.inference_mode(False):
            module = copy.deepcopy(self.module)
        lay_out(module, channels_last=True)
        return self.of(module)

    def in_main_memory(self) -> Subject:
        """Return the same with a copy in main memory, for offloaded weights. Raises MemoryError."""
        module, weights = self.module, [*self.module.parameters(), *self.module.buffers()]
        needed, free = PAGE_LOCKED * sum(weight.nbytes for weight in weights), main_memory().free
        if needed > free:
            raise MemoryError(f"a copy takes {needed / 1e9:.1f} GB of main memory, and {free / 1e9:.1f} are free")
        with torch.inference_mode(False):
            there = {id(weight): _in_main_memory(weight) for weight in weights}
            return self.of(copy.deepcopy(module, there))

    def _store(self, config: Any, make: Callable[[torch.dtype], torch.nn.Module]) -> ComponentStore:
        return store(self.name, self.model.family, config, make, self.device)

    def _random(self, dtype: torch.dtype) -> torch.nn.Module:
        return build(self.model, self.size, self.device, dtype)

    def _hot(self, dtype: torch.dtype) -> torch.nn.Module:
        """Make a denoiser with a hot stream: bf16 weights, which are equal in fp16, except fp16's subnormals."""
        module, gates = self._random(torch.bfloat16), self.model.gates
        if gates is None:
            raise ValueError(f"{self.name} has no residual stream that runs through all blocks")
        call = step(self.model, module.config, self.size, self.device, torch.bfloat16)
        make_stream_overflow(module, gates, lambda: module(**call), peak=STREAM_PEAK)
        return torch.nn.Module.to(module, dtype)

    @property
    def module(self) -> Any:
        return self.components.module(self.model.family.denoiser, self.dtype)

    @cached_property
    def call(self) -> Call:
        """One step's arguments in the denoiser's dtype."""
        return self._call(DTYPES[self.dtype])

    @cached_property
    def given(self) -> Call:
        """One step's arguments as our samplers pass them, in float32: the guard casts."""
        return self._call(torch.float32)

    def _call(self, dtype: torch.dtype) -> Call:
        return step(self.model, self.module.config, self.size, self.device, dtype)

    @cached_property
    def exact(self) -> Exact:
        """The step with the same weights and arguments, upcast per operation: bit-equal to an fp32 copy, which would
        need twice the memory."""
        module, call, family = self.module, self.call, self.model.family
        outputs: list[torch.Tensor] = []

        def run() -> None:
            outputs.append(run_in_fp32(module, **call)[0].cpu())

        synchronize(self.device)
        started = time.perf_counter()
        with without_tf32():
            peak = stream_peak(module, family.blocks, run)
        return Exact(outputs[0], time.perf_counter() - started, peak)


@contextmanager
def without_tf32() -> Generator[None]:
    """Disable TF32, which PyTorch allows in convolutions by default."""
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    allowed = [switch for switch in switches if switch.allow_tf32]
    for switch in allowed:
        switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch in allowed:
            switch.allow_tf32 = True


def _in_main_memory(weight: torch.Tensor) -> torch.Tensor:
    there = weight.detach().to("cpu", copy=True)
    return torch.nn.Parameter(there, requires_grad=False) if isinstance(weight, torch.nn.Parameter) else there
