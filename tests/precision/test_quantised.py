"""Quantised linear layers: which are quantised, their shallow copy, the sentinel, and torchao's handling of NaN.

torchao's own quantisers and kernels run here; fp8 uses PyTorch's CPU kernel directly, since torchao rejects it.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import quantised
from comfyui_onediff_guard.precision.after_failure import FallbackAdapter, build_half_precision_forward
from comfyui_onediff_guard.precision.layer_peaks import block_names, error_of
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.quantised import (
    QuantisedLinears,
    quantised_weight,
    worth_quantising,
)
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from guards import error, guarded, outcomes, report_of
from residual_blocks import Block
from torch import nn
from torch.nn import functional as F

pytest.importorskip("torchao")

from dequantised import dequantise
from fp8_on_cpu import fp8_weight

WIDTH = 512
KINDS = ("int8", "fp8")


class Network(nn.Module):
    """x [batch, tokens, 64] → same shape."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, x, timestep=None):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


NAMES = ("blocks.0.inner", "blocks.0.write", "blocks.1.inner", "blocks.1.write")
BLOCKS = ("blocks.0", "blocks.1")


def network(dtype: torch.dtype = torch.bfloat16) -> Network:
    torch.manual_seed(0)
    return Network().to(dtype).eval().requires_grad_(False)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fp8 be quantised on the CPU too."""
    own = quantised_weight
    by_kind = {"fp8": fp8_weight, "int8": lambda layer: own(layer, "int8")}
    monkeypatch.setattr(quantised, "quantised_weight", lambda layer, kind: by_kind[kind](layer))


def filled(module: nn.Module, kind: str = "int8") -> QuantisedLinears:
    layers = QuantisedLinears(module, BLOCKS, kind)
    layers.fill()
    layers.start()
    return layers


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "half", "chosen"),
    [
        ("attn1.to_q", 1920, 1920, True, True),
        ("attn1.to_out.0", 1920, 1920, True, True),
        ("attn1.to_q.base_layer", 1920, 1920, True, True),  # inside a LoRA layer
        ("ff.net.0.proj", 1920, 7680, True, True),
        ("norm1.linear", 512, 11520, True, False),  # modulation: one row per sample
        ("resnets.0.time_emb_proj", 1280, 1280, True, False),
        ("attn1.to_q.lora_A.default", 1920, 64, True, False),
        ("attn1.to_q", 320, 320, True, False),
        ("attn1.to_q", 1928, 1928, True, False),  # not a multiple of 16
        ("attn1.to_q", 1920, 1920, False, False),  # kept in float32
    ],
)
def test_only_large_layers_of_blocks_are_quantised(name, inputs, outputs, half, chosen) -> None:
    def worth(name: str, kind: type[nn.Linear] = nn.Linear) -> tuple[str, ...]:
        module: nn.Module = kind(inputs, outputs, device="meta", dtype=torch.float16 if half else torch.float32)
        for part in reversed(name.split(".")):
            module = nn.ModuleDict({part: module})
        return worth_quantising(module, ["blocks.3"])

    inside = f"blocks.3.{name}"
    assert worth(inside) == ((inside,) if chosen else ()) and worth(inside, Own) == ()
    assert not any(worth(f"{block}{name}") for block in ("blocks.30.", "proj_out.", ""))


class Own(nn.Linear):
    def forward(self, input):  # noqa: A002
        return super().forward(input) * 2


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_copy_shares_weights_and_network_is_unchanged(kind, on_cpu, monkeypatch):
    module = network()
    before = {name: (id(weight), weight.clone()) for name, weight in module.named_parameters()}
    right, single = module(tokens()), run_in_fp32(module, tokens())
    layers = filled(module, kind)
    assert layers.names == NAMES
    shell = layers.shell(module)
    made = shell(tokens())
    with monkeypatch.context() as patch:
        dequantise(patch)
        exact = shell(tokens())
    assert error(right, single) < error(made, single) < 1.5 * error(exact, single), "quantised and accurate"
    assert dict(shell.named_parameters()).keys() == before.keys()
    assert {name: id(weight) for name, weight in shell.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(weight, before[name][1]) for name, weight in module.named_parameters())
    assert torch.equal(module(tokens()), right) and torch.equal(run_in_fp32(module, tokens()), single)
    assert not any(hasattr(part, "quantised_weight") for part in module.modules())


def test_excluded_layer_is_original_and_global_settings_are_kept() -> None:
    import torch._inductor.config as inductor

    def settings() -> tuple[Any, ...]:  # torchao's default changes both
        return inductor.save_config_portable(), torch.get_float32_matmul_precision()

    before, module = settings(), network()
    layers = filled(module)
    assert settings() == before
    shell = layers.shell(module, but=NAMES[:1])
    assert shell.get_submodule(NAMES[0]) is module.get_submodule(NAMES[0])
    assert type(shell.get_submodule(NAMES[1])) is not nn.Linear
    assert torch.equal(layers.shell(module, but=NAMES)(tokens()), module(tokens()))


def test_quantised_weights_exist_from_fill_to_empty() -> None:
    layers = QuantisedLinears(network(), BLOCKS, "int8")
    assert layers.n_bytes == 2 * 2 * (2 * WIDTH * WIDTH) + 2 * 5 * (2 * WIDTH + WIDTH)
    assert all(layer.quantised_weight is None for layer in layers._layers.values())
    layers.fill()
    weights = [layer.quantised_weight for layer in layers._layers.values()]
    held = sum(part.nbytes for weight in weights for part in (weight.qdata, weight.scale, weight.zero_point))
    assert held == layers.n_bytes
    layers.fill()
    again = (layer.quantised_weight for layer in layers._layers.values())
    assert all(mine is theirs for mine, theirs in zip(weights, again, strict=True))
    layers.empty()
    assert all(layer.quantised_weight is None for layer in layers._layers.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_torchao_dynamic_quantisers_propagate_nonfinite_and_zeros(kind: str, value: float) -> None:
    """As the module's docstring says about torchao 0.18; zeros work because of fp8's lower bound."""
    layer: Any = network().blocks[0].inner
    x, zeros = torch.randn(2, 16, WIDTH).bfloat16(), torch.zeros(1, 16, WIDTH).bfloat16()
    x[1, 3, 7] = value
    weight = fp8_weight(layer) if kind == "fp8" else quantised_weight(layer, kind)
    broken = ~F.linear(x, weight, layer.bias).isfinite()
    assert broken[1, 3].all() and broken.sum() == broken[1, 3].sum()
    assert torch.equal(F.linear(zeros, weight, layer.bias), layer(zeros))


def test_int8_sums_do_not_saturate_without_vnni(fresh_python: Any) -> None:
    code = """
