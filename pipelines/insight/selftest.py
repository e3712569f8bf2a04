"""Whether a card computes what this pack takes for granted: each line runs one kind of operation at a small size, and
measures how far the result is from float64's, computed on the CPU. Nothing is downloaded; a minute at most."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.nn import functional as F

from ...precision.accumulation import accumulation
from ...precision.arch import Architecture, detect
from ...precision.dtypes import DTYPES
from ...precision.guard import GuardPolicy, StageGuard
from ...precision.half_products import HalfProducts, run_with_half_products
from ...precision.policy import Component, Precision, choose
from ...precision.report import RunReport
from ...precision.upcast import run_in_fp32
from ...precision.wide import with_wide_stream
from ...trust.plain import for_json
from ..compile.backends import EAGER, CompileOptions, came_to, choose_backend, compiled
from ..compile.target import platform_of
from ..families.table import VARIANTS
from .machine import driver, first_line

logger = logging.getLogger(__name__)

Verdict = Literal["right", "wrong", "not run"]
_Compute = Callable[..., torch.Tensor]
# Of the norm. A result is rounded once where sums are float32: by half a unit in the last place at most.
BOUNDS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 1e-5}
_SCALED = 2.0**-10  # of products in fp16 whose operands were scaled: each operand is rounded, and the result
_BEYOND = 1e6  # times fp16's usual values: what plain fp16 has no numbers for
OPERATIONS: Mapping[str, tuple[_Compute, tuple[tuple[int, ...], ...]]] = {
    "matrix product": (F.linear, ((192, 512), (384, 512))),
    "2D convolution": (partial(F.conv2d, padding=1), ((1, 64, 24, 24), (64, 64, 3, 3))),
    "3D convolution": (partial(F.conv3d, padding=1), ((1, 32, 4, 12, 12), (32, 32, 3, 3, 3))),
    "attention": (F.scaled_dot_product_attention, ((1, 4, 192, 64),) * 3),
}


@dataclass(frozen=True)
class Line:
    """What one check came to."""

    name: str
    verdict: Verdict
    error: float | None = None  # norm of the difference to float64, as a share of the norm; None: not measured
    bound: float | None = None
    note: str = ""


@dataclass(frozen=True)
class SelfTest:
    """What was found on one device."""

    device: str
    architecture: Architecture
    machine: Mapping[str, str]  # card, driver, versions
    date: str  # of the day, in local time: "2026-11-30"
    lines: tuple[Line, ...]
    seconds: Mapping[str, float]  # what was timed → of one call, the median

    @property
    def wrong(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.verdict == "wrong")

    @property
    def key(self) -> str:
        """What it holds for, as a file's name: this card, driver and PyTorch."""
        facts = hashlib.sha256(json.dumps(dict(self.machine), sort_keys=True).encode()).hexdigest()[:12]
        return f"{self.architecture.name}-{facts}"

    def as_dict(self) -> dict[str, Any]:
        return for_json(asdict(self))


def selftest(device: torch.device, tell: Callable[[str], object] = lambda _: None) -> SelfTest:
    """Run every check on a device, also after one that failed. tell: is given the name of each as it begins; may raise,
    to interrupt."""
    architecture = detect(device)
    lines = []
    for name, bound, check in _checks(architecture):
        tell(name)
        lines.append(_line(name, bound, partial(check, device)))
    tell("times")
    machine = {key: str(value) for key, value in asdict(platform_of(device, architecture.name)).items()}
    machine["driver"] = "" if device.type == "cpu" else driver()
    return SelfTest(
        str(device), architecture, machine, time.strftime("%Y-%m-%d"), tuple(lines), dict(_times(device, architecture))
    )


class _NotRunError(Exception):
    """A check has nothing to run here; says why."""


def _line(name: str, bound: float, check: Callable[[], float]) -> Line:
    try:
        with torch.inference_mode():
            error = check()
    except _NotRunError as why:
        return Line(name, "not run", note=str(why))
    except Exception as error:
        logger.debug("%s", name, exc_info=True)
        return Line(name, "wrong", bound=bound, note=first_line(error))
    return Line(name, "right" if error <= bound else "wrong", error, bound)


def _checks(architecture: Architecture) -> Iterator[tuple[str, float, Callable[[torch.device], float]]]:
    """Each check's name, the largest error that is right, and what measures it on a device."""
    for name, (compute, shapes) in OPERATIONS.items():
        for dtype in ("fp16", "bf16"):
            yield f"{name} in {dtype}", BOUNDS[dtype], partial(_plain, architecture, compute, shapes, dtype)
        yield f"{name} in fp32, without TF32", BOUNDS["fp32"], partial(_in_fp32, compute, shapes)
        yield f"{name} in fp16, scaled", _SCALED, partial(_scaled, compute, shapes)
    yield "the accumulation switches", BOUNDS["fp16"], partial(_long_sums, architecture)
    yield "a call that overflows, computed again in fp32", BOUNDS["fp32"], partial(_rerun, architecture)
    yield "a residual stream in float32, beyond fp16", 2 * BOUNDS["fp16"], _stream
    yield "a compiled block", 2 * BOUNDS["fp16"], _compiled_block


