"""A network computed by a plan in its layers, as used for compiled blocks."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice, compiled
from comfyui_onediff_guard.pipelines.parallel.group import ProcessGroup
from comfyui_onediff_guard.pipelines.parallel.shell import over_ranks
from comfyui_onediff_guard.precision import planned_products
from comfyui_onediff_guard.precision.after_failure import HalfPrecisionForward, build_half_precision_forward
from comfyui_onediff_guard.precision.layer_peaks import block_names
from comfyui_onediff_guard.precision.overrides import NOTHING
from comfyui_onediff_guard.precision.planned_layers import InPlannedBlock, KnownPeaks, with_planned_layers
from comfyui_onediff_guard.precision.planned_products import Scale
from comfyui_onediff_guard.precision.shallow_copy import structural_copy
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from guards import error
from sample_networks import HOT, check_scales, check_steps, inputs_of_next_step, scaled
from sample_networks import heated as heated_of_diffusers
from small_denoisers import ATTENTION, FEED_FORWARD, MODELS, build
from torch._dynamo.utils import counters
from torch.nn import functional as F

FP16, BF16 = torch.float16, torch.bfloat16
LISTS = ("transformer_blocks", "single_transformer_blocks", "blocks", "down_blocks", "mid_block", "up_blocks")
EAGERLY = BackendChoice(EAGER, "")


class Layered:
    """A half-precision attempt with all layers scaled, whose blocks follow a plan in their layers."""

    def __init__(self, module: torch.nn.Module, choice: BackendChoice = EAGERLY):
        self.parts = [name for name in LISTS if getattr(module, name, None) is not None]
        self.plans: list[tuple[Any, ...]] = []

        def in_blocks(shell: torch.nn.Module, plan: Any, inside: Any) -> torch.nn.Module:
            self.plans.append(plan)
            return compiled(shell, tuple(self.parts), choice, None, inside)

        blocks = block_names(module, self.parts)
        options: dict[str, Any] = {"compiled": in_blocks, "blocks": blocks, "known": KnownPeaks()}
        self.attempt: HalfPrecisionForward = build_half_precision_forward(
            module, NOTHING, "fp16", all_layers_scaled=True, **options
        )

    def __call__(self, **call: Any) -> torch.Tensor:
        made = self.attempt.run(**call)[0]
        assert made.dtype is torch.float32
        return made

    @property
    def scales(self) -> dict[str, Scale]:
        return dict(self.plans[-1][:-1])


def heated(name: str, hot: str) -> tuple[torch.nn.Module, Callable[[], dict[str, Any]]]:
    if name in MODELS:
        writer = {"first": None, "nothing": None, "middle": FEED_FORWARD}.get(hot, ATTENTION)
        module, call = build(name, peak=5e5 if writer else None, writer=writer or ATTENTION)
        if hot == "first":
            module.patch_embed.proj.weight.mul_(1e6).clamp_(-6e4, 6e4)
        return module, lambda: call
    return heated_of_diffusers(name, hot)


OURS = [*MODELS, "WanTransformer3DModel", "UNet2DConditionModel"]  # each kind that samplers compile


@pytest.mark.parametrize("hot", HOT)
@pytest.mark.parametrize("name", OURS)
def test_planned_steps_are_four_times_nearer_to_fp32_than_bf16(name: str, hot: str) -> None:
    module, inputs = heated(name, hot)
    module.half()
    layered = Layered(module)
    check_steps(layered, module, inputs, healthy=hot == "nothing")
    assert len(layered.plans) == 1  # no plan failed
    check_scales(layered.scales, healthy=hot == "nothing")


class Between(torch.nn.Module):
    """A block with a function between two layers, whose outputs reach about 700."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function
        self.layers: Any = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))
        self.layers[0].weight.data.mul_(300)
        self.layers[1].weight.data.mul_(2.0**-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](F.layer_norm(self.function(self.layers[0](x)), (64,)))


class OneBlock(torch.nn.Module):
    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.blocks = torch.nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks[0](x),)


WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).half()
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a square": torch.square,
    "a norm by a power": lambda h: h * (h.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "a norm by its kernel": lambda h: h / h.norm(dim=-1, keepdim=True),
    "a variance": lambda h: (h - h.mean(-1, keepdim=True)) / h.var(-1, keepdim=True).sqrt(),
    "a sum": lambda h: h.cumsum(1),
    "a factor": lambda h: h * 1000,
    "attention of matrices": lambda h: ((h @ h.mT / 4096).softmax(-1, dtype=torch.float32).to(h.dtype)) @ h,
    "attention of batches": lambda h: torch.bmm(F.softmax(torch.baddbmm(h[:, :, :8], h, h.mT, alpha=1e-3), -1), h),
    "linear attention": lambda h: torch.einsum("bnd,bnv,bmv->bmd", h, h.relu(), h.relu()),
    "a weight that is computed": lambda h: F.linear(h, torch.kron(WEIGHT, WEIGHT), WEIGHT.flatten()),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_function_between_planned_layers_is_nearer_to_fp32_than_bf16(function: Any) -> None:
    torch.manual_seed(0)
    module = OneBlock(Between(function)).half().requires_grad_(False)
    layered = Layered(module)
    for _ in range(3):
        x = torch.randn(2, 8, 64)
        exact = run_in_fp32(module, x)[0]
        assert error(layered(x=x), exact) < error(scaled(x, module, BF16)[0], exact) / 2
    assert len(layered.plans) == 1


def test_layer_scaled_in_one_block_is_scaled_in_every_block() -> None:
    module, inputs = heated("CogVideoX-5B", "middle")
    layered = Layered(module.half())
    layered(**inputs())
    scaled = {name: scale.exponent for name, scale in layered.scales.items() if not scale.fp16}
    assert [*scaled] == [f"transformer_blocks.{block}.{FEED_FORWARD}" for block in range(3)]
    layers = (torch.nn.Linear, torch.nn.Conv2d)
    assert set(layered.scales) == {name for name, part in module.named_modules() if isinstance(part, layers)}


SPIKES = {  # changes from the first step to a later one
    "louder input": lambda call, _module: call | {"hidden_states": call["hidden_states"] * 2.0**18},
    "louder prompt": lambda call, _module: call | {"encoder_hidden_states": call["encoder_hidden_states"] * 2.0**18},
    "an infinite value": lambda call, _module: call | {
        "hidden_states": call["hidden_states"].index_fill(1, torch.tensor([0]), torch.inf)},
    "a stronger LoRA": lambda call, module: (
        module.transformer_blocks[1].get_submodule(FEED_FORWARD).weight.mul_(2.0**8) is None) or call,
    "a key that overflows": lambda call, module: (
        module.transformer_blocks[1].attn1.to_k.bias.index_fill_(0, torch.tensor([3]), 6e4) is None) or call,
    "a quieter input of a hot layer": lambda call, module: (
        module.transformer_blocks[1].ff.net[0].proj.weight.mul_(2.0**-30) is None) or call,
}  # fmt: skip


@pytest.mark.parametrize("spike", SPIKES)
@pytest.mark.parametrize("hot", ["nothing", "middle"])
@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView4"])
def test_step_outside_the_plan_is_nonfinite_or_right_then_replanned(name: str, hot: str, spike: str) -> None:
    module, inputs = heated(name, hot)
    layered = Layered(module.half())
    layered(**inputs())
    call = SPIKES[spike](inputs(), module)
    exact = run_in_fp32(partial(module, **call))[0]
    bf16 = error(scaled(module, lambda network: network(**call)[0], BF16), exact)

    def is_right(found: torch.Tensor) -> bool:
        return bool(found.isfinite().all()) and error(found, exact) <= bf16 / 2

    found = layered(**call)
    assert is_right(found) or not found.isfinite().all()
    if not exact.isfinite().all():
        assert not found.isfinite().all()
    elif not found.isfinite().all():
        assert layered.attempt.renew()
        assert is_right(layered(**call))  # by rows
        assert is_right(layered(**call))
        assert len(layered.plans) == 2


@pytest.mark.parametrize("available", [True, False])
def test_report_says_layers_are_scaled_by_rows_without_fp32_products(
    monkeypatch: pytest.MonkeyPatch, available: bool
) -> None:
    monkeypatch.setattr(planned_products, "_has_float32_products", lambda _: available)
    module, inputs = heated("CogVideoX-5B", "middle")
    layered = Layered(module.half())
    assert not layered.attempt.slower()
    exact = run_in_fp32(module, **inputs())[0]
    assert all(error(layered(**inputs()), exact) < 2e-3 for _ in range(2))
    assert bool(re.match(r"[1-9]\d* layers are scaled row by row", layered.attempt.slower())) is not available


def test_wrapped_block_forward_is_still_called() -> None:
    """A step cache and an offload replace the forward of blocks like this."""
    module, inputs = heated("CogVideoX-5B", "nothing")
    layered = Layered(module.half())
    seen: list[bool] = []
    run: Any = layered.attempt.run
    shell = structural_copy(run.args[0])
    block = shell.transformer_blocks[1]
    inner = block.forward
    block.forward = lambda *args, **kwargs: (seen.append(True), inner(*args, **kwargs))[1]
    call = inputs()
    steps = [run.func(shell, **call, **run.keywords)[0] for _ in range(2)]
    assert len(seen) == 2
    assert torch.equal(steps[1], layered(**call))


def test_plan_changes_neither_the_module_nor_a_run_by_rows() -> None:
    module, inputs = heated("CogView4", "middle")
    before = {name: (type(part), *vars(part)) for name, part in module.half().named_modules()}
    layered = Layered(module)
    first = layered(**inputs())
    layered(**inputs())
    assert torch.equal(layered.attempt.eager(**inputs())[0], first)
    assert {name: (type(part), *vars(part)) for name, part in module.named_modules()} == before


@pytest.mark.parametrize("name", ["CogVideoX-5B", "CogView4", "WanTransformer3DModel"])
def test_inductor_compiles_one_graph_as_near_to_fp32_as_eager(name: str) -> None:
    module, inputs = heated(name, "middle")
    module.half()
    torch._dynamo.reset()
    counters.clear()
    eager, run = Layered(module), Layered(module, choice=BackendChoice("inductor", ""))
    call, changed = inputs(), inputs_of_next_step(inputs(), 0.5)
    exact = run_in_fp32(partial(module, **call))[0]
    expected, found = [(eager(**call), run(**call)) for _ in range(2)][-1]
    assert error(found, exact) <= 1.1 * error(expected, exact) < 1e-3
    assert counters["stats"]["unique_graphs"] == 1  # for the overflowing block too
    assert not counters["graph_break"]
    run(**changed)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("at", [0, 1])
def test_inductor_attention_beyond_fp16_is_not_finite(at: int) -> None:
    """Inductor skips fp16 rounding inside a kernel, where such a value stays finite."""
    torch._dynamo.reset()

    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query * 1.0001, key * 1.0001, value)

    run = torch.compile(InPlannedBlock(block, safe_attention=True), backend="inductor", fullgraph=True)
    given = [torch.randn(1, 1, 32, 8) for _ in range(3)]
    with torch.no_grad():
        assert run(*given).isfinite().all()
        given[at][0, 0, 3, 0] = 7e4
        assert not run(*given).isfinite().all()


