"""Learned scales: steps after the first, computed with scales from its peaks."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import guards
import numpy as np
import pytest
import torch
from blocky import build, guarded, latents, overflow_stream
from clipping import CLIPS
from comfyui_onediff_guard.precision import planned_products, scaled_products
from comfyui_onediff_guard.precision.after_failure import FallbackAdapter, build_half_precision_forward
from comfyui_onediff_guard.precision.guard import Scope
from comfyui_onediff_guard.precision.learned_scales import (
    MAX_RENEWALS,
    LayerPeaks,
    LearnedProducts,
    LearningMode,
    choose_scale,
)
from comfyui_onediff_guard.precision.planned_products import PlanMismatch, PlannedMode, Scale
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from guards import error
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sample_networks import (
    HOT,
    NETWORKS,
    PLACES,
    SHAPES,
    TOKENS,
    Shape,
    check_scales,
    check_steps,
    heated,
    network,
    scaled,
)
from test_scaled_products import scaled as by_rows
from tiers import by_tier
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

FP16, BF16 = torch.float16, torch.bfloat16


def planned(products: LearnedProducts) -> dict[Any, Scale]:
    return products._planned._plan if products._planned else {}


# overflowing captions give logits of 5e8, where the last bits decide which key takes the whole softmax
UNDECIDED = ("PixArtTransformer2DModel", "last but one")


@pytest.mark.parametrize("stored", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("name", "hot"), [case for case in product(NETWORKS, HOT) if case != UNDECIDED])
def test_steps_by_learned_scales_are_four_times_nearer_than_bf16(name: str, hot: str, stored: torch.dtype) -> None:
    module, inputs = heated(name, hot)
    module.to(stored)
    products = LearnedProducts()
    check_steps(lambda **step: products.run(module, **step)[0], module, inputs, healthy=hot == "nothing")
    assert products._renewals == 0
    scales = planned(products)
    assert len(scales) >= 0.97 * len(products._peaks)
    check_scales(scales, healthy=hot == "nothing")


EXPONENTS = st.one_of(st.just(0), st.integers(-24, 24))


@settings(max_examples=by_tier(400, 60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shape=SHAPES,
    hot=st.sets(st.sampled_from(PLACES), max_size=2),
    stored=st.sampled_from([FP16, BF16]),
    all_of_it=EXPONENTS,
    token=EXPONENTS,
    channel=EXPONENTS,
    weight=st.integers(-6, 6),
    changed=st.integers(0, 40),
)
def test_step_outside_the_plan_is_nonfinite_or_near_fp32(
    shape: Shape, hot: set[str], stored: Any, all_of_it: int, token: int, channel: int, weight: int, changed: int
) -> None:
    """A prompt, token, channel or LoRA much larger or smaller than in the first step, which is scaled by rows."""
    # inputs of a tanh or softmax are not made so large that only their sign matters
    hot = hot & {"final"} if shape.unnormed else hot - {"first"} if shape.branch == "attention" else hot
    names = [name for name, part in network(shape).named_modules() if name.rpartition(".")[2] in hot]
    module, products = network(shape, tuple(names)).to(stored), LearnedProducts()

    def step(seed: int, *exponents: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        x, t = (torch.randn(size, generator=generator) for size in ((2, TOKENS, 4), (2, 4)))
        gain, of_token, of_channel = (2.0**exponent for exponent in exponents)
        x *= gain
        x[:, 1] *= of_token
        x[:, :, 2] *= of_channel
        return lambda module: module(x.clone(), t)

    first = step(1, 0, 0, 0)
    exact = run_in_fp32(first, module)
    found = error(products.run(first, module), exact)
    assert found < 5e-3 or (names and found < error(scaled(module, first, BF16), exact) / 2)
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Conv1d))]
    layer = layers[changed % len(layers)]
    layer.weight.data = (layer.weight.float() * 2.0**weight).clamp(-6e4, 6e4).to(stored)
    call = step(2, all_of_it, token, channel)
    exact = run_in_fp32(call, module)
    assume(exact.isfinite().all())
    allowed = max(error(scaled(module, call, BF16), exact), 1.1 * error(scaled(module, call), exact))
    allowed = max(allowed, 2.0**-11)  # a unit in the last place of fp16, which an output may be in
    found = products.run(call, module)
    if not found.isfinite().all():
        assert products.renew()
        found = products.run(call, module)
        allowed = max(allowed, 5e-3)
    assert error(found, exact) <= allowed


@torch.jit.script
def scripted_norm(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


MAKES_FINITE = CLIPS | {
    "a norm that is scripted": scripted_norm,
    **{
        f"one over {what}": lambda x, read=read: x.new_ones(x.shape) / read(x.abs().amax())
        for what, read in {
            "a number": torch.Tensor.item,
            "a float": float,
            "a list": lambda x: x[None].tolist()[0],
            "an array": lambda x: x.numpy().item(),
            "another array": lambda x: np.asarray(x).item(),
        }.items()
    },
    "a norm by rsqrt": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "a norm by a product": lambda x: x * (x * x).mean(-1, keepdim=True).rsqrt(),
    "a norm by division": lambda x: x / x.norm(dim=-1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "a choice by itself": lambda x: torch.where(x == x, x, 0) * 0 + torch.where(x.abs() < 65504, x, 0),
    "one over it": lambda x: 1 / (1 + x.abs()),
    "a negative power": lambda x: (1 + x.abs()) ** -0.5,
    "a softmax written out": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "softmax": lambda x: x.softmax(-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "gate": lambda x: x.sigmoid() * x.tanh(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "max": lambda x: x.amax(1, keepdim=True).expand_as(x),
}


@pytest.mark.parametrize("squared", [False, True], ids=["a layer's output", "a product of two"])
@pytest.mark.parametrize("finite", MAKES_FINITE.values(), ids=MAKES_FINITE)
def test_hidden_overflow_is_nonfinite_or_near_fp32(finite: Any, squared: bool) -> None:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.l[0](x)
        return s.l[2](finite(h * s.l[1](x) if squared else h))

    module, products, x = built(partial(Fn, network, (1, 1, 1))), LearnedProducts(), noise(1, 5, 64)
    products.run(module, x)
    for exponent in range(2, 24, 2):
        found, exact = products.run(module, x * 2.0**exponent), run_in_fp32(module, x * 2.0**exponent)
        allowed = max(4e-3, error(by_rows(module, x * 2.0**exponent, dtype=BF16), exact))
        assert not found.isfinite().all() or error(found, exact) <= allowed, exponent
    assert planned(products)


class Fn(nn.Module):
    """A function of a network and its input; `step` is the number of the call, from 0."""

    def __init__(self, function: Any, gains: tuple[float, ...] = (1, 1), **parts: Any) -> None:
        super().__init__()
        self.function, self.step = function, 0
        self.l: Any = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in gains)
        for layer, gain in zip(self.l, gains, strict=True):
            layer.weight.data.mul_(gain)
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            elif name.startswith("b"):
                self.register_buffer(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part))

    def forward(self, x: torch.Tensor, step: int = 0) -> Any:
        self.step = step
        return self.function(self, x)


Case = tuple[Callable[[], Fn], tuple[float, ...]]  # a network, and the factor of its inputs in each step


def case(function: Any, louder: tuple[float, ...] = (1, 1), *, gains: tuple[float, ...] = (1, 1), **parts: Any) -> Case:
    return partial(Fn, function, gains, **parts), louder


def built(make: Any, stored: torch.dtype = FP16) -> Any:
    torch.manual_seed(0)
    return make().to(stored).requires_grad_(False)


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def renormed(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (64,), eps=1e-20)


def behind(function: Any) -> Any:
    """A function between two layers."""
    return lambda s, x: s.l[1](function(s.l[0](x)))


def normed(function: Any) -> Any:
    return lambda s, x: renormed(function(s.l[0](x)))


def attended(s: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (layer(x).view(2, 8, 4, 16).transpose(1, 2) for layer in s.l[:3])
    return s.l[3](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def copy_changed_in_place(of: Any) -> Any:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        w = of(s).float()
        w.mul_(1.5)
        return s.l[0](x) * w

    return network


def written(write: Any, then: Any = renormed, *, into: Any = lambda s, x: s.l[0](x), since: int = 0) -> Any:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = into(s, x)
        if s.step >= since:
            write(s, h, x)
        return then(h)

    return network


def into_cast(cast: Any) -> Any:
    return lambda s, x: cast(s.l[0](x))


def activated_copy(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.l[0](x)
    copied = h.half()
    F.relu(copied, inplace=True)
    return copied + 0 * h


def copied_and_changed_later(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.l[0](x)
    copied = h.half()
    if s.step:
        copied.add_(1)
    return h + 0 * copied


def put_in_place_later(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = s.l[0](x)
    return renormed(torch.mul(h, s.g, out=h) if s.step else torch.mul(h, s.g))


def other_way(is_taken: Any) -> Any:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.l[0](x)
        h = h * s.g if is_taken(s.step) else h
        return s.l[1](renormed(h * s.q))

    return network


def catching(s: Any, x: torch.Tensor) -> torch.Tensor:
    """Like ComfyUI's adding of a ControlNet residual."""
    h = s.l[0](x)
    with contextlib.suppress(Exception):
        if s.step:
            h += s.g
    return s.l[1](h)