def _plain(
    architecture: Architecture, compute: _Compute, shapes: tuple[tuple[int, ...], ...], dtype: str, device: torch.device
) -> float:
    if dtype == "bf16" and architecture.bf16 == "none":
        raise _NotRunError(f"{architecture} has no bf16")
    given = [_drawn(shape, seed).to(DTYPES[dtype]) for seed, shape in enumerate(shapes)]
    with accumulation(architecture):
        made = compute(*(each.to(device) for each in given))
    return _off(made, compute(*(each.double() for each in given)))


def _in_fp32(compute: _Compute, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> float:
    given = [_drawn(shape, seed).half() for seed, shape in enumerate(shapes)]
    made = run_in_fp32(compute, *(each.to(device) for each in given))
    return _off(made, compute(*(each.double() for each in given)))


def _scaled(compute: _Compute, shapes: tuple[tuple[int, ...], ...], device: torch.device) -> float:
    """As the guard's first attempt computes it: what is not a weight is float32, and beyond fp16."""
    given = [_drawn(shape, seed) for seed, shape in enumerate(shapes)]
    large = -1 if compute is F.scaled_dot_product_attention else 0  # its values, since softmax takes no such logits
    given[large] = given[large] * _BEYOND
    given = [each if index == large % len(given) else each.half() for index, each in enumerate(given)]
    made = run_with_half_products(compute, *(each.to(device) for each in given), products=HalfProducts(torch.float16))
    return _off(made, compute(*(each.double() for each in given)))


def _long_sums(architecture: Architecture, device: torch.device) -> float:
    """A product that adds up as many numbers as the widest layers of the models here, under the switches that runs
    hold: fp16 sums lose digits of it."""
    given = [_drawn(shape, seed).half() for seed, shape in enumerate(((16, 16384), (64, 16384)))]
    with accumulation(architecture):
        made = F.linear(*(each.to(device) for each in given))
    return _off(made, F.linear(*(each.double() for each in given)))


def _rerun(architecture: Architecture, device: torch.device) -> float:
    first, last = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    first.weight.data = 2.0**12 * _drawn((64, 64), 0)
    last.weight.data = 2.0**-12 * _drawn((64, 64), 1)
    network, x = torch.nn.Sequential(first, last).half(), _drawn((8, 64), 2).half()
    exact = F.linear(F.linear(x.double(), first.weight.double()), last.weight.double())
    plan = choose(architecture, VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision.FP16)
    report = RunReport("self-test", str(architecture), plan)
    guard = StageGuard("denoiser", network.to(device), dtype="fp16", policy=GuardPolicy(strict=True), report=report)
    made = guard(x.to(device))
    if report.reruns != 1:
        raise ValueError("the guard did not see the overflow")
    return _off(made, exact)


class _Stream(torch.nn.Module):
    """x [tokens, 64] → the same: a residual stream, with a norm before each layer that reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(64, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        for seed, layer in enumerate((self.embed, *self.layers)):
            layer.weight.data = _drawn((64, 64), seed) * (2.0**8 if layer is self.embed else 2.0**-3)
            layer.bias.data = _drawn((64,), seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (64,)).to(layer.weight.dtype))
        return F.layer_norm(x, (64,))


def _stream(device: torch.device) -> float:
    network, x = _Stream().half(), 2.0**8 * _drawn((32, 64), 9).half()
    wide = with_wide_stream(network.to(device), ("embed", *(f"layers.{i}" for i in range(3))), torch.float16)
    made = wide(x.to(device)).cpu()
    return _off(made, network.cpu().double()(x.double()))


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)
        self.layer.weight.data, self.layer.bias.data = 2.0**-3 * _drawn((64, 64), 0), _drawn((64,), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.layer(x), approximate="tanh") * 2


class _Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([_Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def _compiled_block(device: torch.device) -> float:
    backend = choose_backend("auto", device)
    if backend.name == EAGER:
        raise _NotRunError(backend.reason)
    network, x = _Blocks().half(), _drawn((32, 64), 2).half()
    shell = compiled(network.to(device), ("blocks",), backend, CompileOptions(), device=device)
    made = shell(x.to(device)).cpu()
    if (instead := came_to(shell, backend)).name == EAGER:
        raise _NotRunError(instead.reason)
    return _off(made, network.cpu().double()(x.double()))


def _times(device: torch.device, architecture: Architecture) -> Iterator[tuple[str, float]]:
    """What a square product takes in each dtype, and scaled in fp16."""
    size = 256 if device.type == "cpu" else 4096
    x, weight = (_drawn((size, size), seed).to(device) for seed in range(2))
    products = HalfProducts(torch.float16)
    for dtype in ("fp16", "bf16", "fp32"):
        if dtype != "bf16" or architecture.bf16 != "none":
            given = x.to(DTYPES[dtype]), weight.to(DTYPES[dtype])
            yield f"{size}×{size} product in {dtype}", _seconds(partial(F.linear, *given), device)
    scaled = partial(run_with_half_products, F.linear, x, weight.half(), products=products)
    yield f"{size}×{size} product in fp16, scaled", _seconds(scaled, device)


def _seconds(compute: Callable[[], object], device: torch.device, calls: int = 7) -> float:
    """Return what a call takes, the median of some."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    taken = []
    with torch.inference_mode():
        compute()
        for _ in range(calls):
            wait()
            since = time.perf_counter()
            compute()
            wait()
            taken.append(time.perf_counter() - since)
    return sorted(taken)[calls // 2]


def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _off(made: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the difference as a share of the norm; infinite where a result is not finite."""
    error = float((made.cpu().double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf
