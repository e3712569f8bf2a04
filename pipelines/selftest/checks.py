"""The self-test's checks: each runs one kind of operation at a small size, and compares the result with float64 on the
CPU. Nothing is downloaded; takes at most a minute."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from ...precision.accumulation import accumulation
from ...precision.activation_estimate import META, counting, on_meta
from ...precision.arch import COMPILED, Architecture, detect
from ...precision.dtypes import DTYPES
from ...precision.guard import GuardPolicy, StageGuard
from ...precision.kernels import kernels_of
from ...precision.learned_scales import LearnedProducts
from ...precision.machine import first_line
from ...precision.memory import peak_memory
from ...precision.policy import Component, Precision, choose
from ...precision.report import RunReport
from ...precision.scaled_products import ScaledHalfMatmulMode
from ...precision.self_test import CheckResult, Concern, SelfTestReport, machine_of
from ...precision.upcast import run_in, run_in_fp32
from ..compile.backends import EAGER, CompileOptions, came_to, choose_backend, compiled
from ..errors import DeviceGone
from ..families.table import VARIANTS
from ..weights.offload import BlockOffload, Offload, brings_parts_to
from ..weights.placement import ran_out

logger = logging.getLogger(__name__)

_Compute = Callable[..., torch.Tensor]
# Largest error relative to the norm. With sums in float32 a result is rounded once, by at most half a last place.
BOUNDS = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp32": 1e-5}
_SCALED = 2.0**-10  # bound of scaled fp16 products: the operands and the result are rounded
MEMORY = 2 * 2**30  # most bytes of a card that the self-test takes
TIMED = {"cpu": (256, 256, 256), "card": (4096, 17776, 1920)}  # size of a product; tokens and width of a stream
_MOST_BEYOND = 0.1  # of the estimate: allocators round up, and libraries take workspaces
_BEYOND = 1e6  # factor that takes values beyond fp16's range
OPERATIONS: Mapping[str, tuple[_Compute, tuple[tuple[int, ...], ...]]] = {
    "matrix product": (F.linear, ((192, 512), (384, 512))),
    "2D convolution": (partial(F.conv2d, padding=1), ((1, 64, 24, 24), (64, 64, 3, 3))),
    "3D convolution": (partial(F.conv3d, padding=1), ((1, 32, 4, 12, 12), (32, 32, 3, 3, 3))),
    "attention": (F.scaled_dot_product_attention, ((1, 4, 192, 64),) * 3),
}
# Shapes of a product with sums as long as in the models' widest layers: accumulation in fp16 loses digits.
_LONG_SUMS = ((16, 16384), (64, 16384))


class _Check(NamedTuple):
    name: str
    bound: float  # the largest error that passes
    measure: Callable[[torch.device], float]  # returns the error
    concern: Concern  # what 'auto' does not choose if the check fails


def selftest(device: torch.device, tell: Callable[[str, int, int], object] = lambda *_: None) -> SelfTestReport:
    """Run every check on a device, also after one has failed.

    tell: gets each check's name as it begins, the number of finished checks, and the total; may raise, to interrupt.
    Raises DeviceGone if the device no longer responds.
    """
    architecture = detect(device)
    lines, checks = [], [*_checks(architecture)]
    for check in checks:
        tell(check.name, len(lines), len(checks) + 1)
        lines.append(_line(check, device))
        _ask(device, check.name)
    tell("times", len(lines), len(checks) + 1)
    machine = machine_of(device, architecture)
    today = time.strftime("%Y-%m-%d")
    return SelfTestReport(str(device), architecture, machine, today, tuple(lines), dict(_times(device, architecture)))


class _NotRunError(Exception):
    """A check cannot run here; the message says why."""


def _line(check: _Check, device: torch.device) -> CheckResult:
    found = partial(CheckResult, check.name, concern=check.concern)
    try:
        with torch.inference_mode():
            error = check.measure(device)
    except _NotRunError as why:
        return found("not run", note=str(why))
    except Exception as error:
        logger.debug("%s", check.name, exc_info=True)
        if ran_out(error):
            return found("not run", note=f"too little memory is free: {first_line(error)}")
        return found("wrong", bound=check.bound, note=first_line(error))
    return found("right" if error <= check.bound else "wrong", error, check.bound)


def _ask(device: torch.device, name: str) -> None:
    """Raise DeviceGone if not even one byte comes back from the device: after some errors, CUDA returns only that error
    to a process."""
    try:
        torch.zeros(1, dtype=torch.uint8).to(device).cpu()
    except RuntimeError as error:
        raise DeviceGone(
            "{} stopped responding after the check '{}' ({}). The results of this self-test are lost. Restart the "
            "program and run it again; if it happens again, the driver or the card is faulty.",
            *(device, name, first_line(error)),
        ) from error


def _checks(architecture: Architecture) -> Iterator[_Check]:
    for name, (compute, shapes) in OPERATIONS.items():
        for dtype in ("fp16", "bf16"):
            plain = partial(_plain, architecture, compute, shapes, dtype)
            yield _Check(f"{name} in {dtype}", BOUNDS[dtype], plain, dtype)
        in_fp32 = partial(_in_fp32, compute, shapes)
        yield _Check(f"{name} in fp32, without TF32", BOUNDS["fp32"], in_fp32, "fp32")
        yield _Check(f"{name} in fp16, scaled", _SCALED, partial(_scaled, compute, shapes), "fp16")
    long_sums = partial(_plain, architecture, F.linear, _LONG_SUMS, "fp16")
    yield _Check("the accumulation switches", BOUNDS["fp16"], long_sums, "fp16")
    rerun = partial(_rerun, architecture)
    yield _Check("a call that overflows, recomputed in fp32", BOUNDS["fp32"], rerun, "fp16")
    yield _Check("overflow protection, beyond fp16", 2 * BOUNDS["fp16"], _stream, "fp16")
    yield _Check("a compiled block", 2 * BOUNDS["fp16"], _compiled_block, COMPILED)
    yield _Check("offload 'group'", 0.0, _group_offload, "")
    yield _Check("peak memory beyond the estimate", _MOST_BEYOND, _peak_beyond_estimate, "")


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
    """Compute as overflow protection's first step does: activations are float32, and beyond fp16's range."""
    given = [_drawn(shape, seed) for seed, shape in enumerate(shapes)]
    large = -1 if compute is F.scaled_dot_product_attention else 0  # attention's values: such logits break softmax
    given[large] = given[large] * _BEYOND
    given = [each if index == large % len(given) else each.half() for index, each in enumerate(given)]
    made = run_in(ScaledHalfMatmulMode(torch.float16), compute, tuple(each.to(device) for each in given), {})
    return _off(made, compute(*(each.double() for each in given)))


def _rerun(architecture: Architecture, device: torch.device) -> float:
    first, last = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    first.weight.data = 2.0**12 * _drawn((64, 64), 0)
    last.weight.data = 2.0**-12 * _drawn((64, 64), 1)
    network, x = torch.nn.Sequential(first, last).half(), _drawn((8, 64), 2).half()
    exact = F.linear(F.linear(x.double(), first.weight.double()), last.weight.double())
    report = _report(architecture)
    guard = StageGuard("denoiser", network.to(device), dtype="fp16", policy=GuardPolicy(exact_fp32=True), report=report)
    made = guard(x.to(device))
    if report.reruns != 1:
        raise ValueError("the guard did not see the overflow")
    return _off(made, exact)


def _report(architecture: Architecture) -> RunReport:
    plan = choose(architecture, VARIANTS["CogVideoX-2B"], Component.DENOISER, Precision.FP16)
    return RunReport("self-test", str(architecture), plan)


class _StreamNetwork(torch.nn.Module):
    """x [tokens, width] → the same shape: a residual stream, with a norm before each layer. It overflows fp16 if x is
    as large as 2**8."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(width, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        for seed, layer in enumerate((self.embed, *self.layers)):
            factor = 2.0**8 if layer is self.embed else 2.0**-3
            layer.weight.data = _drawn((width, width), seed) * factor * (64 / width) ** 0.5
            layer.bias.data = _drawn((width,), seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, x.shape[-1:]).to(layer.weight.dtype))
        return F.layer_norm(x, x.shape[-1:])