import torch
from comfyui_onediff_guard.precision.quantised import quantised_weight
layer = torch.nn.Linear(512, 512, bias=False, dtype=torch.bfloat16).requires_grad_(False)
layer.weight.fill_(1)
made = torch.nn.functional.linear(torch.ones(16, 512, dtype=torch.bfloat16), quantised_weight(layer, "int8"))
print(float((made - 512).abs().max()) / 512)
"""
    off = float(fresh_python(code, ONEDNN_MAX_CPU_ISA="AVX2"))
    assert off < 2 / 64, "rounding of input and weight"


def test_torchao_is_not_imported_without_quantising(fresh_python: Any) -> None:
    code = (
        "import sys, comfyui_onediff_guard.precision.quantised as q; q.lacking('int8'); print('torchao' in sys.modules)"
    )
    assert fresh_python(code).strip() == "False"


def test_sentinel_holds_largest_input_of_all_layers_since_start() -> None:
    module = network()
    layers = filled(module)
    shell, given = layers.shell(module), []
    for name in NAMES:
        module.get_submodule(name).register_forward_pre_hook(lambda _, args: given.append(args[0].abs().max()))
    for seed in (0, 1):
        module(tokens(seed))
    largest = float(max(given))
    for seed in (0, 1):
        shell(tokens(seed))
    peak = layers.take()
    assert peak is not None and float(peak) == pytest.approx(largest, rel=0.02)
    layers.start()
    assert layers.take() == 0


def _outlier(block: Any, largest: float, bias: float = 0.0) -> None:
    """One input channel is `largest` times as large, compensated by the weights. A bias hides the error."""
    block.norm.bias[7] = largest
    block.inner.weight[:, 7] /= largest
    block.inner.bias += bias


def _large_weight(block: Any, largest: float) -> None:
    """One weight per row is `largest` times as large, and multiplies a channel that is as small."""
    block.inner.weight[:, 7] *= largest
    block.norm.weight[7], block.norm.bias[7] = 1 / largest, 0


def _zero_row(block: Any) -> None:
    block.inner.weight[3] = 0


WRONG = [  # change to a block, its arguments, kinds for which its layer becomes inaccurate
    (_outlier, (30.0,), {"int8"}),
    (_outlier, (100.0,), {"int8"}),
    (_outlier, (1e3,), {"int8"}),
    (_outlier, (1e6,), {"int8", "fp8"}),
    (_outlier, (100.0, 3000.0), {"int8"}),
    (_large_weight, (100.0,), {"int8"}),
    (_large_weight, (1e6,), {"int8", "fp8"}),
    (_zero_row, (), {"fp8"}),  # torchao divides by a row's largest weight
    (_outlier, (3.0,), set()),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("change", "by", "wrong"), WRONG)
def test_layer_inaccurate_on_first_input_stays_unquantised(change, by, wrong, kind, on_cpu: None) -> None:
    module: Any = network()
    with torch.no_grad():
        change(module.blocks[1], *by)
    run = Run(module, None, kind, layers=QuantisedLinears(module, BLOCKS, kind))
    run.layers.fill()
    right = run_in_fp32(module, tokens())
    with torch.no_grad():
        made, half = run.guard(tokens()), module(tokens())
    left = {"blocks.1.inner"} if kind in wrong else set()
    assert outcomes(run.guard) == ["finite"]
    assert {*run.layers.left} == left and {*run.learner.attempt.quantised} == {*NAMES} - left
    errors = run.layers.errors
    assert errors is not None
    rounding = max(errors[name] for name in {*errors} - left)  # of the quantised layers, on this machine
    assert error(made, right) < 3 * error(half, right) + rounding
    run.guard(tokens(1))
    assert run.layers.errors is errors, "measured once"


@pytest.mark.parametrize(
    ("right", "made", "error"),
    [
        ([1e4, 1.0, 1.0, 1.0], [1e4, 1.5, 1.0, 1.0], 0.25),  # half of one row of four: a large row hides no other
        ([1e4, 1.0, 1.0, 1e-9], [1e4, 1.0, 1.0, 1e-4], 0.005),  # relative to a hundredth of the median
        ([1.0, math.inf, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0], 0.0),
        ([1.0, 1.0, 1.0, 1.0], [1.0, math.nan, 1.0, 1.0], math.inf),
    ],
)
def test_row_errors_are_relative_to_each_rows_norm(right: list[float], made: list[float], error: float) -> None:
    rows = (torch.tensor(each)[:, None].expand(-1, 3) for each in (made, right))
    assert float(error_of(*rows)) == pytest.approx(error, rel=1e-4, abs=1e-6)


class Broken(nn.Module):
    """A layer's output with nonfinite values in one sample, only in half precision."""

    def __init__(self, layer: nn.Module, value: float):
        super().__init__()
        self.layer, self.value = layer, value

    def forward(self, x):
        made = self.layer(x)
        if made.dtype is torch.bfloat16:
            made[0] = self.value
        return made


