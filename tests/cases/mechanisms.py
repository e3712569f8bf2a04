"""Builds each of the five known causes of black pictures into a small model."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from comfyui_onediff_guard.pipelines.families.cogview import COGVIEW3PLUS
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH
from onediff.infer_compiler.backends.env_var import set_oneflow_env_vars
from small_families import cogview_call
from stream_peaks import stream_peak
from torch.nn import functional as F


def error(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


def overflow_inside_a_feed_forward(denoiser):
    """Make hidden activations of one feed-forward reach 3e5. Its output stays the same."""
    feed_forward = denoiser.transformer_blocks[1].ff
    factor = 1e5
    feed_forward.net[0].proj.weight.mul_(factor)
    feed_forward.net[0].proj.bias.mul_(factor)
    feed_forward.net[2].weight.div_(factor)


def trained_in_fp16(denoiser):
    """Round the weights to values that fp16 represents exactly, and bf16 does not."""
    for parameter in denoiser.parameters():
        parameter.copy_(parameter.half())


class FusedRMSNorm(torch.nn.Module):
    """Like apex's norm: the kernel rejects an input of another dtype than the weight's. Older transformers use apex's
    norm instead of T5LayerNorm if apex is installed."""

    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x):
        if x.dtype != self.weight.dtype:
            raise RuntimeError("expected scalar type Float but found Half")
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (self.weight * (x.float() * torch.rsqrt(variance + self.eps))).to(x.dtype)


def beyond_fp16(text_encoder):
    """Set a weight of a feed-forward's last layer beyond fp16's range, as in T5 v1.1 XXL. Its input is small."""
    feed_forward = text_encoder.encoder.block[0].layer[1].DenseReluDense
    feed_forward.wo.weight[3, 5] = 66246.0
    feed_forward.wi_0.weight[5] *= 2**-7
    feed_forward.wi_1.weight[5] *= 2**-9


def overflow_stream(gates: tuple[int, ...], writer: str) -> Callable[[Any], None]:
    """Make the residual stream of image tokens, text tokens, or both, reach 5e5 after a block."""

    def change(denoiser):
        block, width = denoiser.transformer_blocks[0], 64
        for gate in gates:
            block.norm1.linear.bias[gate * width : (gate + 1) * width] = 16.0
        linear = block.get_submodule(writer)
        for _ in range(3):
            peak = stream_peak(denoiser, COGVIEW3PLUS.blocks, lambda: denoiser(**cogview_call(denoiser, 2)))
            linear.weight.mul_(5e5 / peak)

    return change


FLASH_SWITCH = "ONEFLOW_KERNEL_FMHA_ENABLE_TRT_FLASH_ATTN_IMPL"
FEED_FORWARD, ATTENTION = "ff.net.2", "attn1.to_out.0"
IMAGE, TEXT = 5, 11  # chunks of norm1.linear: the gates of the feed-forward; 3 before each, those of attention
CLIPPED = {  # gates, and the layer that writes to the stream
    "finite wrong picture": ((IMAGE, TEXT), FEED_FORWARD),
    "clipped text tokens, not seen by the last norm": ((TEXT,), FEED_FORWARD),
    "NaN, kept by clipping": ((IMAGE - 3, TEXT - 3), ATTENTION),
}


class Launch(NamedTuple):
    """The environment that a kernel read at its launch."""

    compiled: bool  # in a compiled block
    attention: str | None  # value of ATTENTION_SWITCH
    flash: str | None  # value of FLASH_SWITCH


class OneFlow:
    """A stand-in for OneFlow's special builds on one card. A block from `compile` launches the fused attention, which
    reads the environment at each launch, as C code does. OneDiff's own functions set the environment when it
    compiles."""

    def __init__(self, card: str):
        self.launches: list[Launch] = []
        self._accumulates_in_half = card in ("sm75", "sm80", "sm86", "sm89")
        self._attention = F.scaled_dot_product_attention
        self._compiled = 0

    def compile(self, module: torch.nn.Module, *, options: Any = None) -> torch.nn.Module:
        set_oneflow_env_vars(options)
        return _Compiled(self, module)

    def environment(self) -> dict[str, str]:
        """OneFlow's variables."""
        return {name: value for name, value in os.environ.items() if name.startswith("ONEFLOW_")}

    def launch(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        """Replaces PyTorch's attention, which does not read the switches: record their values."""
        switch = _getenv(ATTENTION_SWITCH)
        self.launches.append(Launch(self._compiled > 0, switch, _getenv(FLASH_SWITCH)))
        allowed = (switch or "true").lower() in {"1", "true", "yes", "on", "y"}
        if self._compiled and self._accumulates_in_half and allowed and query.dtype == torch.float16:
            scores = (query.float() @ key.float().transpose(-1, -2)) * 1e6  # K is large, as in SVD: OneDiff PR 454
            return (scores.half().softmax(-1) @ value).to(value.dtype)
        return self._attention(query, key, value, **options)


class _Compiled(torch.nn.Module):
    def __init__(self, oneflow: OneFlow, module: torch.nn.Module):
        super().__init__()
        self.module = module
        self._oneflow = oneflow

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._oneflow._compiled += 1
        try:
            return self.module(*args, **kwargs)
        finally:
            self._oneflow._compiled -= 1


def _getenv(name: str) -> str | None:
    """Read a variable from the process's environment, not from Python's copy of it."""
    if os.name == "nt":
        return os.environ.get(name)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    value = getenv(name.encode())
    return None if value is None else value.decode()
