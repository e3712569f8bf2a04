"""The attempt as it is built: with every layer scaled, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocky import build, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision import fallback
from comfyui_onediff_guard.precision.fallback import build_half_precision_forward
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from guards import error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL_LAYERS_SCALED, HALF, SINGLE = PrecisionOverrides(all_layers_scaled=True), torch.float16, torch.float32


class Products(TorchDispatchMode):
    """The dtypes in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **kwargs or {})


class Compiler:
    """A backend that counts what it compiles, and runs it as it is."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = 0
        self.shells: dict[Hashable, Any] = {}
        self.inside: list[Any] = []

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward

    def compiled(self, half: nn.Module, what: Hashable, inside: Callable[[Any], Any] | None) -> Any:
        """Block by block, in a shell; one for each `what`."""
        self.inside.append(inside)
        if what not in self.shells:
            make: Any = inside or (lambda block: block)
            compile_all = lambda blocks: nn.ModuleList(torch.compile(make(b), backend=self) for b in blocks)  # noqa: E731
            self.shells[what] = replace_submodules(half, {"blocks": compile_all})
        return self.shells[what]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("planned", [True, False])
def test_with_every_layer_scaled_nothing_leaves_the_range_in_any_step(planned, is_compiled):
    module = build()
    overflow_stream(module, 1)
    overflow_inside(module, 2)
    before, brought, compiler = module.state_dict(keep_vars=True), [], Compiler()
    assert not build_half_precision_forward(module, NOTHING, "fp16").run(latents().half())[0].isfinite().all()
    known = NOTHING if planned else ALL_LAYERS_SCALED
    more = {"compiled": compiler.compiled, "blocks": [f"blocks.{index}" for index in range(4)]} if is_compiled else {}
    made = build_half_precision_forward(
        module,
        known,
        "fp16",
        all_layers_scaled=planned,
        onloaded=lambda *given: brought.append(given) or given[0],
        **more,
    )
    assert made.all_layers_scaled and len(brought) == 1 + is_compiled, "weights are brought to the device"
    assert all(like is module for _, like in brought)
    for step in range(4):
        products, x = Products(), latents(step)
        with nullcontext() if step else products:  # nothing is compiled under it
            found = made.run(x)[0]
        assert found.dtype == SINGLE and error(found, copy.deepcopy(module).float()(x)[0]) < 1e-3
        assert step or products.seen == {HALF}
    assert bool(compiler.graphs) == is_compiled == bool(compiler.shells) and None not in compiler.inside
    assert error(made.eager(latents())[0], copy.deepcopy(module).float()(latents())[0]) < 1e-3
    assert all(module.state_dict(keep_vars=True)[name] is tensor for name, tensor in before.items())


@pytest.mark.parametrize("is_compiled", [False, True])
def test_bf16_has_products_in_it_and_all_else_in_float32(is_compiled):
    module, products, x, compiler = build(dtype="bf16"), Products(), latents(), Compiler()
    more = {"compiled": compiler.compiled, "blocks": ["blocks.0"]} if is_compiled else {}
    made = build_half_precision_forward(module, ALL_LAYERS_SCALED, "bf16", **more)
    with products:
        found = made.run(x)[0]
    assert made.all_layers_scaled and products.seen == {torch.bfloat16} and not compiler.shells
    right, plain = copy.deepcopy(module).float()(x)[0], module(x.bfloat16())[0]
    assert found.dtype == SINGLE and error(found, right) < error(plain.float(), right)


@pytest.mark.parametrize("tf32", [True, False])
def test_what_is_float32_takes_tf32_where_the_rerun_does(monkeypatch, tf32):
    asked = []

    def seen(_products, part, x, *, tf32, **_more):
        asked.append(tf32)
        return part(x)

    monkeypatch.setattr(fallback.LearnedProducts, "run", seen)
    monkeypatch.setattr(fallback.LearnedProducts, "run_by_rows", seen)
    made = build_half_precision_forward(build(), ALL_LAYERS_SCALED, "fp16", tf32=tf32)
    for attempt in (made.run, made.eager):
        attempt(latents().half())
    assert asked == [tf32] * 2
