"""Fallback and scaled blocks: some in fp32 or with every layer scaled, the others half and compiled as they were."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from blocky import STREAM, Block, build, latents, overflow_inside, overflow_stream
from comfyui_onediff_guard.precision import fallback
from comfyui_onediff_guard.precision.dtypes import DTYPES
from comfyui_onediff_guard.precision.fallback import build_half_precision_forward, with_fallback_blocks
from comfyui_onediff_guard.precision.overrides import ModuleStructure, PrecisionOverrides
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode, run_with_scaled_products
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL_LAYERS_SCALED, HALF, SINGLE = PrecisionOverrides(all_layers_scaled=True), torch.float16, torch.float32


def in_fp32(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(fp32_fallback_blocks=names, **more)


def scaled(*names: str, **more: Any) -> PrecisionOverrides:
    return PrecisionOverrides(scaled_blocks=names, **more)


each_kind = pytest.mark.parametrize("learned", [in_fp32, scaled])


def part(module: nn.Module, known: PrecisionOverrides) -> Any:
    """The one part of the module that is a fallback block, or scaled."""
    (name,) = known.fp32_fallback_blocks + known.scaled_blocks
    return with_fallback_blocks(module, known, "fp16").get_submodule(name)


def attempt(
    module: nn.Module, known: PrecisionOverrides, dtype: str = "fp16", stream: Any = STREAM, **more: Any
) -> Any:
    return build_half_precision_forward(module, ModuleStructure.of(module, ["blocks"], stream), known, dtype, **more)


def overflowing() -> tuple[Any, torch.Tensor]:
    """(module whose stream and second block leave fp16's range, what it puts out in fp32)"""
    module = build()
    overflow_stream(module, 1)
    overflow_inside(module, 2)
    return module, copy.deepcopy(module).float()(latents())[0]


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


@pytest.mark.parametrize(
    ("learned", "dtype", "multiplies_in"),
    [(in_fp32, "fp16", SINGLE), (in_fp32, "bf16", SINGLE), (scaled, "fp16", HALF)],
)
def test_a_fallback_block_computes_in_fp32_or_multiplies_in_half_and_everything_else_is_half(
    learned, dtype, multiplies_in
):
    module, half, products = build(dtype=dtype), DTYPES[dtype], Products()
    shell: Any = with_fallback_blocks(module, learned("blocks.1"), dtype)
    embedded = shell.embed(latents().to(half))
    with products:
        made = shell.blocks[1](embedded)
    block = module.blocks[1]
    product = run_with_scaled_products(block, embedded, products=ScaledHalfMatmulMode(half))
    expected = product if learned is scaled else copy.deepcopy(block).float()(embedded.float())
    assert made.dtype == half and made.is_contiguous() and torch.equal(made, expected.to(half))
    assert products.seen == {multiplies_in}
    seen = recorded(module)
    assert shell(latents().to(half))[0].dtype == half
    assert seen == {name: [SINGLE if name == "1" else half] for name in ("0", "1", "2", "3")}


def test_the_original_is_untouched_and_weights_are_shared():
    module = build()
    before = {name: id(part) for name, part in module.named_modules()}
    values = {name: p.clone() for name, p in module.named_parameters()}
    shell = with_fallback_blocks(module, in_fp32("blocks.1", scaled_blocks=("out",)), "fp16")
    shell(latents().half())
    assert {name: id(part) for name, part in module.named_modules()} == before
    assert all("forward" not in vars(part) for part in module.modules())
    assert all(torch.equal(values[name], p) and p.dtype == torch.float16 for name, p in module.named_parameters())
    assert {id(p) for p in shell.parameters()} == {id(p) for p in module.parameters()}
    assert list(shell.state_dict()) == list(module.state_dict()), "and under the same names"
    assert with_fallback_blocks(module, PrecisionOverrides(), "fp16") is module


@each_kind
def test_a_fallback_block_says_and_knows_what_its_block_does(learned):
    class Down(nn.Module):
        has_cross_attention = True

        def forward(self, x, *, scale, texts):
            return (x * scale).t().contiguous().t(), [texts, x.sum(-1), x.argmax(-1)], 7

    fallback_block = part(nn.ModuleDict({"down": Down()}).half(), learned("down"))
    assert fallback_block.has_cross_attention and isinstance(fallback_block, Down)
    x = torch.full((2, 4), 300.0).half()
    made, (texts, summed, index), number = fallback_block(x, scale=2.0, texts="a boat")
    assert (made.dtype, summed.dtype, texts, number) == (torch.float16, torch.float16, "a boat", 7)
    assert summed.tolist() == [1200.0, 1200.0] and index.dtype == torch.int64
    assert made.is_contiguous(), "a compiled neighbour would be compiled anew for other strides"


@each_kind
def test_what_does_not_fit_is_infinite_for_the_guard_to_find(learned):
    linear = nn.Linear(2, 2).requires_grad_(False)
    linear.weight.fill_(6e4)
    assert torch.isinf(part(nn.ModuleDict({"a": linear}).half(), learned("a"))(torch.ones(1, 2).half())).all()


@each_kind
def test_a_fallback_block_in_an_fp32_residual_stream_hands_on_float32(learned):
    (module, expected), x = overflowing(), latents().half()
    for alone in (PrecisionOverrides(fp32_residual_stream=True), learned("blocks.2")):
        assert not attempt(module, alone).run(x)[0].isfinite().all()
    both = attempt(module, learned("blocks.2", fp32_residual_stream=True))
    assert both.fp32_residual_stream and not both.all_layers_scaled and both.run is both.eager
    assert both.run.blocks[2](both.run.embed(x)).dtype == SINGLE
    assert (both.run(x)[0].float() - expected).abs().max() < 1e-2


@pytest.mark.parametrize("planned", [True, False])
def test_with_every_layer_scaled_nothing_leaves_the_range(planned):
    (module, expected), products, brought = overflowing(), Products(), []
    assert not attempt(module, in_fp32("blocks.2"), stream=None).run(latents().half())[0].isfinite().all()
    known = (
        PrecisionOverrides()
        if planned
        else PrecisionOverrides(all_layers_scaled=True, fp32_fallback_blocks=("blocks.2",), fp32_residual_stream=True)
    )
    onloaded = lambda shell, _: brought.append(shell) or shell  # noqa: E731
    more = {
        "all_layers_scaled": planned,
        "fp32_residual_stream": True,
        "compiled": Compiler().compiled,
        "onloaded": onloaded,
    }
    made = attempt(module, known, stream=None, **more)
    with products:
        found = made.run(latents())[0]
    assert products.seen == {HALF}, "and no fallback block"
    assert made.all_layers_scaled and not made.fp32_residual_stream and brought == [module], (
        "weights are brought to the device"
    )
    assert found.dtype == SINGLE and (found - expected).abs().max() < 1e-2
    assert (made.eager(latents())[0] - expected).abs().max() < 1e-2


@pytest.mark.parametrize("what", ["all_layers_scaled", "fp32_residual_stream"])
def test_bf16_is_not_scaled(what):
    module = build(dtype="bf16")
    made = attempt(module, PrecisionOverrides(**{what: True}), "bf16", **{what: True})
    assert not made.all_layers_scaled and not made.fp32_residual_stream and made.run is module


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("known", [in_fp32("blocks.1"), scaled("blocks.1"), ALL_LAYERS_SCALED])
def test_fallback_blocks_take_tf32_where_the_rerun_does(monkeypatch, tf32, known):
    asked = []

    def seen(part, x, *, tf32, **_more):
        asked.append(tf32)
        return part(x)

    for name in ("run_in_fp32", "run_with_scaled_products"):
        monkeypatch.setattr(fallback, name, seen)
    monkeypatch.setattr(fallback.LearnedProducts, "run", lambda _, *args, **more: seen(*args, **more))
    module = build()
    for more in ({}, {"compiled": lambda m, *_: copy.copy(m)}):
        attempt(module, known, tf32=tf32, **more).run(latents().half())
    assert asked == [tf32, tf32]


class Compiler:
    """A backend that counts what it compiles, and runs it as it is."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = 0
        self.shells: dict[bool, nn.Module] = {}

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward

    def compiled(self, half: nn.Module, fp32_residual_stream: bool, _left: tuple[str, ...]) -> nn.Module:
        """Block by block, in a shell; one for an fp32 residual stream, one for none."""
        if fp32_residual_stream not in self.shells:
            compile_all = lambda blocks: nn.ModuleList(torch.compile(b, backend=self) for b in blocks)  # noqa: E731
            self.shells[fp32_residual_stream] = replace_submodules(half, {"blocks": compile_all})
        return self.shells[fp32_residual_stream]


@each_kind
@pytest.mark.parametrize("fp32_residual_stream", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_a_fallback_block_leaves_the_compiled_shell_and_nothing_recompiles(learned, fp32_residual_stream, inference):
    compiler, module, x = Compiler(), build(6), latents().half()

    def made(*names):
        known = learned(*names, fp32_residual_stream=fp32_residual_stream)
        return attempt(module, known, compiled=compiler.compiled)

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
    compiler, known = Compiler(), PrecisionOverrides(fp32_fallback_blocks=("blocks.0",), scaled_blocks=("blocks.1",))
    attempt(build(2), known, compiled=compiler.compiled).run(latents().half())
    assert compiler.graphs == 0


def test_two_runs_with_fallback_blocks_of_their_own_share_a_module():
    module = build()
    first, second = (with_fallback_blocks(module, in_fp32(name), "fp16") for name in ("blocks.0", "blocks.1"))
    seen = recorded(module)
    for shell in (first, second):
        shell(latents().half())
    assert seen["0"] == [SINGLE, HALF] and seen["1"] == [HALF, SINGLE]