def with_a_bound(layer: nn.Linear, kind: str) -> torch.Tensor:
    """torchao's fp8 with an upper bound on the scale: an infinite value becomes finite."""
    return fp8_weight(layer, activation_value_ub=1200.0)


def with_a_measured_scale(layer: nn.Linear, kind: str) -> torch.Tensor:
    """torchao's int8 with a static scale: NaN and infinite values become finite."""
    from torchao.quantization import Int8StaticActivationInt8WeightConfig, PerTensor, quantize_

    scale = torch.full((1, 1, 1), 8 / 127)
    config = Int8StaticActivationInt8WeightConfig(
        act_quant_scale=scale, granularity=PerTensor(), set_inductor_config=False
    )
    bare = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype).requires_grad_(False)
    bare.load_state_dict(layer.state_dict())
    quantize_(bare, config)
    return bare.weight.detach()


class Run:
    """A guarded network in int8 or fp8, whose first block's norm is broken in half precision."""

    def __init__(
        self, module: nn.Module, value: float | None, kind: str = "int8", *, sentinel: bool = True, layers=None
    ):
        self.layers = layers or filled(module, kind)
        broken = {"blocks.0.norm": lambda norm: Broken(norm, value)} if value is not None else {}

        def build(known: PrecisionOverrides) -> Any:
            made = build_half_precision_forward(module, known, "bf16", quantised=self.layers)
            if layers:  # these are checked on their first input
                return made
            faulty = module if known.all_layers_scaled else replace_submodules(made.run, broken)
            return type(made)(faulty, faulty, quantised=made.quantised)

        self.learner = FallbackAdapter(module, "bf16", build, block_names(module, ["blocks"]))
        peak_inside = self.layers.take if sentinel else lambda: None
        report = report_of(kind, card="sm90")
        self.guard = guarded(self.learner, "bf16", report=report, rerun=module, peak_inside=peak_inside)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.layers.start()
        return self.guard(x)

    @property
    def outcomes(self) -> list[str]:
        return outcomes(self.guard)


HIDING = [
    (with_a_measured_scale, "int8", math.nan),
    (with_a_measured_scale, "int8", math.inf),
    (with_a_bound, "fp8", math.inf),
]


@pytest.mark.parametrize(("hiding", "kind", "value"), HIDING, ids=["int8-nan", "int8-inf", "fp8-inf"])
def test_failure_hidden_by_quantiser_is_detected_by_the_sentinel(
    hiding: Any, kind: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "quantised_weight", hiding)
    module = network()
    right = run_in_fp32(module, tokens())
    missed = Run(module, value, kind, sentinel=False)
    wrong = missed(tokens()).float()
    assert missed.outcomes == ["finite"] and wrong.isfinite().all()
    assert (wrong - right).abs().max() > 0.1 * right.abs().max(), "finite but wrong"
    seen = Run(module, value, kind)
    assert torch.equal(seen(tokens()), right)
    assert seen.outcomes == ["rerun"] and seen.guard.report.steps[0].note.startswith("NaN or infinite in bf16")
    assert seen.learner.learned == PrecisionOverrides(all_layers_scaled=True), (
        "the norm broke it, not a quantised layer"
    )
    seen(tokens(1))
    assert seen.outcomes == ["rerun", "finite"], "the earlier peak is reset"


@pytest.mark.parametrize("kind", KINDS)
def test_layer_broken_by_quantising_stays_unquantised_afterwards(kind, monkeypatch):
    """In fp8 by a row of zeros without torchao's lower bound; in int8 by a NaN scale."""
    own = quantised_weight

    def breaking(layer: nn.Linear, kind: str) -> torch.Tensor:
        if kind == "fp8":
            return fp8_weight(layer, activation_value_lb=None)
        made: Any = own(layer, kind)
        if torch.equal(layer.weight, module.blocks[1].inner.weight):
            made.scale[0] = math.nan
        return made

    module: Any = network()
    with torch.no_grad():
        module.blocks[1].norm.weight.zero_()
        module.blocks[1].norm.bias.zero_()  # its output is rows of zeros
    monkeypatch.setattr(quantised, "quantised_weight", breaking)
    run = Run(module, None, kind)
    assert torch.equal(run(tokens()), run_in_fp32(module, tokens()))
    step = run.guard.report.steps[0]
    assert step.outcome == "rerun" and step.rerun is not None
    assert step.rerun.module == "blocks.1.inner"
    assert step.rerun.action == "'blocks.1.inner' unquantised from here on"
    for seed in (1, 2):
        right = run_in_fp32(module, tokens(seed))
        assert (run(tokens(seed)) - right).norm() < 0.1 * right.norm()
    assert run.outcomes == ["rerun", "finite", "finite"]
    assert run.learner.learned == PrecisionOverrides(unquantised=("blocks.1.inner",))
    assert run.learner.attempt.quantised == tuple(name for name in NAMES if name != "blocks.1.inner")
    assert run.learner.learned.in_words() == ["'blocks.1.inner' unquantised"]


def test_layer_broken_unquantised_too_gets_all_layers_scaled() -> None:
    module = network()
    run = Run(module, None)

    def build(known: PrecisionOverrides) -> Any:
        broken = {} if known.all_layers_scaled else {"blocks.1.inner": lambda layer: Broken(layer, math.nan)}
        faulty = replace_submodules(module, broken)
        layers = None if known.unquantised else run.layers
        return build_half_precision_forward(faulty, known, "bf16", quantised=layers)

    run.learner.build = build
    run.layers._layers["blocks.1.inner"].quantised_weight.scale[0] = math.nan
    for seed in range(3):
        run(tokens(seed))
    assert run.outcomes == ["rerun", "rerun", "finite"]
    assert run.learner.learned == PrecisionOverrides(unquantised=("blocks.1.inner",), all_layers_scaled=True)
