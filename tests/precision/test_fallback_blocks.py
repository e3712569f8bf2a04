"""Fallback blocks: some in fp32, the others half and compiled as they were. In fp16, every layer is scaled instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocky import Block, build, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision import fallback
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.fallback import build_half_precision_forward, with_fallback_blocks
from comfyui_onediff_guard.precision.overrides import NOTHING, PrecisionOverrides
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from guards import error
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL_LAYERS_SCALED, HALF, SINGLE = PrecisionOverrides(all_layers_scaled=True), torch.float16, torch.float32


def in_fp32(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(fp32_fallback_blocks=names, **more)


def only(module: nn.Module, name: str) -> Any:
    """The module's one part, as a fallback block."""
    return with_fallback_blocks(nn.ModuleDict({name: module}).half(), in_fp32(name), "fp16").get_submodule(name)


class Products(TorchDispatchMode):
    """The dtypes in which matrices are multiplied."""

    def __init__(self):
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.seen |= {arg.dtype for arg in args if isinstance(arg, torch.Tensor)}
        return func(*args, **kwargs or {})


def recorded(module: Any) -> dict[str, list[torch.dtype]]:
    """The dtypes that each block's inner layer is given from now on."""
    seen: dict[str, list[torch.dtype]] = {}
    for name, block in module.blocks.named_children():
        block.inner.register_forward_hook(
            lambda _, given, __, name=name: seen.setdefault(name, []).append(given[0].dtype)
        )
    return seen


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fallback_block_computes_in_fp32_and_everything_else_is_half(dtype):
    module, half, products = build(dtype=dtype), DTYPES[dtype], Products()
    shell: Any = with_fallback_blocks(module, in_fp32("blocks.1"), dtype)
    embedded = shell.embed(latents().to(half))
    with products:
        made = shell.blocks[1](embedded)
    expected = copy.deepcopy(module.blocks[1]).float()(embedded.float())
    assert made.dtype == half and made.is_contiguous() and torch.equal(made, expected.to(half))
    assert products.seen == {SINGLE}
    seen = recorded(module)
    assert shell(latents().to(half))[0].dtype == half
    assert seen == {name: [SINGLE if name == "1" else half] for name in ("0", "1", "2", "3")}


def test_the_original_is_untouched_and_weights_are_shared():
    module = build()
    before = {name: id(part) for name, part in module.named_modules()}
    values = {name: p.clone() for name, p in module.named_parameters()}
    shell = with_fallback_blocks(module, in_fp32("blocks.1", "out"), "fp16")
    shell(latents().half())
    assert {name: id(part) for name, part in module.named_modules()} == before
    assert all("forward" not in vars(part) for part in module.modules())
    assert all(torch.equal(values[name], p) and p.dtype == torch.float16 for name, p in module.named_parameters())
    assert {id(p) for p in shell.parameters()} == {id(p) for p in module.parameters()}
    assert list(shell.state_dict()) == list(module.state_dict()), "and under the same names"
    assert with_fallback_blocks(module, NOTHING, "fp16") is module


def test_a_fallback_block_says_and_knows_what_its_block_does():
    class Down(nn.Module):
        has_cross_attention = True

        def forward(self, x, *, scale, texts):
            return (x * scale).t().contiguous().t(), [texts, x.sum(-1), x.argmax(-1)], 7

    fallback_block = only(Down(), "down")
    assert fallback_block.has_cross_attention and isinstance(fallback_block, Down)
    x = torch.full((2, 4), 300.0).half()
    made, (texts, summed, index), number = fallback_block(x, scale=2.0, texts="a boat")
    assert (made.dtype, summed.dtype, texts, number) == (torch.float16, torch.float16, "a boat", 7)
    assert summed.tolist() == [1200.0, 1200.0] and index.dtype == torch.int64
    assert made.is_contiguous(), "a compiled neighbour would be compiled anew for other strides"


