"""Products that accumulate in fp16, on a CPU: a model of tensor cores with PyTorch's switch on.

A product runs along its inner dimension in chunks. In each chunk, products of fp16 values are exact and are summed in
at least single precision. The previous sum is added, and the result is rounded to fp16, to nearest even. NVIDIA's
instructions with fp16 accumulators work like this: `mma.sync.aligned.m16n8k16` takes 16 values at a time (PTX ISA,
"mma": with .f16 accumulators, "accumulation of intermediate values is performed with at least half precision").
Hardware adds 4 values at a time on Volta and Turing, 8 on Ampere, and rounds to nearest when it accumulates in fp16
(Fasi, Higham, Mikaitis, Pranesh: Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021).
Chunks of 8 and 4 are the model's pessimistic cases. Not modelled: cuBLAS may split the inner dimension over thread
blocks and add their sums separately, which is more accurate. For Ada and Blackwell, nobody has published such
measurements in this mode.

A bias is added as in cuBLAS' epilogue: to the sum, before the last rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

CHUNK = 16


def product(left: torch.Tensor, right: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """Multiply fp16 matrices [..., m, k] and [..., k, n], with fp16 sums."""
    sums = left.new_zeros((*left.shape[:-1], right.shape[-1]))
    left, right = left.float(), right.float()
    for start in range(0, left.shape[-1], chunk):
        taken = slice(start, start + chunk)
        sums = (left[..., taken] @ right[..., taken, :]).add_(sums).half()
    return sums


class Fp16SumsOnCpu(TorchDispatchMode):
    """Makes fp16 matrix products accumulate in fp16 wherever `torch.backends.cuda.matmul.allow_fp16_accumulation` is on
    at their launch, like a card with that switch. Everything else is the CPU's, which accumulates in fp32.

    launched: number of products that accumulated in fp16.
    """

    def __init__(self, chunk: int = CHUNK):
        super().__init__()
        self.chunk = chunk
        self.launched = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        make = _PRODUCTS.get(func)
        on = torch.backends.cuda.matmul.allow_fp16_accumulation
        if make is None or not on or args[0].dtype is not torch.float16:
            return func(*args, **(kwargs or {}))
        self.launched += 1
        return make(self._product, *args, **(kwargs or {}))

    def _product(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return product(left, right, self.chunk)


_Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _linear(product: _Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = product(x, weight.t())
    return made if bias is None else made + bias


def _addmm(
    product: _Product, bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    return beta * bias + alpha * product(left, right)


def _mm(product: _Product, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return product(left, right)


_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.addmm.default: _addmm,
    torch.ops.aten.baddbmm.default: _addmm,
    torch.ops.aten.mm.default: _mm,
    torch.ops.aten.bmm.default: _mm,
    torch.ops.aten.matmul.default: _mm,
}


@contextmanager
def a_card_with_fp16_sums(chunk: int = CHUNK) -> Generator[Fp16SumsOnCpu]:
    """Compute inside like such a card. PyTorch's switch is off before and after."""
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    with Fp16SumsOnCpu(chunk) as card:
        yield card