def quieter(how: str, exponent: int) -> Case:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        factor, h = s.g.view(1, 1, 64) * 2.0 ** (exponent * s.step), s.l[0](x)
        return renormed(torch.addcmul(s.q, h, factor) if how == "modulated" else h * factor)

    return case(network, g=ONE, q=ONE * 0)


@torch.library.custom_op("comfy_kitchen::apply_rope1", mutates_args=())
def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the dtype of x, like ComfyUI's kernels of these names."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.float().cos(), angles.float().sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).type_as(x)


@torch.library.custom_op("comfy_kitchen::rms_rope1", mutates_args=())
def normed_and_turned(x: torch.Tensor, angles: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return turned(F.rms_norm(x.float(), (64,), weight.float()).type_as(x), angles)


@torch.library.custom_op("guard_tests::dampen", mutates_args={"x"})
def dampen(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


for kernel in (turned, normed_and_turned):
    kernel.register_fake(lambda x, *_: torch.empty_like(x))


def overwritten(write: Any, exponent: int) -> Case:
    """A norm's output with a part replaced, like CogVideoX-5B's rotation of image queries."""

    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.layer_norm(s.l[0](x), (64,))
        write(y, (y.float() * s.g.float() + y.flip(-1).float()) * 2.0 ** (exponent * s.step), s.step)
        return s.l[1](renormed(y)) + F.rms_norm(y[..., 32:], (32,), eps=1e-20).repeat(1, 1, 2)

    return case(network, (1, 1, 1), g=ONE / 2)


def put(y: torch.Tensor, at: Any, value: torch.Tensor) -> None:
    y[at] = value


ROWS, HALF_OF_ROWS = (slice(None), slice(3, None)), (..., slice(32, None))
OVERWRITES: dict[str, Any] = {
    "rows": lambda y, made, _: put(y, ROWS, made[ROWS].to(y.dtype)),
    "rows by one number": lambda y, made, _: put(y, ROWS, made[0, 0, 0]),
    "half of rows": lambda y, made, _: put(y, HALF_OF_ROWS, made[HALF_OF_ROWS]),
    "rows, copied later": lambda y, made, step: y[ROWS].copy_(made[ROWS]) if step else put(y, ROWS, made[ROWS]),
}
GATED: dict[str, Any] = {
    "a product": lambda a, b: a * b,
    "swiglu": lambda a, b: F.silu(a) * b,
    "geglu": lambda a, b: F.gelu(a) * b,
    "one channel": lambda a, b: a[..., :1] * b,
}
EVEN = torch.arange(64) % 2 == 0
WRITES: dict[str, Any] = {  # a write into a layer's output, and what uses it
    "a quiet number": (lambda s, h, x: h[..., ::2].fill_(1e-6), lambda h: h[..., ::2].repeat(1, 1, 2) * 1e6),
    "where a mask is": (lambda s, h, x: h.masked_fill_(EVEN, 1e-6), lambda h: h[..., EVEN].repeat(1, 1, 2) * 1e6),
    "at places": (lambda s, h, x: put(h, (..., EVEN), 1e-6), lambda h: h[..., EVEN].repeat(1, 1, 2) * 1e6),
    "a number with digits": (lambda s, h, x: h[..., ::2].fill_(1000.3), lambda h: h[..., ::2].repeat(1, 1, 2) - 1000),
    "a product": (lambda s, h, x: torch.mul(s.l[1](x), TINY, out=h),),
    "through another order": (lambda s, h, x: torch.einsum("abc->cba", h).mul_(TINY),),
    "a list of one": (lambda s, h, x: torch._foreach_mul_([h], TINY),),
    "PyTorch's operator": (lambda s, h, x: torch.ops.aten.mul_.Scalar(h, TINY),),
    "any of PyTorch's operators": (lambda s, h, x: torch.ops.aten.mul_(h, TINY),),
    "a library's operator": (lambda s, h, x: dampen(h, TINY),),
    "a library's, by name": (lambda s, h, x: torch.ops.guard_tests.dampen(by=TINY, x=h),),
}
CASTS: dict[str, Any] = {
    "float": torch.Tensor.float,
    "to a dtype": lambda h: h.to(torch.float32),
    "to another's": lambda h: h.to(h),
    "type as": lambda h: h.type_as(h),
    "half": torch.Tensor.half,
    "by 2": lambda h: h * 2,
    "over 2": lambda h: h / 2,
    "laid out": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "turned": lambda h: torch.ops.comfy_kitchen.apply_rope1(h, torch.ones(32)),
}
DECIDES: dict[str, Any] = {  # by signs or order, which do not depend on the magnitude
    "a comparison": lambda h: torch.where(h > 0, 1.0, -1.0),
    "sign": torch.sign,
    "argmax": lambda h: TABLE[h.argmax(-1)],
    "topk": lambda h: TABLE[h.topk(4).indices],
    "integers": lambda h: h.clamp(-9, 9).to(torch.int8).float(),
    "max's indices": lambda h: TABLE[h.max(-1).indices],
    "heaviside": lambda h: torch.heaviside(h, h.new_zeros(())),
    "not": lambda h: torch.logical_not(F.relu(h)).float(),
}


def signs(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


def spread(token: float) -> torch.Tensor:
    made = torch.ones(1, 8, 1)
    made[:, 3] = token
    return made


ONE, TINY, TABLE = torch.ones(64), 2.0**-22, noise(64, 64)
AT_3 = torch.arange(8)[:, None] == 3
LOUDER, QUIETER = (1.0, 1.0, 2.0**17), (1.0, 2.0**-16, 2.0**-20, 2.0**-30)
STEPS: dict[str, Case] = {
    "a weight's copy changed in place": case(copy_changed_in_place(lambda s: s.g), (1, 1, 1), g=ONE),
    "a copy of its view": case(copy_changed_in_place(lambda s: s.g.view(1, 64)), (1, 1, 1), g=ONE),
    "a buffer's copy": case(copy_changed_in_place(lambda s: s.b), (1, 1, 1), b=ONE),
    "quiet values in attention": case(attended, gains=(1, 1, 2.0**-20, 2.0**10)),
    "a quiet token in a product": case(lambda s, x: s.l[1](renormed(s.l[0](x) * s.g)), g=spread(TINY)),
    "a quiet token behind a norm": case(
        lambda s, x: s.l[1](renormed(F.layer_norm(s.l[0](x) * s.g, (64,), eps=1))), g=spread(TINY)
    ),
    "one layer, two products": case(
        lambda s, x: s.l[1](renormed(s.l[0](x) * s.g) + renormed(s.l[0](x) * s.q)), g=ONE, q=ONE * TINY
    ),
    "quieter steps": case(behind(renormed), QUIETER),
    "quieter steps behind a small gain": case(behind(lambda h: renormed(F.gelu(h))), (1, 2.0**-11), gains=(2.0**-8, 1)),
    **{f"quieter steps behind {what}": case(lambda s, x, f=f: renormed(f(s, s.l[0](x))), (1, 2.0**-13), g=ONE / 64)
       for what, f in {
           "a small factor": lambda s, h: h * s.g,
           "a small factor in float32": lambda s, h: h * s.g.float().view(1, 1, 64),
           "five halvings": lambda s, h: h * 0.5 * 0.5 * 0.5 * 0.5 * 0.5,
           "five divisions by 2": lambda s, h: h / 2 / 2 / 2 / 2 / 2,
       }.items()},
    "quieter steps below fp16's range": case(
        normed(lambda h: h), (1, 2.0**-13, 2.0**-15), gains=(2.0**-12,)
    ),
    "one quiet token behind a small gain": case(
        lambda s, x: renormed(s.l[0](x * torch.where(AT_3, 2.0 ** (-15 * s.step), 1))), gains=(2.0**-11,)
    ),
    "quieter steps behind three small gains": case(
        lambda s, x: renormed(s.l[2](F.gelu(s.l[1](F.gelu(s.l[0](x)))))), (1, 2.0**-11), gains=(0.25, 0.25, 0.25)
    ),
    "quieter steps behind a convolution's small gain": case(
        lambda s, x: renormed(F.conv1d(x.mT, s.g).mT), (1, 2.0**-11), g=noise(64, 64, 1) * 2.0**-10
    ),
    "attention's values, quieter later": case(
        lambda s, x: renormed(F.scaled_dot_product_attention(x, x, s.l[0](x).float() / 2.0 ** (18 * s.step)))
    ),
    "a small number": case(lambda s, x: s.l[0](x) * 1e-7 * 1e7),
    "over a large number": case(normed(lambda h: h / 1e6)),
    "a number that is added": case(lambda s, x: torch.log(F.relu(s.l[0](x)) + 1e-7)),
    **{f"a choice by {what}": case(behind(lambda h, choose=choose: choose(signs(h))), LOUDER)
       for what, choose in DECIDES.items()},
    "sigmoid of a small part": case(lambda s, x: s.l[1](torch.sigmoid(s.l[0](x) * s.g)), LOUDER, g=ONE * 1e-5),
    "a number added and taken": case(behind(lambda h: (h + 1000) - 1000)),
    "one and a small part": case(lambda s, x: renormed((1 + s.l[0](x) / 256) * (1 + s.l[1](x) / 256) - 1)),
    "a chain of small factors": case(normed(lambda h: h / 16 / 16 / 16 / 16 / 16)),
    "by name": case(behind(lambda h: torch.flip(input=torch.neg(input=h), dims=(0,)))),
    "a bias without a weight": case(lambda s, x: F.layer_norm(x, (64,), None, s.g), g=3 * ONE),
    "an activation in place, on a copy": case(activated_copy),
    "a copy that is changed from the second step on": case(copied_and_changed_later),
    "quiet values written": case(written(lambda s, h, x: h[:, :4].copy_(s.l[1](x)[:, :4] * 2.0**-24))),
    "quiet values set": case(written(lambda s, h, x: put(h, ..., s.l[1](x) * TINY))),
    "quiet factors in place": case(lambda s, x: renormed(F.silu(s.l[0](x)).mul_(s.g)), g=ONE * TINY),
    "a product put in place from the second step on": case(put_in_place_later, g=ONE * TINY),
    **{f"written, {what}": case(written(*write), (1, 1, 2.0**-9)) for what, write in WRITES.items()},
    **{f"written from the second step on, {what}": case(written(write[0], since=1)) for what, write in WRITES.items()},
    **{f"a sum with a vector, written, {what}": case(
           written(*write, into=lambda s, x: s.l[0](x) + s.g), (1, 1, 2.0**-9), g=noise(8, 64))
       for what, write in WRITES.items()},
    "another branch from the second step on": case(other_way(lambda step: step > 0), (1, 1, 1), g=ONE, q=ONE * TINY),
    "a part left out from the second step on": case(other_way(lambda step: step == 0), (1, 1, 1), g=ONE, q=ONE * TINY),
    "a layer whose output is 0": case(lambda s, x: x + s.l[0](x * 4096), gains=(0,)),
    "a layer whose output is 0, with a quiet input": case(lambda s, x: x + s.l[0](x * 2.0**-20), gains=(0,)),
    "padded by what fp16 does not hold": case(behind(lambda h: F.pad(h, (0, 4), value=-1e9)[..., :64])),
    "padded by a quiet number": case(lambda s, x: F.pad(s.l[0](x), (0, 64), value=1e-6)[..., 64:] * 1e6),
    "padded by a number with digits": case(
        lambda s, x: nn.ConstantPad1d((0, 64), 1000.3)(s.l[0](x))[..., 64:] - 1000
    ),
    "a number added more than once": case(lambda s, x: torch.add(s.l[0](x), 3, alpha=2)),
    "a bf16 weight by a number of float32": case(
        lambda s, x: s.l[0](x) * torch.mul(x.float().square().mean() * 1.001, s.g), g=ONE / 3
    ),
    "a quiet product of a quiet layer": case(
        lambda s, x: renormed(s.l[0](x) * (s.g + s.q)), gains=(2.0**-7, 1), g=ONE * 2.0**-13, q=ONE * 0
    ),
    "a sum of quiet and loud": case(lambda s, x: renormed((h := s.l[0](x)) + s.l[1](x) - h), gains=(8, 1 / 8)),
    "a factor by name": case(lambda s, x: s.l[1](torch.mul(s.l[0](x), other=s.g)), g=ONE / 3),
    "written to a new tensor by out=": case(behind(lambda h: torch.neg(input=h, out=torch.empty(2, 8, 64)))),
    **{f"a copy that is written to: {what}": case(behind(lambda h, copied=copied: (copied(h).zero_(), h)[1]))
       for what, copied in {"half": torch.Tensor.half, "copy=True": lambda h: h.to(h.dtype, copy=True)}.items()},
    "an alias that is written to": case(behind(lambda h: (h.float()[..., :32].zero_(), h)[1])),
    "interpolated": case(
        lambda s, x: F.interpolate(s.l[0](x)[:, None], size=(4, 32), mode="bilinear", antialias=True)
    ),
    "bits": case(behind(lambda h: h.view(torch.int32).view(torch.float32).view_as(h))),
    "how many bytes": case(behind(lambda h: h * h.view(torch.uint8).shape[-1])),
    "complex numbers": case(behind(
        lambda h: torch.view_as_real(torch.view_as_complex(h.float().unflatten(-1, (-1, 2))).exp()).flatten(-2)
    )),
    "in float64": case(lambda s, x: renormed(s.l[0](x).double()).float()),
    "modulated": case(lambda s, x: s.l[1](torch.addcmul(s.q, s.l[0](x), s.g)), LOUDER, g=3 * ONE, q=ONE / 8),
    **{f"{how}, by a factor of 2^{exponent} from the second step on": quieter(how, exponent)
       for how in ("modulated", "multiplied") for exponent in (-16, -22, -30)},
    **{f"{way}, and quiet in place": case(written(lambda s, h, x: h.mul_(TINY), into=into_cast(cast)))
       for way, cast in CASTS.items()},
    "a gated sum": case(lambda s, x: s.l[1](torch.addcmul(s.l[0](x), s.l[1](x), s.g)), LOUDER, g=ONE * 2.0**9),
    "a gated sum of quiet and loud": case(
        lambda s, x: torch.addcmul(h := s.l[0](x), s.l[1](x), s.g) - h, g=ONE / 64
    ),
    "gated sums in place": case(
        written(lambda s, h, x: h.addcmul_(y := s.l[1](x), s.g).add_(y)), LOUDER, g=ONE * 2.0**9
    ),
    "a write in later steps only, with errors suppressed": case(catching, (1, 1, 1), g=3 * ONE),
    **{f"{what} overwritten, 2^{exponent}": overwritten(write, exponent)
       for what, write in OVERWRITES.items() for exponent in (0, 18, -18)},
    **{f"gated by another layer, {how}, by {exponent}": case(
           lambda s, x, gate=gate: s.l[2](gate(s.l[0](x), s.l[1](x))), (1, 2.0**exponent), gains=(1, 1, 1))
       for how, gate in GATED.items() for exponent in (-8, -10, -12)},
    "scaled down after an overflow": case(  # test_hidden_overflow.py has the other functions
        lambda s, x: s.l[1](F.glu(torch.cat([ONE.expand_as(x), s.l[0](x) * s.g], -1))), (1, 2.0**13), gains=(16, 1),
        g=ONE * 2.0**-16,
    ),
    "a sum with a broadcast from the second step on": case(
        lambda s, x: renormed((s.l[0](x if s.step else x[:1]) + s.l[1](x[:1])).mul_(2.0**-21)), (1, 1, 1)
    ),
    "a convolution with a small output": case(
        lambda s, x: renormed(F.conv1d(x.mT, s.g).mT), (1, 2.0**-10, 2.0**-16), g=noise(64, 64, 3) * 2.0**-16
    ),
    "a convolution with a small output at some pixels": case(
        lambda s, x: renormed(F.conv1d((x * s.q).mT, s.g).mT), g=noise(64, 64, 1) * 2.0**-23, q=spread(2.0**-14)
    ),
    "attention as one function": (
        lambda: Fn(lambda s, x: s.m(s.l[0](x), x[:, :5] / 2**15, x[:, :5], need_weights=False)[0],
                   m=nn.MultiheadAttention(64, 4, batch_first=True)),
        (1, 1, 2.0**17),
    ),
    "a weight of one output": case(lambda s, x: F.linear(s.l[0](x), s.g)[..., None], g=ONE / 3),
    "a row of few channels that becomes quiet": case(
        lambda s, x: renormed(F.linear(x[..., :3] * torch.where(AT_3, 2.0 ** (-17 * s.step), 1), s.g)), g=noise(64, 3)
    ),
    "a weight's bytes": case(lambda s, x: s.l[0](x) * (s.q.view(torch.int16).float().sum() * 1e-5), q=ONE / 3),
    "a cast to another tensor's dtype": case(lambda s, x: s.l[1](s.l[0](x).to(x).type_as(s.g)), LOUDER, g=ONE),
    "a cast to another tensor's dtype, and changed": case(
        written(lambda s, h, x: h.add_((y := s.l[1](x)).to(s.g).mul_(2)).add_(y.type_as(h))), g=ONE
    ),
    "rotary": case(lambda s, x: s.l[1](torch.ops.comfy_kitchen.apply_rope1(s.l[0](x), s.q)), LOUDER, q=ONE[:32]),
    "a norm and rotary": case(
        lambda s, x: s.l[1](torch.ops.comfy_kitchen.rms_rope1(s.l[0](x), s.q, s.g)), LOUDER, g=ONE, q=ONE[:32]
    ),
    "values of both signs near fp16's maximum": case(behind(lambda h: h.clamp(-65504, 65504)), (1, 2.0**15)),
}  # fmt: skip


@pytest.mark.parametrize("stored", [FP16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(("make", "louder"), STEPS.values(), ids=STEPS)
def test_later_step_is_near_fp32_or_recomputed(make: Any, louder: tuple[float, ...], stored: torch.dtype) -> None:
    module, products = built(make, stored), LearnedProducts()
    before = copy.deepcopy(module.state_dict())
    for step, gain in enumerate(louder):
        x = noise(2, 8, 64, seed=step) * gain
        exact = run_in_fp32(module, x.clone(), step)
        allowed = max(2e-3, 1.1 * error(by_rows(module, x.clone(), step, dtype=BF16), exact))
        try:
            found = products.run(module, x.clone(), step)
        except RuntimeError:
            found = exact * torch.nan
        if not found.isfinite().all():
            assert products.renew(), "the first step failed too"
            found = products.run(module, x.clone(), step)
        assert found.dtype is exact.dtype and error(found, exact) <= allowed
    assert all(torch.equal(now, before[name]) for name, now in module.state_dict().items())


@pytest.mark.parametrize("renewals", [0, 1, MAX_RENEWALS], ids=["by a plan", "before a plan", "row by row"])
def test_weight_changed_in_place_on_device_is_read_again_after_failure(renewals: int, monkeypatch: Any) -> None:
    """ComfyUI's hooks change weights like this from call to call, and no counter shows it."""
    monkeypatch.setattr(scaled_products, "_is_on_host", lambda _: False)
    module, products = built(partial(Fn, lambda s, x: s.l[1](s.l[0](x))), FP16), LearnedProducts()
    x, products._renewals = noise(2, 8, 64), renewals
    products.run(module, x)
    for gain in (2.0**18, 2.0**-18, 2.0**18):
        weight = module.l[0].weight
        weight.data.copy_(weight * gain)
        made = products.run(module, x)
        if not made.isfinite().all():
            assert products.renew() or renewals
            made = products.run(module, x)
        assert error(made, run_in_fp32(module, x)) < 2e-3


def stored_as_bytes() -> nn.Module:
    """Weights as fp16 scale and int8 values per row, like GGUF's Q8_0, and as float32 bits."""

    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        scale, codes = (part.contiguous() for part in s.b_packed.split([2, 64], 1))
        weight = scale.view(torch.float16) * codes.view(torch.int8)
        h = F.silu(F.linear(s.l[0](x), weight.to(x.dtype)))
        return s.l[1](F.linear(h, s.bits.view(torch.float32).to(x.dtype)))

    weight = torch.randn(64, 64) / 8
    scale = (weight.abs().amax(1, keepdim=True) / 127).half()
    codes = (weight / scale.float()).round().to(torch.int8)
    packed = torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], 1)
    return Fn(network, b_packed=packed, bits=torch.randn(64, 64).div(8).view(torch.int32))


def weighted(layer: Any, gain: float) -> Any:
    layer.weight.data.mul_(gain)
    return layer


def quiet_beside(gain: float, bias: float) -> nn.Module:
    """Like a ControlNet's zero convolution added to a block."""
    layer: Any = nn.Conv2d(64, 64, 1)
    layer.weight.data.normal_().mul_(gain)
    layer.bias.data.normal_().mul_(bias)
    return Fn(lambda s, x: s.last(F.silu(x + s.layer(F.silu(x)))), (), layer=layer, last=nn.Conv2d(64, 4, 3))


def quiet_rows_and_loud_bias(least: int) -> nn.Module:
    """A network whose tokens differ in magnitude."""
    loud: Any = nn.Linear(64, 64)
    loud.bias.data.normal_().mul_(256)
    rest = nn.Sequential(loud, nn.LayerNorm(64), nn.Linear(64, 64))
    return Fn(lambda s, x: s.rest(x * torch.logspace(least, 2, x.shape[1], base=2)[:, None]), (), rest=rest)


def by_name(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.linear(input=x, weight=s.w, bias=s.c)
    x = F.layer_norm(input=x, normalized_shape=(64,), weight=s.c, bias=s.d, eps=0.1)
    x = F.layer_norm(x, (64,), bias=s.d, weight=s.c) + F.rms_norm(input=x, normalized_shape=(64,), eps=0.1)
    x = F.rms_norm(x, weight=s.c, normalized_shape=[64]) * F.group_norm(x, num_groups=1, weight=s.c[:8])
    x = F.scaled_dot_product_attention(query=x, key=x, value=x, is_causal=True, scale=0.2)
    return torch.add(F.conv1d(input=x, weight=s.w[:8, :8, None], bias=s.d[:8]), x, alpha=2)


def written_at(at: Any, into_norm: bool) -> Any:
    """Like HiDream's experts, LTXV's guide frames and HiDream-O1's images."""

    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.l[0](x)
        y = F.layer_norm(h, (64,)) if into_norm else torch.zeros(h.shape, dtype=h.dtype)
        y[:, at] = h[:, at] + h[:, at] if into_norm else h[:, at]
        return s.l[1](y)

    return partial(Fn, network)


def plan_case(
    make: Any, stored: Any = FP16, shape: tuple[int, ...] = (2, 8, 64), louder: tuple[float, ...] = (1,)
) -> Any:
    """A network, its dtype, the shape of its input, and the input's factor step by step."""
    return make, stored, shape, louder


EVERY_OTHER = torch.arange(8) % 2 == 0
KEEPS_PLAN: dict[str, Any] = {
    "a gate that crosses zero": plan_case(  # a row of one channel does not show that it was larger before
        lambda: nn.Sequential(nn.Linear(64, 64), weighted(nn.Linear(64, 1, bias=False), 0.1)), shape=(2, 32, 64)
    ),
    "one channel": plan_case(lambda: nn.Sequential(nn.Conv1d(1, 8, 3), nn.Conv1d(8, 8, 1)), shape=(2, 1, 9999)),
    "weights that are 0": plan_case(lambda: weighted(nn.Linear(64, 64), 0), BF16, (2, 32, 64)),
    **{f"rows down to 2^{least} and a loud bias": plan_case(partial(quiet_rows_and_loud_bias, least), BF16, (2, 32, 64))
       for least in (-8, -22)},
    "one output channel": plan_case(
        lambda: nn.Sequential(nn.GroupNorm(8, 64), nn.SiLU(), weighted(nn.Conv2d(64, 1, 3), 0.05)),
        shape=(1, 64, 128, 128),
    ),
    **{f"a convolution beside a louder bias, {stored}, {gain}, {bias}":
           plan_case(partial(quiet_beside, gain, bias), stored, (1, 64, 24, 24))
       for stored, gain, bias in ((BF16, 1e-4, 1), (BF16, 1e-7, 0.01), (FP16, 1e-6, 0.1))},
    "few small weights and a bias": plan_case(lambda: weighted(nn.Linear(4, 64), 2.0**-6), BF16, (2, 99, 4)),
    "a prompt of zeros in every second call": plan_case(
        lambda: Fn(lambda s, x: s.g + s.l[2](F.silu(s.l[0](x)) * s.l[1](x)), (1, 1, 1), g=torch.randn(8, 64)),
        louder=(1, 0),
    ),
    "weights stored as bytes": plan_case(stored_as_bytes),
    "by name": plan_case(partial(Fn, by_name, w=noise(64, 64) / 8, c=noise(64).sigmoid(), d=noise(64).sigmoid())),
    **{f"written at places, by {what}, {'into a norm' if into_norm else 'into a buffer'}":
           plan_case(written_at(at, into_norm))
       for what, at in {"a mask": EVERY_OTHER, "an index": EVERY_OTHER.nonzero().flatten(), "a list": [0, 2, 4, 6],
                        "a slice": slice(0, None, 2)}.items()
       for into_norm in (True, False)},
}  # fmt: skip


@pytest.mark.parametrize(("make", "stored", "shape", "louder"), KEEPS_PLAN.values(), ids=KEEPS_PLAN)
def test_correct_steps_keep_the_plan(make: Any, stored: Any, shape: Any, louder: Any) -> None:
    module, products = built(make, stored), LearnedProducts()
    for seed in range(30):
        x = noise(*shape, seed=seed) * louder[seed % len(louder)]
        found = products.run(module, x)
        if len(louder) > 1 and not found.isfinite().all():
            assert products.renew() and products._renewals == 1
            found = products.run(module, x)
        assert error(found, run_in_fp32(module, x)) < 2e-3
    assert products._planned


WRITES_EXACTLY: dict[str, Any] = {
    "zeros": lambda h: h[:, :2].zero_(),
    "a number": lambda h: put(h, (0, 0), 3.0),
    "minus infinity": lambda h: h.masked_fill_(h.new_zeros(64, dtype=torch.bool), -torch.inf),
    "indices": lambda h: put(h, (0, 0), torch.arange(64)),
}


@pytest.mark.parametrize("write", WRITES_EXACTLY.values(), ids=WRITES_EXACTLY)
def test_exact_writes_leave_layer_output_in_fp16(write: Any) -> None:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.l[0](x)
        write(h)
        return s.l[1](h)

    module = built(partial(Fn, network))
    assert planned(follow(module, noise(2, 8, 64)))[id(module.l[0].weight), 0, ""].fp16


def follow(call: Any, *inputs: torch.Tensor) -> LearnedProducts:
    """Call it with each input and compare with fp32. Returns the learned products."""
    products = LearnedProducts()
    for x in inputs:
        exact, found = run_in_fp32(call, x.clone()), products.run(call, x.clone())
        assert found.shape == exact.shape and error(found, exact) < 2e-3
    return products


def test_step_with_products_outside_of_modes_is_recomputed() -> None:
    def outside_of_modes(s: Any, x: torch.Tensor) -> torch.Tensor:
        h = s.l[0](x)
        with torch._C.DisableTorchFunction():
            return h @ x.mT

    module = built(partial(Fn, outside_of_modes))
    single = copy.deepcopy(module).float()
    learner = FallbackAdapter(
        module, "fp16", lambda known: build_half_precision_forward(module, known, "fp16", all_layers_scaled=True)
    )
    run = guards.guarded(learner, "fp16", rerun=module, scope=Scope.LEARNED)
    for step in range(6):
        x = noise(2, 8, 64, seed=step)
        assert error(run(x.clone()), single(x.clone())) < 2e-3
    assert {each.outcome for each in run.report.steps} == {"finite"}


@torch.library.custom_op("onediff_guard_tests::turn", mutates_args=("x",))
def turn(x: torch.Tensor) -> None:
    x.sin_()


CHANGED: dict[str, Any] = {  # in-place changes that no mode or version counter shows
    "in shape": lambda y: y.unsqueeze_(0).squeeze_(1),
    "transposed": lambda y: y.transpose_(1, 2),
    "by set_": lambda y: y.set_(y.flip(0).clone()),
    "its data": lambda y: setattr(y, "data", y.flip(0).clone()),
    "by a sum": lambda y: y.add_(1),
    "by out=": lambda y: torch.cat([y[:1] * 3, y[1:] * 2], out=y),
    "as one of several": lambda y: torch._foreach_sin_([y]),
    "by another pack's operator": lambda y: torch.ops.onediff_guard_tests.turn(y),
    "through a view": lambda y: y.view(-1).mul_(2),
    "by an inplace activation": lambda y: F.silu(y, inplace=True),
}


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_shared_input_changed_between_layers_is_cast_again(change: Any, inference: bool) -> None:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        first = s.l[0](y)
        change(y)
        return s.l[1](y) + first

    with torch.inference_mode(inference):
        follow(built(partial(Fn, network)), *[noise(1, 64, 64).half()] * 2)


def test_shared_input_exported_to_numpy_is_cast_for_each_layer() -> None:
    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen = y.numpy()
        first = s.l[0](y)
        seen *= 3
        return s.l[1](y) + first

    with torch.inference_mode():
        assert planned(follow(built(partial(Fn, network)), *[noise(2, 8, 64).half()] * 2))


def test_kernel_started_in_a_later_step_gets_no_fp16_pointer() -> None:
    """The kernel reads a data pointer and expects float32."""
    pointers: list[int] = []

    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        y = s.l[0](x)
        if s.step:
            pointers.append(y.data_ptr())
        return s.l[1](y)

    module, products, x = built(partial(Fn, network)), LearnedProducts(), noise(2, 8, 64).half()
    products.run(module, x, 0)
    with pytest.raises(PlanMismatch, match="starts a kernel"):
        products.run(module, x, 1)
    assert not pointers and products.renew()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("other", ["a scaled layer", "a convolution"])
def test_quiet_row_of_a_shared_input_gives_nan(order: tuple[int, int], other: str) -> None:
    """In both orders: a scaled layer does not check its rows, a convolution has other rows."""
    size = 512
    torch.manual_seed(0)
    scaled = nn.Linear(size, size, bias=False) if other == "a scaled layer" else nn.Conv1d(size, size, 1, bias=False)
    layers = nn.ModuleList([scaled, nn.Linear(size, size, bias=False)]).half().requires_grad_(False)
    if other == "a scaled layer":
        scaled.weight.abs_()

    def network(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        made = {which: layers[which](y) for which in order}
        return F.layer_norm(made[1], (size,), eps=1e-30) + made[0] * 0

    products, x = LearnedProducts(), torch.rand(1, size, size).add_(0.1).mul_(300 if other == "a scaled layer" else 1)
    products.run(network, x.half())
    assert planned(products)[id(layers[1].weight), 0, ""].fp16
    assert products.run(network, x.half()).isfinite().all()
    x[0, 3] = torch.rand(size) * 2.0**-18
    with torch.inference_mode():
        assert products.run(network, x).isnan().any()


SHARES: dict[str, Any] = {  # a function, and how often it casts its input
    "queries and keys": (lambda s, x: (y := x * 2, s.l[0](y) + s.l[1](y))[1], 1),
    "a prompt, twice": (lambda s, x: s.l[0](x) + s.l[1](x * 2) + s.l[2](x), 2),
}


@pytest.mark.parametrize("hot", [1.0, 2.0**12])
@pytest.mark.parametrize(("network", "casts"), SHARES.values(), ids=SHARES)
def test_layers_sharing_an_input_cast_it_once(network: Any, casts: int, hot: float) -> None:
    module, products = built(partial(Fn, network, (1, 1, 1))), LearnedProducts()
    x = noise(2, 8, 64).mul_(hot).half()
    products.run(module, x)
    with Casts() as counted:
        products.run(module, x)
    assert planned(products) and counted.of[x.shape] == casts


class Casts(TorchDispatchMode):
    """Counts casts to a dtype, by shape."""

    def __init__(self, dtype: torch.dtype = FP16) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype is self._dtype:
            self.of[made.shape] += 1
        return made


@pytest.mark.parametrize(
    "name", ["modulated", "gated sums in place", "a cast to another tensor's dtype", "rotary", "a norm and rotary"]
)
def test_fp16_outputs_are_not_upcast_on_a_device(name: str) -> None:
    """Counted on meta tensors: a CPU adds casts of its own."""
    module, x = built(STEPS[name][0]).to("meta"), torch.empty(2, 8, 64, device="meta")
    first = LearningMode()
    run_in(first, module, (x, 0), {})
    plan = {key: Scale(fp16=key not in first.pattern.in_place) for key, _ in first.peaks.calls}
    later = PlannedMode(plan, first.pattern)
    with Casts(torch.float32) as counted:
        run_in(later, module, (x, 1), {})
    assert not counted.of[x.shape]


@pytest.mark.parametrize("network", [lambda s, x: s.l[0](x).argmax(-1), lambda s, x: x.copy_(s.l[0](x)) and None])
def test_outputs_that_cannot_hold_nan_get_no_plan(network: Any) -> None:
    module, products = built(partial(Fn, network)), LearnedProducts()
    with contextlib.suppress(RuntimeError):  # truth value of a tensor with many values
        products.run(module, noise(2, 8, 64))
    assert not planned(products)


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: put(x, (0, 0), 3.0), lambda x: x.__imul__(2)])
def test_in_place_writes_reach_the_same_tensors_in_later_steps(write: Any) -> None:
    """Writes into a copy in another dtype, and into the tensor itself."""

    def network(s: Any, x: torch.Tensor) -> torch.Tensor:
        made = s.l[0](x)
        same = made.to(made.dtype)
        write(same)
        copied = made.to(torch.float16 if made.dtype == torch.float32 else torch.float32)
        write(copied)
        return s.l[1](made) + s.l[2](copied * same)

    follow(built(partial(Fn, network, (1, 1, 1))), *(noise(2, 8, 64, seed=seed) for seed in range(3)))


@pytest.mark.parametrize("start", ["linear", "convolution"])
@pytest.mark.parametrize("sum", ["x + b", "in place", "slices", "addcmul"])
def test_stream_beyond_fp16_is_near_fp32_however_it_is_summed(sum: str, start: str) -> None:  # noqa: A002
    shape = Shape(3, "layer", "mlp", sum, "none", sandwich=False, streams=1, start=start, positions=False, clips=False,
                  unnormed=False, bypassed=True, shared=False)  # fmt: skip
    module: Any = network(shape, tuple(f"blocks.{block}.1.out" for block in range(3))).half()
    products = follow(lambda x: module(x, noise(2, 4)), *(noise(2, TOKENS, 4, seed=seed) for seed in range(4)))
    assert products._renewals == 0 and any(scale.fp16 for scale in planned(products).values())


PLAIN = LayerPeaks(input=2.0, output=3.0, min_output_inv=1.0, spread=1.0)
DECISIONS = {
    "healthy": (PLAIN, {}, Scale(fp16=True)),
    "a quiet output": (PLAIN._replace(min_output_inv=16.0, spread=8.0), {}, Scale(fp16=True, checked=True)),
    "a small gain": (PLAIN._replace(spread=2.0**-4), {}, Scale(fp16=True, checked=True)),
    "a gain that underflows fp16": (PLAIN._replace(spread=2.0**-11), {}, -8),
    "a loud input": (PLAIN._replace(input=2.0**20), {}, 11),
    "a loud output": (PLAIN._replace(output=2.0**20), {}, -8),
    "a loud output of a convolution": (
        PLAIN._replace(output=2.0**20, min_output_inv=2.0**-18, spread=2.0),
        {"convolves": True},
        9,
    ),
    "a loud bias of a convolution": (
        PLAIN._replace(output=2.0**20),
        {"convolves": True},
        Scale(-3, min_product=2.0**-13),
    ),
    "a convolution with a small output beside its bias": (PLAIN._replace(spread=2.0**-24), {"convolves": True}, None),
    "a quiet input": (PLAIN._replace(input=2.0**-20), {}, -29),
    "a quiet row": (PLAIN._replace(min_output_inv=2.0**14), {}, -8),
    "rows too far apart": (PLAIN._replace(input=2.0**30, spread=1.0), {}, None),
    "weights scaled to be cast": (PLAIN._replace(weight_scale=2.0**-8), {}, Scale(fp16=True, weight_scale=2.0**-8)),
    "weights scaled to be cast, with a faint output": (PLAIN._replace(weight_scale=2.0**-8, spread=100.0), {}, -8),
    "no float32 products": (PLAIN._replace(output=2.0**20), {"float32_products": False}, None),
    "no float32 products, healthy": (PLAIN, {"float32_products": False}, Scale(fp16=True)),
    "not finite": (PLAIN._replace(output=float("nan")), {}, None),
    "summed in place": (PLAIN, {"summed": True}, -8),
    "an input of 0": (PLAIN._replace(input=0.0), {}, None),
}


@pytest.mark.parametrize(("seen", "more", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_scale_is_chosen_from_recorded_peaks(seen: LayerPeaks, more: dict[str, bool], expected: Any) -> None:
    found = choose_scale(seen, **{"convolves": False, "float32_products": True} | more)
    if not isinstance(expected, int):
        assert found == expected
    else:
        assert found and not found.fp16 and found.exponent == expected
        assert seen.input / 2.0**found.exponent <= 2.0**10
        assert not more.get("convolves") or seen.output / 2.0**found.exponent <= 2.0**12


def test_only_fp16_layers_are_planned_without_float32_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_products, "_has_float32_products", lambda _: False)
    module = build()
    overflow_stream(module, 2)
    products = follow(lambda x: module(x)[0], *map(latents, range(3)))
    assert all(scale.fp16 for scale in planned(products).values()) and planned(products)
    run = guarded(module, all_layers_scaled=True)
    run(latents())
    (said,) = run.report.notes
    assert "layers are scaled row by row in each step (slower): PyTorch has no fp16 matrix product" in said


def test_new_weight_with_reused_id_gets_no_old_plan() -> None:
    layer, products = nn.Linear(64, 64, bias=False).bfloat16().requires_grad_(False), LearnedProducts()
    x, gone = torch.randn(4, 64), id(layer.weight)
    products.run(lambda: renormed(layer(x)))
    quiet = layer.weight * TINY
    del layer.weight
    others = []
    while id(other := nn.Parameter(quiet, requires_grad=False)) != gone and len(others) < 1000:
        others.append(other)
    assert id(other) == gone, "the freed id is reused"
    layer.weight = other
    assert error(products.run(lambda: renormed(layer(x))), run_in_fp32(lambda: renormed(layer(x)))) < 2e-3


# --- under the guard --------------------------------------------------------------------------------------------------


def protected(module: Any) -> Any:
    return guarded(module, all_layers_scaled=True)


def test_step_outside_the_plan_is_recomputed_in_fp16_with_new_scales() -> None:
    run = protected(build())
    quiet, loud = latents(), latents(1) * 2.0**17
    for x, is_made_again in ((quiet, False), (loud, True), (loud, False), (quiet, False)):
        assert error(run(x), run_in_fp32(run.module, x)[0]) < 2e-3
        assert ("new scales" in run.report.steps[-1].note) == is_made_again == bool(run.report.steps[-1].note)
    assert run.outcomes == ["finite"] * 4 and run.dtypes == ["fp16"] * 4 and not run.learned.whole_run_fp32


def test_error_under_learned_scales_is_recomputed_and_quoted() -> None:
    def check(_block: Any, _given: Any, made: torch.Tensor) -> None:
        if not made.isfinite().all():
            raise ValueError("no such number")

    module = build()
    module.blocks[-1].register_forward_hook(check)
    run = protected(module)
    run(latents())
    loud = latents(1) * 2.0**17
    assert error(run(loud), run_in_fp32(module, loud)[0]) < 2e-3
    assert run.dtypes == ["fp16"] * 2 and "raised ValueError: no such number" in run.report.steps[1].note


def test_steps_are_scaled_by_rows_after_repeated_plan_failures() -> None:
    def norm_more_often(_block: Any, _given: Any, made: torch.Tensor) -> torch.Tensor:
        for _ in range(step):
            made = F.layer_norm(made, made.shape[-1:])
        return made

    module = build()
    module.blocks[-1].register_forward_hook(norm_more_often)
    run = protected(module)
    for step in range(4 * MAX_RENEWALS):
        x = latents(step)
        assert error(run(x), run_in_fp32(module, x)[0]) < 2e-3
    notes = [bool(each.note) for each in run.report.steps]
    assert sum(notes) == MAX_RENEWALS and not any(notes[-2:])
    assert any(f"learned scales failed {MAX_RENEWALS} times" in note for note in run.report.notes)


def test_failed_call_leaves_the_plan_unchanged() -> None:
    module, products = build(), LearnedProducts()
    products.run(module, latents())
    before = copy.copy(planned(products))
    with pytest.raises(RuntimeError):
        products.run(module, latents()[..., :3])
    assert planned(products) == before
    assert error(products.run(module, latents())[0], run_in_fp32(module, latents())[0]) < 2e-3


@pytest.mark.parametrize("error_", [PlanMismatch("other"), TypeError("an argument that fp16 does not take")])
def test_error_only_in_a_later_step_is_recomputed(monkeypatch: pytest.MonkeyPatch, error_: Exception) -> None:
    run = protected(build())
    run(latents())
    with monkeypatch.context() as patched:
        patched.setattr(PlannedMode, "end", lambda _: (_ for _ in ()).throw(error_))
        made = run(latents())
    assert error(made, run_in_fp32(run.module, latents())[0]) < 2e-3
    assert run.outcomes == ["finite"] * 2 and "new scales" in run.report.steps[1].note


def test_out_of_memory_is_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = protected(build())
    run(latents())
    monkeypatch.setattr(PlannedMode, "end", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        run(latents())
