"""Linear layers that accumulate in fp16, by a model of tensor cores (benchmarks/fp16_sums_on_cpu.py): the kernels
themselves need a card."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.precision import fp16_sums as under_test
from comfyui_onediff_guard.precision.accumulation import Accumulation, accumulation, fp16_sums, has_fp16_sums
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.fallback import FallbackAdapter, build_half_precision_forward
from comfyui_onediff_guard.precision.fp16_sums import SAMPLED, LinearSums, linear
from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope, StageGuard
from comfyui_onediff_guard.precision.overrides import NOTHING, ModuleStructure, PrecisionOverrides, Stream
from comfyui_onediff_guard.precision.policy import Component, Precision, choose
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.precision.sums import BUDGET, Sums
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from fp16_sums_on_cpu import Fp16SumsOnCpu, a_card_with_fp16_sums, product
from residual_blocks import Block
from torch import nn
from torch.nn import functional as F

WIDTH = 128
ADA = ARCHITECTURES["sm89"]
STREAM = Stream("blocks", ("embed",), writers=("write",), norms=("norm",), last_norms=("last_norm",))


class Network(nn.Module):
    """x [batch, tokens, 64] → the same."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, WIDTH)
        self.time = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, torch.tanh) for _ in range(3))
        self.last_norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 64)

    def forward(self, x, timestep=None):
        x = self.embed(x) + self.time(torch.ones(len(x), 1, 8, dtype=self.time.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return (self.out(self.last_norm(x)),)


LAYERS = ("embed", *(f"blocks.{block}.{name}" for block in range(3) for name in ("inner", "write")), "out")
BROKEN = "blocks.1.inner"


def network(squash: Callable[[torch.Tensor], torch.Tensor] = torch.tanh) -> Network:
    torch.manual_seed(0)
    made = Network().half().eval().requires_grad_(False)
    for block in made.blocks:
        block.squash = squash
    return made


def overflow_on_the_way(module: Network, block: int = 1) -> Network:
    """A layer's sums leave fp16's range half-way, and what it puts out is as it was."""
    found: Any = module.blocks[block]
    with torch.no_grad():
        found.norm.weight[:WIDTH].zero_()
        found.norm.bias[: WIDTH // 2] = 40.0
        found.norm.bias[WIDTH // 2 :] = 40.0
        found.inner.weight[:, : WIDTH // 2] = 32.0
        found.inner.weight[:, WIDTH // 2 :] = -32.0
    return module


def given(seed: int = 0, tokens: int = 96) -> torch.Tensor:
    return torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(seed)).half()


@pytest.fixture
def card() -> Iterator[Fp16SumsOnCpu]:
    with torch.no_grad(), a_card_with_fp16_sums() as card:
        yield card
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation


class Run:
    def __init__(
        self, module: Network, learned: PrecisionOverrides = NOTHING, scope: Scope = Scope.LEARNED, stream: Any = None
    ):
        self.module = module
        sums = LinearSums(module)
        anatomy = ModuleStructure.of(module, ["blocks"], stream)
        self.learner = FallbackAdapter(
            module,
            "fp16",
            lambda known: build_half_precision_forward(
                module, anatomy, known, "fp16", wide=stream is not None, sums=sums
            ),
            anatomy,
            learned,
        )
        plan = choose(ADA, VARIANTS["SVD"], Component.DENOISER, Precision.FP16, Accumulation.FP16)
        self.report = RunReport("SVD", "sm89", plan)
        policy = GuardPolicy(scope=scope)
        self.guard = StageGuard("denoiser", self.learner, rerun=module, dtype="fp16", policy=policy, report=self.report)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.guard(x)[0]

    @property
    def sums(self) -> Sums | None:
        return self.learner.learned.sums

    @property
    def outcomes(self) -> list[str]:
        return [step.outcome for step in self.report.steps]


def error(made: torch.Tensor, right: torch.Tensor) -> float:
    return float((made.float() - right.float()).norm() / right.float().norm())


# the model of the hardware


def test_the_model_rounds_each_sum_to_fp16_and_nothing_else() -> None:
    ones, tiny = torch.ones(1, 64).half(), torch.full((64, 1), 2.0**-16).half()
    tiny[0] = 1
    assert product(ones, tiny).item() == 1, "16 times 2⁻¹⁶ are less than half of 1's last place"
    assert product(ones, tiny, chunk=64).item() == 1 + 2.0**-10, "a chunk by itself is summed in single precision"
    assert product(ones, torch.full((64, 1), 2000.0).half()).isinf().all()
    back = torch.cat([torch.full((32, 1), 3000.0), torch.full((32, 1), -3000.0)]).half()
    assert product(ones, back).isinf().all(), "on the way it leaves the range"
    assert F.linear(ones, back.t()).item() == 0, "a CPU, which adds up in fp32, does not"


def test_it_acts_by_pytorchs_switch_alone(card: Fp16SumsOnCpu) -> None:
    x, weight = torch.randn(32, 512).half(), torch.randn(16, 512).half()
    plain = F.linear(x, weight)
    assert card.launched == 0
    with fp16_sums():
        summed = F.linear(x, weight)
        F.linear(x.float(), weight.float())
    assert card.launched == 1, "of fp16 alone"
    assert torch.equal(summed, product(x, weight.t())) and not torch.equal(summed, plain)
    assert torch.equal(F.linear(x, weight), plain)


# the switch


def test_the_switch_is_on_inside_and_as_it_was_afterwards() -> None:
    matmul: Any = torch.backends.cuda.matmul
    assert has_fp16_sums()

    def interrupted() -> None:
        with fp16_sums():
            assert matmul.allow_fp16_accumulation
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not matmul.allow_fp16_accumulation
    matmul.allow_fp16_accumulation = True
    try:
        with fp16_sums():
            assert matmul.allow_fp16_accumulation
        assert matmul.allow_fp16_accumulation, "somebody else's"
        with accumulation(ADA, Accumulation.FP16) as switches:
            assert not matmul.allow_fp16_accumulation
            with fp16_sums():
                assert matmul.allow_fp16_accumulation
            assert not matmul.allow_fp16_accumulation
            (stands,) = [each for each in switches if each.name.endswith("allow_fp16_accumulation")]
            assert "ComfyUI or another pack had it True, as it is again after the run" in stands.reason
        assert matmul.allow_fp16_accumulation
    finally:
        matmul.allow_fp16_accumulation = False


def test_it_stays_off_while_another_stage_runs_beside() -> None:
    matmul: Any = torch.backends.cuda.matmul
    with accumulation(ADA, Accumulation.FP16):
        with accumulation(ADA), fp16_sums():
            assert not matmul.allow_fp16_accumulation
        with fp16_sums():
            assert matmul.allow_fp16_accumulation


def test_no_stage_starts_between_the_switch_and_the_product() -> None:
    began, matmul = threading.Event(), torch.backends.cuda.matmul
    seen: list[bool] = []

    def beside() -> None:
        began.set()
        with accumulation(ADA):
            seen.append(matmul.allow_fp16_accumulation)

    other = threading.Thread(target=beside)
    with accumulation(ADA, Accumulation.FP16):
        with fp16_sums():
            other.start()
            began.wait()
            other.join(0.05)
            assert other.is_alive() and not seen
        other.join()
    assert seen == [False]


# the layers


def test_layers_accumulate_in_fp16_and_all_else_does_not(card: Fp16SumsOnCpu) -> None:
    module, x = network(), given()
    plain = module(x)[0]
    sums = LinearSums(module)
    shell = sums.shell(module, Sums(layers=("blocks.0.inner", "blocks.2.write", "unknown")))
    made = shell(x)[0]
    assert card.launched == 2
    assert 0 < error(made, plain) < 0.01
    assert shell.get_submodule("blocks.0.inner").weight is module.blocks[0].inner.weight
    assert all(type(layer) in (nn.Linear, nn.LayerNorm, Block, Network, nn.ModuleList) for layer in module.modules())
    assert torch.equal(module(x)[0], plain) and card.launched == 2


def test_in_fp32_they_are_the_layers_they_were(card: Fp16SumsOnCpu) -> None:
    module, x = network(), given()
    shell = LinearSums(module).shell(module, Sums(layers=LAYERS))
    assert torch.equal(run_in_fp32(shell, x)[0], run_in_fp32(module, x)[0])
    assert card.launched == 0


def test_bf16_and_fp32_layers_are_none_of_them() -> None:
    assert LinearSums(network())._names == (*LAYERS[:1], "time", *LAYERS[1:])
    assert LinearSums(network().bfloat16())._names == ()
    mixed = network()
    mixed.blocks[0].inner.float()
    assert "blocks.0.inner" not in LinearSums(mixed)._names


# the probe


def test_healthy_layers_are_found_by_one_call_and_the_next_ones_use_them(card: Fp16SumsOnCpu) -> None:
    run, x = Run(network()), given()
    plain = run.module(x)[0]
    assert torch.equal(run(x), plain), "the first call is computed with sums in fp32"
    assert run.sums is not None and run.sums.layers == LAYERS and run.sums.islands == ()
    assert 0 < run.sums.step <= BUDGET and 0 < run.sums.largest < 0.01
    before = card.launched
    made = run(x)
    assert card.launched - before == len(LAYERS)
    assert error(made, plain) == pytest.approx(run.sums.step), "it was measured with this very input"
    assert error(run(given(1)), run.module(given(1))[0]) < 2 * BUDGET
    assert run.outcomes == ["finite"] * 3


def test_an_overflow_in_partial_sums_is_found_and_its_layer_left_in_fp32(card: Fp16SumsOnCpu) -> None:
    run, x = Run(overflow_on_the_way(network())), given()
    plain = run.module(x)[0]
    assert plain.isfinite().all()
    everything = LinearSums(run.module).shell(run.module, Sums(layers=LAYERS))
    assert not everything(x)[0].isfinite().all() or error(everything(x)[0], plain) > BUDGET
    assert torch.equal(run(x), plain)
    assert run.sums is not None and run.sums.overflows == run.sums.islands == (BROKEN,)
    assert run.sums.layers == tuple(name for name in LAYERS if name != BROKEN)
    for seed in range(4):
        assert error(run(given(seed)), run.module(given(seed))[0]) <= 2 * BUDGET
    assert run.outcomes == ["finite"] * 5
    assert BROKEN in str(run.sums)


def test_an_overflow_in_one_row_of_many_is_found(card: Fp16SumsOnCpu) -> None:
    """The sample holds the rows with the largest norms."""
    module = nn.Sequential(nn.Linear(64, 64)).half().requires_grad_(False)
    module[0].weight[:, :32], module[0].weight[:, 32:] = 40.0, -40.0
    x = torch.randn(5000, 64).half() * 0.01
    x[3217] = 60.0
    sums = LinearSums(module)
    found = sums.probed(lambda: sums.shell(module, None)(x))
    assert found.overflows == ("0",) and len(x) > SAMPLED


def test_wide_layers_are_probed_as_they_multiply(card: Fp16SumsOnCpu) -> None:
    """Scaled rows cannot overflow on the way, and what they are scaled back to is float32."""
    module = network()
    with torch.no_grad():
        module.blocks[1].write.weight[:, :WIDTH], module.blocks[1].write.weight[:, WIDTH:] = 2e4, -2e4
    run, x = Run(module, stream=STREAM), given()
    plain = run(x)
    assert run.sums is not None and "blocks.1.write" not in run.sums.overflows
    assert run.outcomes == ["finite"]
    before = card.launched
    made = run(x)
    assert card.launched - before == len(run.sums.layers) > 0
    assert error(made, plain) <= BUDGET


def test_a_first_call_that_fails_settles_nothing_and_the_next_one_does(card: Fp16SumsOnCpu) -> None:
    calls = [0]

    def broken_once(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.tanh(x) * (torch.nan if calls[0] <= 3 and x.dtype is torch.float16 else 1)

    run, x = Run(network(squash=broken_once)), given()
    run(x)
    assert run.outcomes == ["rerun"] and run.sums is None and card.launched == 0
    run(x)
    assert run.outcomes == ["rerun", "finite"] and run.sums is not None and run.sums.layers


def test_a_layer_that_overflows_later_accumulates_in_fp32_from_then_on(card: Fp16SumsOnCpu) -> None:
    known, x = PrecisionOverrides(sums=Sums(layers=LAYERS)), given()
    run = Run(overflow_on_the_way(network(squash=torch.sin)), known)  # sin of what is infinite is NaN
    run(x)
    assert run.outcomes == ["rerun"]
    rerun = run.report.steps[0].rerun
    assert rerun is not None and rerun.module == BROKEN
    assert rerun.action == f"'{BROKEN}' accumulates in fp32 from the next call on"
    assert run.learner.learned == PrecisionOverrides(sums=Sums(layers=LAYERS).without(BROKEN))
    run(x)
    assert run.outcomes == ["rerun", "finite"]


@pytest.mark.parametrize("scope", [Scope.STEP, Scope.RUN])
def test_every_scope_measures(card: Fp16SumsOnCpu, scope: Scope) -> None:
    run = Run(network(), scope=scope)
    run(given())
    run(given())
    assert run.sums is not None and run.guard.learned is None and run.outcomes == ["finite"] * 2


@pytest.mark.parametrize("at", [1, 5, 9, 14])
def test_an_interrupt_in_the_probe_leaves_nothing(card: Fp16SumsOnCpu, monkeypatch, at: int) -> None:
    run, x = Run(network()), given()
    plain = run.module(x)[0]
    real, count = under_test.linear, [0]

    def interrupted(*args: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] == at:
            with fp16_sums():
                raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(under_test, "linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(x)
    assert not torch.backends.cuda.matmul.allow_fp16_accumulation
    assert run.sums is None
    assert torch.equal(run.module(x)[0], plain)
    assert torch.equal(run.learner.attempt.eager(x)[0], plain), "its layers are neither measured nor tried any more"
    run(x)
    assert run.sums is not None and run.sums.layers == LAYERS


def test_what_processes_measure_together_they_decide_alike(card: Fp16SumsOnCpu) -> None:
    module, x = network(), given()
    asked: list[torch.Size] = []

    def agree(values: torch.Tensor) -> torch.Tensor:
        """Another process, in which one layer overflows."""
        asked.append(values.shape)
        worst = values.clone()
        if len(values) > 1:
            worst[(*LAYERS[:1], "time", *LAYERS[1:]).index("blocks.2.inner")] = torch.inf
        return worst

    sums = LinearSums(module, agree)
    found = sums.probed(lambda: sums.shell(module, None)(x))
    assert found.overflows == ("blocks.2.inner",)
    assert asked == [torch.Size([2 * (len(LAYERS) + 1)]), torch.Size([1])]


# compiled


def test_compiled_their_product_is_one_operation_that_sets_the_switch_when_it_runs(monkeypatch) -> None:
    module, x = network(), given()
    shell = LinearSums(module).shell(module, Sums(layers=("blocks.0.inner",)))
    plain = F.linear
    seen: list[bool] = []

    def watched(*args: Any) -> torch.Tensor:
        seen.append(torch.backends.cuda.matmul.allow_fp16_accumulation)
        return plain(*args)

    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with torch.no_grad():
        made = torch.compile(shell, backend=backend, fullgraph=True)(x)[0]
        assert len(graphs) == 1 and graphs[0].count("onediff_guard.linear_fp16_sums(") == 1
        assert torch.equal(made, module(x)[0]), "a CPU knows nothing of the switch"
        monkeypatch.setattr(under_test.F, "linear", watched)
        torch.ops.onediff_guard.linear_fp16_sums(x, module.embed.weight, module.embed.bias)
    assert seen == [True] and not torch.backends.cuda.matmul.allow_fp16_accumulation
    torch._dynamo.reset()


def test_inductor_compiles_it() -> None:
    torch._dynamo.reset()
    module, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).half().requires_grad_(False), given()
    shell = LinearSums(module).shell(module, Sums(layers=("1",)))
    with torch.no_grad():
        assert error(torch.compile(shell, fullgraph=True)(x), module(x)) < 2e-3
    torch._dynamo.reset()


def test_the_operation_is_what_the_function_is() -> None:
    x, weight, bias = given(), torch.randn(32, 64).half(), torch.randn(32).half()
    torch.library.opcheck(torch.ops.onediff_guard.linear_fp16_sums.default, (x, weight, bias), test_utils="test_schema")
    torch.library.opcheck(
        torch.ops.onediff_guard.linear_fp16_sums.default, (x, weight, None), test_utils="test_faketensor"
    )
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