def _stream(device: torch.device) -> float:
    network, x = _StreamNetwork().half(), 2.0**8 * _drawn((32, 64), 9).half()
    products, given = LearnedProducts(), x.to(device)
    network.to(device)
    made = [products.run(network, given).cpu() for _ in range(2)]  # scaled by rows, then by learned scales
    right = network.cpu().double()(x.double())
    return max(_off(each, right) for each in made)


def _compiled_block(device: torch.device) -> float:
    backend = choose_backend("auto", device)
    if backend.name == EAGER:
        raise _NotRunError(backend.reason)
    layer, x = torch.nn.Linear(64, 64), _drawn((32, 64), 2).half()
    layer.weight.data, layer.bias.data = 2.0**-3 * _drawn((64, 64), 0), _drawn((64,), 1)
    network = torch.nn.Sequential(torch.nn.Sequential(layer, torch.nn.GELU("tanh"))).half()
    shell = compiled(network.to(device), ("0",), backend, CompileOptions(), device=device)
    made = shell(x.to(device)).cpu()
    if (instead := came_to(shell, backend)).name == EAGER:
        raise _NotRunError(instead.reason)
    return _off(made, network.cpu().double()(x.double()))


def _group_offload(device: torch.device) -> float:
    """Compare blocks under offload 'group', run twice, with the same blocks on the device: the kernels are the same, so
    the bits are equal."""
    if not brings_parts_to(device):
        raise _NotRunError("a CPU computes in main memory")
    with torch.inference_mode(False):  # as for loaded weights
        blocks = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).requires_grad_(False)
        network = torch.nn.ModuleDict({"blocks": blocks}).half()
    x = _drawn((256, 512), 2).half().to(device)
    weights = BlockOffload(network, Offload.GROUP, device, blocks=("blocks",))
    shell = weights.shell(network)
    made = []
    for _ in range(2):  # weights are page-locked from the first run on
        with weights:
            made.append(shell.get_submodule("blocks")(x))
    weights.release()
    whole = blocks.to(device)(x).cpu().double()
    return max(_off(each, whole) for each in made)


