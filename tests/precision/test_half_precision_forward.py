"""The half-precision attempt with all layers scaled, eager and compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocky import build, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision import after_failure
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from guards import error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL_LAYERS_SCALED = PrecisionOverrides(all_layers_scaled=True)


class Products(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **kwargs or {})


class Compiler:
    """A backend that counts its graphs and runs them unchanged."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = 0
        self.shells: dict[Hashable, Any] = {}
        self.inside: list[Any] = []

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward

    def compiled(self, half: nn.Module, key: Hashable, inside: Callable[[Any], Any] | None) -> Any:
        """Compile block by block in a shallow copy; one for each `key`."""
        self.inside.append(inside)
        if key not in self.shells:
            make: Any = inside or (lambda block: block)
            compile_all = lambda blocks: nn.ModuleList(torch.compile(make(b), backend=self) for b in blocks)  # noqa: E731
            self.shells[key] = replace_submodules(half, {"blocks": compile_all})
        return self.shells[key]


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("dtype", "known"), [("fp16", NOTHING), ("fp16", ALL_LAYERS_SCALED), ("bf16", ALL_LAYERS_SCALED)]
)
def test_all_layers_scaled_computes_only_products_in_half(dtype, known, is_compiled):
    """From the plan, or learned. bf16 is not compiled."""
    module, brought, compiler = build(dtype=dtype), [], Compiler()
    if dtype == "fp16":
        overflow_stream(module, 1)
        overflow_inside(module, 2)
    before, right = module.state_dict(keep_vars=True), copy.deepcopy(module).float()
    more = {"compiled": compiler.compiled, "blocks": [f"blocks.{index}" for index in range(4)]} if is_compiled else {}
    made = build_half_precision_forward(
        module,
        known,
        dtype,
        all_layers_scaled=known is NOTHING,
        onloaded=lambda *given: brought.append(given) or given[0],
        **more,
    )
    is_compiled = is_compiled and dtype == "fp16"
    assert made.all_layers_scaled and len(brought) == 1 + is_compiled, "weights are brought to the device"
    assert all(like is module for _, like in brought)
    for step in range(4):
        products, x = Products(), latents(step)
        allowed = 1e-3 if dtype == "fp16" else error(module(x.bfloat16())[0].float(), right(x)[0])
        with nullcontext() if step else products:  # no compiling inside this mode
            found = made.run(x)[0]
        assert found.dtype == torch.float32 and error(found, right(x)[0]) < allowed
        assert step or products.seen == {DTYPES[dtype]}
        assert error(made.eager(x)[0], right(x)[0]) < allowed
    assert bool(compiler.graphs) == is_compiled == bool(compiler.shells) and None not in compiler.inside
    assert all(module.state_dict(keep_vars=True)[name] is tensor for name, tensor in before.items())
    plain = build_half_precision_forward(module, NOTHING, dtype).run(latents().to(DTYPES[dtype]))[0]
    assert plain.isfinite().all() == (dtype == "bf16"), "plain fp16 overflows"


@pytest.mark.parametrize("tf32", [True, False])
def test_scaled_layers_use_tf32_as_the_rerun_does(monkeypatch, tf32):
    asked = []

    def seen(_products, part, x, *, tf32, **_more):
        asked.append(tf32)
        return part(x)

    monkeypatch.setattr(after_failure.LearnedProducts, "run", seen)
    monkeypatch.setattr(after_failure.LearnedProducts, "run_by_rows", seen)
    made = build_half_precision_forward(build(), ALL_LAYERS_SCALED, "fp16", tf32=tf32)
    for attempt in (made.run, made.eager):
        attempt(latents().half())
    assert asked == [tf32] * 2