@pytest.mark.parametrize("layer", [torch.nn.Linear(64, 64, bias=False), torch.nn.Conv1d(64, 64, 1, bias=False)])
def test_checked_output_too_small_for_fp16_is_nan(layer: torch.nn.Module) -> None:
    layer = layer.half().requires_grad_(False)
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).half()
    for checked in (False, True):
        shell = with_planned_layers(torch.nn.ModuleList([layer]), {"0": Scale(fp16=True, checked=checked)})
        assert torch.equal(shell[0](x), layer(x))
        assert bool(shell[0](x * 2.0**-16).isnan().all()) is checked


SCALES = {
    "fp16": Scale(fp16=True),
    "fp16, checked": Scale(fp16=True, checked=True),
    "scaled": Scale(exponent=3),
    "by rows": None,
}


@pytest.mark.parametrize("how", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("name", ["CogVideoX-2B", "CogView3-Plus"])
def test_planned_layer_gathers_tokens_of_all_ranks(name: str, how: Scale | None) -> None:
    """The last layer of a denoiser whose tokens are split over ranks: on "meta", where nothing is sent."""
    module, call = build(name)
    context = MODELS[name].family.context
    assert context is not None
    whole = module(**call)[0]
    half = module.to(FP16)
    shell = over_ranks(half, "transformer_blocks", context, ProcessGroup(1, 3))
    planned = with_planned_layers(shell, {"proj_out": how} if how else {}, torch.device("meta")).to("meta")
    given = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in call.items()}
    assert InPlannedBlock(planned, safe_attention=True)(**given)[0].shape == whole.shape