def _peak_beyond_estimate(device: torch.device) -> float:
    """Return by which fraction overflow protection's first step exceeds its memory estimate; 0 if it does not."""
    network, x = _StreamNetwork().half().to(device), _drawn((65536, 64), 9).half().to(device)
    with counting(kernels_of(device)) as alive:
        LearnedProducts().run(on_meta(network), x.to(META))
    LearnedProducts().run(network, x)  # libraries allocate workspaces at the first call, and keep them
    with peak_memory(device) as peak:
        before = peak()
        if before is None or before.reserved is None:
            raise _NotRunError("memory is measured only on CUDA and ROCm cards")
        LearnedProducts().run(network, x)
        taken = peak()
    return max(0.0, (taken.used - before.used) / alive.most - 1) if taken else 0.0


def _times(device: torch.device, architecture: Architecture) -> Iterator[tuple[str, float]]:
    """Yield names and seconds: of a square product in each dtype, and scaled in fp16; and of a stream of layers, plain,
    guarded and with overflow protection, on a card as wide and long as CogVideoX-2B's. Skips those that run out of
    memory."""
    size, tokens, width = TIMED["cpu" if device.type == "cpu" else "card"]
    in_fp32 = {"fp32": False, "TF32": True} if architecture.tf32 else {"fp32": False}
    product = f"{size}×{size} product in"
    stream = f"{1 + len(_StreamNetwork().layers)} layers of {width} over {tokens} tokens in fp16"

    def factors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
        return _drawn((size, size), 0).to(device, dtype), _drawn((size, size), 1).to(device, dtype)

    def plain(dtype: str) -> Callable[[], object]:
        return partial(F.linear, *factors(DTYPES[dtype]))

    def tf32(allowed: bool) -> Callable[[], object]:
        return partial(run_in_fp32, F.linear, *factors(), tf32=allowed)

    def scaled() -> Callable[[], object]:
        (x, weight), products = factors(), ScaledHalfMatmulMode(torch.float16)
        return partial(run_in, products, F.linear, (x, weight.half()), {})

    def layers(around: Callable[[torch.nn.Module], Callable[..., object]]) -> Callable[[], object]:
        return partial(around(_StreamNetwork(width).half().to(device)), _drawn((tokens, width), 9).half().to(device))

    def guarded(network: torch.nn.Module) -> Callable[..., object]:
        report = _report(architecture)
        return StageGuard("denoiser", network, dtype="fp16", policy=GuardPolicy(), report=report)

    def protected(network: torch.nn.Module) -> Callable[..., object]:
        return partial(LearnedProducts().run, network)  # the first call is not timed

    halves = ("fp16",) if architecture.bf16 == "none" else ("fp16", "bf16")
    timed: dict[str, Callable[[], Callable[[], object]]] = {
        **{f"{product} {dtype}": partial(plain, dtype) for dtype in halves},
        **{f"{product} {name}": partial(tf32, allowed) for name, allowed in in_fp32.items()},
        f"{product} fp16, scaled": scaled,
        stream: partial(layers, lambda network: network),
        f"{stream}, guarded": partial(layers, guarded),
        f"{stream}, protected": partial(layers, protected),
    }
    for name, prepare in timed.items():
        if (seconds := _seconds(prepare, device)) is not None:
            yield name, seconds


def _seconds(prepare: Callable[[], Callable[[], object]], device: torch.device) -> float | None:
    """Return a call's duration, the median of seven; None if memory is too small."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    taken = []
    try:
        with torch.inference_mode():
            compute = prepare()
            compute()
            for _ in range(7):
                wait()
                since = time.perf_counter()
                compute()
                wait()
                taken.append(time.perf_counter() - since)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        return None
    return statistics.median(taken)


def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _off(made: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the error: the norm of the difference over the exact result's norm; infinite if it is not finite."""
    error = float((made.cpu().double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf
