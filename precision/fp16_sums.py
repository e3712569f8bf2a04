"""Linear layers that accumulate in fp16, and the probe that finds out which may.

GeForce cards multiply fp16 twice as fast where the products accumulate in fp16. PyTorch's switch for it is the
process's and knows no layers; here it is on while one of the chosen layers launches its product, and never otherwise.
So attention's own products, other components, other stages and fp32 reruns never accumulate in fp16, and nothing has to
be switched off for them.

The layers stand in a shell of the network and share its weights. In compiled code their product is one operation, which
sets the switch when it runs. Set around compiled code, it would do for some products and not for others: inductor may
make a product by Triton, which never looks at it, and has no setting of it in a cache's key (PyTorch 2.13).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .accumulation import fp16_sums
from .observe import Agree, alone, floating
from .shells import both, replaced
from .sums import LayerError, Sums, settled

SAMPLED = 256  # rows of a layer's input that are multiplied twice: half of them evenly spaced, half the largest


@torch.library.custom_op(
    "onediff_guard::linear_fp16_sums", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with fp16_sums():
        return F.linear(x, weight, bias)


@_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    del bias
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Do what `F.linear` does with fp16 tensors, with the products accumulated in fp16."""
    if torch.compiler.is_compiling():
        return torch.ops.onediff_guard.linear_fp16_sums(x, weight, bias)
    with fp16_sums():
        return F.linear(x, weight, bias)


class Fp16Sums(torch.nn.Module):
    """A base before the class of a linear layer: given fp16, it accumulates in fp16. In a rerun it is given float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float16:
            return super().forward(x)  # pyright: ignore[reportAttributeAccessIssue]
        return linear(x, self.weight, self.bias)


class Probed(torch.nn.Module):
    """A base before the class of a linear layer: it does as the probe of its network says."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    sums_name: str
    sums_probe: LinearSums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probe, forward = self.sums_probe, super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if x.dtype is not torch.float16:
            return forward(x)
        if self.sums_name in probe.tried:
            return linear(x, self.weight, self.bias)
        if probe.measures:
            probe.see(self.sums_name, x, self.weight, self.bias)
        return forward(x)


class LinearSums:
    """The linear layers of a network that may accumulate in fp16: those with weights in fp16, and no forward of their
    own.

    agree: makes what is measured the same in all processes that compute the network together.
    """

    def __init__(self, module: torch.nn.Module, agree: Agree = alone):
        self._names = tuple(
            name
            for name, layer in module.named_modules()
            if isinstance(layer, torch.nn.Linear)
            and type(layer).forward is torch.nn.Linear.forward
            and layer.weight.dtype is torch.float16
        )
        self._agree = agree
        self._seen: dict[str, list[torch.Tensor]] = {}
        self._rows: dict[str, int] = {}
        self.measures = False
        self.tried: frozenset[str] = frozenset()

    def shell(self, module: torch.nn.Module, sums: Sums | None) -> torch.nn.Module:
        """Return a shell of the network in which its layers accumulate as was measured.

        sums: None where that is still to be done: all accumulate in fp32, and can be probed.
        """
        if sums is None:
            return replaced(module, {name: lambda layer, name=name: self._probed(name, layer) for name in self._names})
        return replaced(module, dict.fromkeys((name for name in sums.layers if name in self._names), _summing))

    def _probed(self, name: str, layer: torch.nn.Module) -> torch.nn.Module:
        return _as(layer, Probed, sums_name=name, sums_probe=self)

    def probed(self, step: Callable[[], Any]) -> Sums:
        """Measure what the layers may accumulate in.

        step: makes one call of a shell whose layers can be probed. It is made once to measure each layer by its real
            input, and then with all those in fp16 that seem right, and with fewer where its output is too far off.
        """
        try:
            self.measures = True
            right = floating(step())
            self.measures = False

            def error(layers: tuple[str, ...]) -> float:
                self.tried = frozenset(layers)
                return float(self._agree(_apart(floating(step()), right).reshape(1)))

            return settled(self._errors(right), error)
        finally:
            self.measures, self.tried = False, frozenset()
            self._seen.clear()
            self._rows.clear()

    def see(self, name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Note how far a layer's product is off on some rows of what it is given. The host waits for nothing."""
        rows = x.detach().reshape(-1, x.shape[-1])
        some = sampled(rows)
        right, made = F.linear(some, weight, bias).float(), linear(some, weight, bias).float()
        whole = right.isfinite()
        broken = (whole & ~made.isfinite()).any()
        apart = torch.where(whole, made - right, 0.0)
        found = torch.stack([apart.square().sum(), torch.where(whole, right, 0.0).square().sum(), broken.float()])
        self._seen.setdefault(name, []).append(found)
        self._rows[name] = max(self._rows.get(name, 0), len(rows))

    def _errors(self, right: list[torch.Tensor]) -> list[LayerError]:
        """Return what was noted, in one transfer to the host. All processes know the same layers."""
        if not self._names:
            return []
        device = right[0].device if right else torch.device("cpu")
        nothing = torch.zeros(3, device=device)
        found = torch.stack([torch.stack(self._seen.get(name) or [nothing]).sum(0) for name in self._names])
        errors = (found[:, 0] / found[:, 1].clamp(min=torch.finfo(torch.float32).tiny)).sqrt()
        errors = torch.where((found[:, 2] > 0) | errors.isnan(), torch.inf, errors)
        rows = torch.tensor([float(self._rows.get(name, 0)) for name in self._names], device=device)
        agreed = self._agree(torch.cat([errors, rows])).tolist()
        each = zip(self._names, agreed[: len(self._names)], agreed[len(self._names) :], strict=True)
        return [LayerError(name, error, int(rows)) for name, error, rows in each]


def sampled(rows: torch.Tensor) -> torch.Tensor:
    """Return some rows: evenly spaced ones, and as many of those with the largest norms, which overflow first."""
    n = len(rows)
    if n <= SAMPLED:
        return rows
    spaced = torch.arange(SAMPLED // 2, device=rows.device) * n // (SAMPLED // 2)
    largest = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).topk(SAMPLED // 2).indices
    return rows[torch.cat([spaced, largest])]


def _apart(made: list[torch.Tensor], right: list[torch.Tensor]) -> torch.Tensor:
    """Return how far outputs are off, as a share of their norm. float32 []; inf where one is not finite."""
    off = torch.stack([(a.float() - b.float()).square().sum() for a, b in zip(made, right, strict=True)]).sum()
    norm = torch.stack([b.float().square().sum() for b in right]).sum()
    return (off / norm.clamp(min=torch.finfo(torch.float32).tiny)).sqrt().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _summing(layer: torch.nn.Module) -> torch.nn.Module:
    return _as(layer, Fp16Sums)


def _as(layer: torch.nn.Module, base: type[torch.nn.Module], **state: Any) -> torch.nn.Module:
    """Return a shell of `layer` that is a `base` as well, with `state` as its attributes."""
    shell = copy.copy(layer)
    shell.__class__ = both(base, type(layer))
    shell.__dict__.update(state)
    return shell
