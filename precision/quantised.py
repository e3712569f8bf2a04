"""Quantised linear layers: they multiply in int8 or fp8, by torchao, which is never needed and never imported before.

They replace layers in a shallow copy of the network, which shares everything else, its half-precision weights included.
So a failing call is recomputed from those, LoRAs work around the layers as before, and a layer that fails can go back
to half precision.

Each row of an input (a token) and each row of a weight has its own scale, from the row's largest value. In these two
configurations, torchao 0.18 propagates NaN and infinity, in eager and in compiled code: a row whose scale is not finite
becomes NaN. Its other configurations do not: with an upper bound on the scale, or a scale measured beforehand, an
infinite value becomes finite. To be independent of torchao's release and of installed kernels, each layer records the
largest |x| of its input: one reduction, which the guard reads together with the output's range.

That does not show finite errors: beside one value of 1,000, int8 rounds the rest of a row to 0. So before a network's
first call, the same call runs in half precision, and each layer also multiplies some rows of its input quantised. A
layer whose error exceeds BOUND stays in half precision.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .dtypes import HALF_DTYPES
from .layer_peaks import Agree, alone, error_of, sampled
from .overrides import covered
from .scaled_products import absmax
from .shallow_copy import copy_with_base, replace_submodules

TORCHAO = "torchao==0.18.0"
LEAST = 512  # fewest features of a layer, in and out: with fewer, memory limits the speed, not products
# The largest error of a layer, as a share of a row's norm. On normally distributed values int8 comes to 0.009, and fp8
# to 0.037; with a channel 20 times as large as the others int8 comes to 0.04, and with one 50 times as large to 0.09.
BOUND = 0.05
STEP = 16  # sizes have to be multiples of it for both kernels
_SMALLEST = 1e-12  # lower bound of an fp8 row's maximum: torchao divides by it, and zeros gave NaN
_ONE_ROW = re.compile(r"(^|\.)(norm|time_|emb|ada|modulation)")  # parts whose layers get one row per sample


def worth_quantising(module: torch.nn.Module, blocks: Collection[str]) -> tuple[str, ...]:
    """Return the names of the layers to quantise: the large linear layers of the blocks, unless their class overrides
    forward.

    Embeddings, the last projection and the modulation of norms are left out: they take next to no time, and their error
    reaches every token.
    """
    return tuple(
        name
        for name, layer in module.named_modules()
        if isinstance(layer, torch.nn.Linear)
        and type(layer).forward is torch.nn.Linear.forward
        and layer.weight.dtype in HALF_DTYPES
        and min(layer.in_features, layer.out_features) >= LEAST
        and layer.in_features % STEP == layer.out_features % STEP == 0
        and covered(name, blocks)
        and not _ONE_ROW.search(name)
    )


def lacking(kind: str) -> str:
    """Say what is missing for quantisation, and what to do; "" if nothing is. Imports nothing."""
    if importlib.util.find_spec("torchao") is not None:
        return ""
    return (
        f"Precision '{kind}' needs torchao, which is not installed here. Install it with 'python -m pip install "
        f"--no-deps {TORCHAO}' with the Python that runs this pack, or choose precision 'auto'."
    )


def _int8(device: torch.device) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    from torchao.utils import should_reduce_range

    # set_inductor_config would change inductor's settings, and the precision of float32 products, for the whole process
    reduce_range = should_reduce_range(device) or _saturates(device)
    return Int8DynamicActivationInt8WeightConfig(set_inductor_config=False, reduce_range=reduce_range)


def _saturates(device: torch.device) -> bool:
    """Return whether sums of int8 products saturate at int16, as oneDNN's do without VNNI. torchao checks only the CPU;
    ONEDNN_MAX_CPU_ISA may keep oneDNN from using VNNI."""
    if device.type != "cpu":
        return False
    largest = torch.full((32, 32), 127, dtype=torch.int8, device=device)
    return int(torch._int_mm(largest, largest)[0, 0]) != 32 * 127**2


def _fp8(_device: torch.device) -> Any:
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow
    from torchao.quantization.quantize_.common import KernelPreference

    return Float8DynamicActivationFloat8WeightConfig(
        granularity=PerRow(),
        activation_value_lb=_SMALLEST,
        kernel_preference=KernelPreference.TORCH,  # not whatever else happens to be installed
        set_inductor_config=False,
    )


CONFIGS: dict[str, Callable[[torch.device], Any]] = {"int8": _int8, "fp8": _fp8}


def quantised_weight(layer: torch.nn.Linear, kind: str) -> torch.Tensor:
    """Return a linear layer's weight as torchao's quantised tensor, which also knows how to quantise inputs. The layer
    stays as it is."""
    from torchao.quantization import quantize_

    bare = copy.copy(layer)
    bare.__dict__["_parameters"] = dict(layer._parameters)
    with torch.inference_mode(False), torch.no_grad():
        quantize_(bare, CONFIGS[kind](layer.weight.device), filter_fn=lambda part, _name: part is bare)
        return bare.weight.detach()


class QuantisedLinear(torch.nn.Module):
    """A mixin for a linear layer: it multiplies by a quantised weight, and records its input's peak."""

    quantised_weight: torch.Tensor | None  # None between runs
    quantised_peak: torch.Tensor | None  # max |x| of its inputs, NaN if one has NaN; float32 []
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = absmax(x, tuple(range(x.ndim))).reshape(())
        self.quantised_peak.copy_(torch.maximum(self.quantised_peak, largest))  # pyright: ignore
        return F.linear(x, self.quantised_weight, self.bias)  # pyright: ignore[reportArgumentType]