def test_what_does_not_fit_is_infinite_for_the_guard_to_find():
    linear = nn.Linear(2, 2).requires_grad_(False)
    linear.weight.fill_(6e4)
    assert torch.isinf(only(linear, "a")(torch.ones(1, 2).half())).all()


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
    assert (
        not build_half_precision_forward(module, in_fp32("blocks.2"), "fp16").run(latents().half())[0].isfinite().all()
    )
    known = NOTHING if planned else PrecisionOverrides(all_layers_scaled=True, fp32_fallback_blocks=("blocks.2",))
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
        assert step or products.seen == {HALF}, "and no fallback block"
    assert bool(compiler.graphs) == is_compiled == bool(compiler.shells) and None not in compiler.inside
    assert error(made.eager(latents())[0], copy.deepcopy(module).float()(latents())[0]) < 1e-3
    assert all(module.state_dict(keep_vars=True)[name] is tensor for name, tensor in before.items())


@pytest.mark.parametrize("known", [NOTHING, ALL_LAYERS_SCALED])
def test_bf16_is_not_scaled(known):
    module = build(dtype="bf16")
    made = build_half_precision_forward(module, known, "bf16", all_layers_scaled=True)
    assert not made.all_layers_scaled and made.run is module


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("known", [in_fp32("blocks.1"), ALL_LAYERS_SCALED])
def test_fallback_blocks_take_tf32_where_the_rerun_does(monkeypatch, tf32, known):
    asked = []

    def seen(part, x, *, tf32, **_more):
        asked.append(tf32)
        return part(x)

    monkeypatch.setattr(fallback, "run_in_fp32", seen)
    monkeypatch.setattr(fallback.LearnedProducts, "run", lambda _, *args, **more: seen(*args, **more))
    monkeypatch.setattr(fallback.LearnedProducts, "run_by_rows", lambda _, *args, **more: seen(*args, **more))
    for more in ({}, {"compiled": lambda m, *_: copy.copy(m)}):
        made = build_half_precision_forward(build(), known, "fp16", tf32=tf32, **more)
        for attempt in (made.run, made.eager):
            attempt(latents().half())
    assert asked == [tf32] * 4


@pytest.mark.parametrize("inference", [False, True])
def test_a_fallback_block_leaves_the_compiled_shell_and_nothing_recompiles(inference):
    compiler, module, x = Compiler(), build(6, "bf16"), latents().bfloat16()

    def made(*names):
        return build_half_precision_forward(module, in_fp32(*names), "bf16", compiled=compiler.compiled)

    with torch.inference_mode() if inference else torch.no_grad():
        healthy = made()
        healthy.run(x)
        assert compiler.graphs == 1, "identical blocks share one graph"
        for names in (("blocks.2",), ("blocks.2", "blocks.3"), ("blocks.0",), ("blocks.5",), ("embed", "out")):
            adapted = made(*names)
            found = adapted.run(x)[0]
            assert torch.equal(found, adapted.eager(x)[0])
            for index, block in enumerate(adapted.run.blocks):
                falls_back = f"blocks.{index}" in names
                assert (block is healthy.run.blocks[index]) != falls_back, "the others are the same compiled modules"
                assert isinstance(block, Block) == falls_back, "and it is made of the block, not of its compiled twin"
        healthy.run(x)
    assert compiler.graphs == 1, "and a healthy run afterwards compiles nothing either"


def test_a_block_is_not_compiled_inside_its_fallback_block():
    compiler, known = Compiler(), in_fp32("blocks.0", "blocks.1")
    build_half_precision_forward(build(2, "bf16"), known, "bf16", compiled=compiler.compiled).run(latents().bfloat16())
    assert compiler.graphs == 0


def test_two_runs_with_fallback_blocks_of_their_own_share_a_module():
    module = build()
    first, second = (with_fallback_blocks(module, in_fp32(name), "fp16") for name in ("blocks.0", "blocks.1"))
    seen = recorded(module)
    for shell in (first, second):
        shell(latents().half())
    assert seen["0"] == [SINGLE, HALF] and seen["1"] == [HALF, SINGLE]