class MeasuredLinear(torch.nn.Module):
    """A mixin for a linear layer: it computes in half precision, and measures the quantised layer's error on some rows
    of its input, without the bias, since a large bias would hide the product's error."""

    weight: torch.Tensor
    quantised: Any  # the quantised layer, in a tuple: a module would become a submodule
    quantised_errors: list[torch.Tensor]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = sampled(x.detach().reshape(-1, x.shape[-1]))
        made, right = F.linear(rows, self.quantised[0].quantised_weight), F.linear(rows, self.weight)
        self.quantised_errors.append(error_of(made.float(), right.float()))
        return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]


class QuantisedLinears:
    """The quantised layers of a network. Their weights exist from `fill` to `empty`, for one run.

    module: with weights in half precision, which `fill` reads; they must be on the computing device by then.
    kind: one of CONFIGS.
    agree: all-reduces measurements over the processes that compute the network together.
    """

    def __init__(self, module: torch.nn.Module, blocks: Collection[str], kind: str, agree: Agree = alone):
        self.kind = kind
        self.names = worth_quantising(module, blocks)
        self.errors: dict[str, float] | None = None  # of each layer on its first input; None: not measured yet
        self._agree = agree
        self._layers: dict[str, Any] = {}
        for name in self.names:
            layer = module.get_submodule(name)
            self._layers[name] = copy_with_base(layer, QuantisedLinear, _parameters=dict(layer._parameters))
        self.empty()

    def shell(self, module: torch.nn.Module, but: Iterable[str] = ()) -> torch.nn.Module:
        """Return a shallow copy of the network with quantised layers.

        but: names of layers to leave, besides those whose error is too large.
        """
        left = {*but, *self.left}
        put = {name: lambda _layer, quantised=layer: quantised for name, layer in self._layers.items()}
        return replace_submodules(module, {name: make for name, make in put.items() if name not in left})

    @property
    def left(self) -> tuple[str, ...]:
        """Names of layers whose error is too large to be quantised, the largest first."""
        errors = self.errors or {}
        return tuple(sorted((name for name in errors if errors[name] > BOUND), key=lambda name: -errors[name]))

    def measuring(self, module: torch.nn.Module) -> tuple[torch.nn.Module, Callable[[Callable[[], Any]], None]]:
        """Return a shallow copy whose layers compute in half precision, and a function that measures the quantised
        layers' errors by one call of that copy. `fill` has to come before."""
        noted: dict[str, list[torch.Tensor]] = {name: [] for name in self.names}

        def make(layer: torch.nn.Module, name: str) -> torch.nn.Module:
            return copy_with_base(layer, MeasuredLinear, quantised=(self._layers[name],), quantised_errors=noted[name])

        def measure(call: Callable[[], Any]) -> None:
            call()
            nothing = torch.zeros((), device=self._layers[self.names[0]].weight.device)
            found = torch.stack([torch.stack(noted[name] or [nothing]).amax() for name in self.names])
            self.errors = dict(zip(self.names, self._agree(found).tolist(), strict=True))
            self.empty(self.left)

        return replace_submodules(module, {name: partial(make, name=name) for name in self.names}), measure

    def in_words(self) -> str:
        """Say which layers have too large an error; "" if none has."""
        if not (left := self.left):
            return ""
        errors = self.errors or {}
        said = ", ".join(f"'{name}' {_percent(errors[name])}" for name in left[:3])
        said += f" and {len(left) - 3} more" if len(left) > 3 else ""
        return (
            f"{len(left)} of {len(self.names)} layers stay in half precision, since {self.kind} is off by more than "
            f"{BOUND:.0%} on their first input: {said}"
        )

    def fill(self) -> None:
        """Quantise the weights of all layers that are not excluded and not quantised yet."""
        left = self.left
        for name, layer in self._layers.items():
            if layer.quantised_weight is None and name not in left:
                with torch.inference_mode(False):
                    peak = torch.zeros((), device=layer.weight.device)
                layer.__dict__.update(quantised_weight=quantised_weight(layer, self.kind), quantised_peak=peak)

    def empty(self, names: Iterable[str] | None = None) -> None:
        """Drop the quantised weights. names: only of these layers."""
        for name in self.names if names is None else names:
            self._layers[name].__dict__.update(quantised_weight=None, quantised_peak=None)

    def start(self) -> None:
        """Reset the recorded peaks."""
        if peaks := self._peaks():
            torch._foreach_zero_(peaks)

    def take(self) -> torch.Tensor | None:
        """Return max |x| over all layers' inputs since `start`, float32 [] on their device; None without layers."""
        peaks = self._peaks()
        return torch.stack(peaks).amax() if peaks else None

    def _peaks(self) -> list[torch.Tensor]:
        return [layer.quantised_peak for layer in self._layers.values() if layer.quantised_peak is not None]

    @property
    def n_bytes(self) -> int:
        """The bytes of the quantised weights, with a scale and a zero point per row."""
        return sum(weight.numel() + 5 * weight.shape[0] for weight in (it.weight for it in self._layers.values()))


def _percent(error: float) -> str:
    return f"{error:.0%}" if math.isfinite(error) else "NaN or infinite"
