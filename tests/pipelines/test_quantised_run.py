"""Whole sampling runs in int8: by torchao on the CPU, of a small CogVideoX whose layers count as large enough."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from at_once import at_once
from comfyui_onediff_guard.demo.small_model import build_cogvideox
from comfyui_onediff_guard.pipelines.families.table import VARIANTS
from comfyui_onediff_guard.pipelines.models.lora import Lora
from comfyui_onediff_guard.pipelines.run.denoiser import GuardedDenoiser, features_of
from comfyui_onediff_guard.pipelines.run.feature import RunContext
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
from comfyui_onediff_guard.pipelines.weights.offload import Offload
from comfyui_onediff_guard.pipelines.weights.quantising import check
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.guard import StageGuard
from comfyui_onediff_guard.precision.overrides import PrecisionOverrides
from comfyui_onediff_guard.precision.policy import Component, PlanImpossible, Precision, choose
from comfyui_onediff_guard.precision.quantised import QuantisedLinears
from dequantised import dequantise, product
from hostile import rewrite
from overflows import fails_unscaled
from safetensors.torch import save_file
from small_runs import error
from torch._dynamo.utils import counters

pytest.importorskip("torchao")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SETTINGS = SampleSettings(width=64, height=48, frames=9, steps=3, guidance_scale=6.0, seed=3, scheduler="DDIM")
LAYERS = tuple(
    f"transformer_blocks.{block}.{layer}"
    for block in (0, 1)
    for layer in ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "ff.net.0.proj", "ff.net.2")
)
WIDTH = 256  # smaller than what is quantised on GPUs: int8 is slow on a CPU without VNNI
BROKEN = "transformer_blocks.1.attn1.to_q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 5B's kind, with layers of WIDTH."""
    return build_cogvideox(tmp_path_factory.mktemp("wide") / "model", variant="5b", heads=WIDTH // 64, head_dim=64)


@pytest.fixture(autouse=True)
def _quantise_from_width(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("precision.quantised", "pipelines.weights.quantising"):
        monkeypatch.setattr(f"comfyui_onediff_guard.{module}.LEAST", WIDTH)


@pytest.fixture
def opened(folder: Path, tmp_path: Path) -> Callable[..., PipelineHandle]:
    def open_in(precision: str, backend: str = "eager", path: Path = folder) -> PipelineHandle:
        return small_runs.opened(path, precision=precision, backend=backend, device=CPU, profiles=tmp_path / "kept")

    return open_in


@pytest.fixture
def breaking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of layers whose quantised weights become NaN once their errors were measured. In half precision they
    work."""
    broken: list[str] = []
    fill, measuring = QuantisedLinears.fill, QuantisedLinears.measuring

    def broken_in(layers: QuantisedLinears) -> None:
        for name in broken if layers.errors else ():
            layers._layers[name].quantised_weight.scale[0] = math.nan

    def filled(self: QuantisedLinears) -> None:
        fill(self)
        broken_in(self)

    def watched(self: QuantisedLinears, module: torch.nn.Module) -> Any:
        module, measure = measuring(self, module)
        return module, lambda call: (measure(call), broken_in(self))

    monkeypatch.setattr(QuantisedLinears, "fill", filled)
    monkeypatch.setattr(QuantisedLinears, "measuring", watched)
    return broken


def sampled(handle: PipelineHandle, **changes: Any) -> tuple[torch.Tensor, Any]:
    channels = handle.store.model.denoiser_config["text_embed_dim"]
    tokens = handle.store.model.denoiser_config["max_text_seq_length"]
    positive, negative = (
        torch.randn(1, tokens, channels, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)
    )
    return sample(handle, positive, negative, replace(SETTINGS, **changes))


def dequantised(handle: PipelineHandle, **changes: Any) -> torch.Tensor:
    """Latents of a run with the products of its quantised layers in float32."""
    with pytest.MonkeyPatch.context() as patch:
        dequantise(patch)
        return sampled(handle, **changes)[0]


def weights(handle: PipelineHandle) -> list[torch.Tensor]:
    """Weights that are quantised now."""
    found = [layer.quantised_weight for layers in handle.store.quantised.values() for layer in layers._layers.values()]
    return [weight for weight in found if weight is not None]


def test_int8_run_is_near_fp32_and_bf16_weights_stay_unchanged(opened: Any) -> None:
    right, _ = sampled(opened("fp32"))
    half, _ = sampled(opened("bf16"))
    handle = opened("int8")
    made, report = sampled(handle)
    ((_, layers),) = handle.store.quantised.items()
    assert layers.names == LAYERS, "neither norms' modulation nor the projections around the blocks"
    assert report.plan.quantised == "int8" and report.plan.dtype == "bf16"
    assert "quantised: the large linear layers of its blocks, to int8" in report.text()
    assert [step.outcome for step in report.steps] == ["finite"] * 3
    assert not torch.equal(made, half) and error(made, right) < 3 * error(half, right)
    assert weights(handle) == [], "quantised weights exist only during a run"
    assert torch.equal(sampled(handle)[0], made)
    assert torch.equal(sampled(replace(handle, precision=Precision.BF16))[0], half), "bit-equal when it is off"


@pytest.mark.parametrize("outlier", [100.0, 1000.0])
def test_layers_with_large_int8_error_stay_in_bf16_from_first_step(
    folder: Path, opened: Any, tmp_path: Path, outlier: float
) -> None:
    """One channel of a layer's input is `outlier` times the others, and its weights are smaller by as much: in int8
    the other channels round to 0. The result is finite, and wrong."""

    def change(weights: dict[str, torch.Tensor]) -> None:
        weights["transformer_blocks.1.norm2.norm.weight"][7] *= outlier
        weights["transformer_blocks.1.norm2.norm.bias"][7] = outlier
        weights["transformer_blocks.1.ff.net.0.proj.weight"][:, 7] /= outlier

    copied = shutil.copytree(folder, tmp_path / "outlier")
    rewrite(copied, "transformer", change)
    one = {"steps": 1, "guidance_scale": 1.0}
    (right, _), (half, _) = (sampled(opened(name, path=copied), **one) for name in ("fp32", "bf16"))
    handle = opened("int8", path=copied)
    made, report = sampled(handle, **one)
    assert error(made, right) < 3 * error(half, right)
    ((_, layers),) = handle.store.quantised.items()
    assert layers.left == ("transformer_blocks.1.ff.net.0.proj",)
    assert sum("1 of 12 layers stay in half precision" in note for note in report.notes) == 1
    assert [step.outcome for step in report.steps] == ["finite"]
    again, report = sampled(handle, **one)
    assert torch.equal(again, made) and any("1 of 12 layers" in note for note in report.notes)


def test_unquantised_layer_is_named_once_after_out_of_memory(
    opened: Any, breaking: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking.append(BROKEN)
    call, failures = StageGuard.__call__, ["all else leaves the device", "halves in turn"]

    def called(guard: StageGuard, *args: Any, **kwargs: Any) -> Any:
        if guard.stage == "denoiser" and guard.report.steps and failures:
            raise torch.OutOfMemoryError(failures.pop())
        return call(guard, *args, **kwargs)

    monkeypatch.setattr(StageGuard, "__call__", called)
    _, report = sampled(opened("int8"))
    assert report.learned == PrecisionOverrides(unquantised=(BROKEN,)) and "CFG halves in turn" in report.text()


def test_int8_overrides_are_saved_and_apply_only_to_int8(opened: Any, breaking: list[str]) -> None:
    breaking.append(BROKEN)
    _, report = sampled(opened("int8"))
    assert [step.outcome for step in report.steps] == ["rerun", "finite", "finite"]
    assert report.steps[0].rerun.module == BROKEN and report.learned == PrecisionOverrides(unquantised=(BROKEN,))
    reopened = opened("int8")
    reopened.store.learned.clear()  # as in another process
    _, report = sampled(reopened)
    assert [step.outcome for step in report.steps] == ["finite"] * 3
    assert any(f"'{BROKEN}' unquantised" in note for note in report.notes)
    plain = opened("bf16")
    plain.store.learned.clear()
    assert not any("profile" in note for note in sampled(plain)[1].notes)


def test_nothing_is_quantised_with_all_layers_scaled_and_report_says_so(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a layer that fails in bf16 too. A later run quantises nothing either."""
    handle = opened("int8")
    filled: list[bool] = []
    fill = QuantisedLinears.fill
    monkeypatch.setattr(QuantisedLinears, "fill", lambda layers: filled.append(True) or fill(layers))
    norm = handle.store.module("transformer", "bf16").norm_final
    hook = norm.register_forward_hook(fails_unscaled)
    _, report = sampled(handle)
    assert [step.outcome for step in report.steps] == ["rerun", *["finite"] * (SETTINGS.steps - 1)]
    (layers,) = handle.store.quantised.values()
    assert layers.take() is None and len(filled) == 1
    _, again = sampled(handle)
    hook.remove()
    assert len(filled) == 1 and not again.reruns
    for each in (report, again):
        assert "not quantised: overflow protection is on" in each.notes


def test_lora_is_added_to_quantised_layers(opened: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = "transformer_blocks.1.ff.net.2"
    named = {f"transformer.{layer}.lora_A.weight": (4, 4 * WIDTH), f"transformer.{layer}.lora_B.weight": (WIDTH, 4)}
    named |= {f"transformer.{layer}.diff_b": (WIDTH,), "transformer.norm_final.diff": (WIDTH,)}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in named.items()}
    save_file(drawn, tmp_path / "lora.safetensors")
    made, _ = sampled(opened("int8"), steps=1)
    with_it = {name: add_lora(opened(name), Lora(tmp_path / "lora.safetensors", 1.0)) for name in ("fp32", "int8")}
    right, _ = sampled(with_it["fp32"], steps=1)
    exact = dequantised(with_it["int8"], steps=1)
    tuned, report = sampled(with_it["int8"], steps=1)
    layers = with_it["int8"].store.quantised
    assert {name for each in layers.values() for name in each.names} >= {f"{layer}.base_layer"}
    assert [step.outcome for step in report.steps] == ["finite"]
    assert error(tuned, right) < 1.5 * error(exact, right) < error(made, right)


def test_two_threads_are_bit_equal_to_one(opened: Any) -> None:
    handle = opened("int8")
    right = {seed: sampled(handle, seed=seed)[0] for seed in (3, 4)}
    made = at_once(*(partial(sampled, handle, seed=seed) for seed in right))
    assert all(torch.equal(found, latents) for (found, _), latents in zip(made, right.values(), strict=True))


def test_compiled_int8_has_one_graph_and_second_run_compiles_nothing(opened: Any, traced_alone: None) -> None:
    torch._dynamo.reset()
    eager, _ = sampled(opened("int8"))
    handle = opened("int8", "inductor")
    made, report = sampled(handle)
    assert report.backend == "inductor" and report.graphs == 1
    assert error(made, eager) < 0.01
    again, report = sampled(handle)
    assert report.graphs == 0 and torch.equal(again, made)
    torch._dynamo.reset()


def test_compiled_layers_share_one_graph_and_record_peak_of_inputs() -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)).bfloat16().requires_grad_(False)
    layers = QuantisedLinears(blocks, ("0", "1"), "int8")
    layers.fill()
    module, x = layers.shell(blocks), torch.randn(2, 16, WIDTH).bfloat16()
    with torch.inference_mode():
        compiled = [torch.compile(layer) for layer in module.children()]
        for run, layer in zip(compiled, module.children(), strict=True):
            exact = product(x, layer.quantised_weight, layer.bias)
            assert error(run(x), exact) < 2 * torch.finfo(x.dtype).eps
        assert float(layers.take()) == float(x.abs().max())
        layers.empty()
        layers.fill()
        x[0, 3, 5] = math.nan
        for run in compiled:
            assert run(x)[0, 3].isnan().all(), "compiled code of torchao propagates NaN, too"
        assert math.isnan(layers.take())
    assert counters["stats"]["unique_graphs"] == 1, "other layers and other weights need no other code"
    torch._dynamo.reset()


def test_small_layers_are_not_quantised_and_report_says_so() -> None:
    handle = small_runs.opened("5b", precision="int8", device=CPU)
    made, report = sampled(handle)
    assert any(note.startswith("nothing is quantised: no linear layer") for note in report.notes)
    assert torch.equal(made, sampled(replace(handle, precision=Precision.BF16))[0])


def test_missing_torchao_error_says_what_to_install(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfyui_onediff_guard.precision import quantised

    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanImpossible, match=f"'int8' needs torchao.*--no-deps {quantised.TORCHAO}.*'auto'"):
        opened("int8")


PLAN = choose(ARCHITECTURES["sm90"], VARIANTS["CogVideoX-5B"], Component.DENOISER, Precision.INT8)


@pytest.mark.parametrize("offload", Offload)
def test_block_offloads_are_refused_on_gpu(offload: Offload) -> None:
    check(PLAN, offload, CPU)
    refusal = f"offload '{offload.value}'.*Choose offload 'auto', 'none' or 'model'"
    with pytest.raises(PlanImpossible, match=refusal) if offload.in_parts else nullcontext():
        check(PLAN, offload, CUDA)


def test_memory_estimate_includes_int8_products(opened: Any) -> None:
    from comfyui_onediff_guard.pipelines.run.feature import DenoiserSetup, RunContext
    from comfyui_onediff_guard.pipelines.weights.activation_memory import estimate_activation_bytes

    def estimate(precision: str) -> int:
        stage = opened(precision).stage(Component.DENOISER)
        family, config = stage.handle.family, stage.handle.store.model.denoiser_config
        inputs = family.step_inputs(config, (1, 16, 3, 6, 8), {}) | {"return_dict": False}
        features = features_of(RunContext(stage.handle, stage.plan, stage.report))
        return estimate_activation_bytes(DenoiserSetup(stage, inputs), features=features)

    assert 1.2 * estimate("bf16") < estimate("int8") < 4 * estimate("bf16"), (
        "int8's products are int32, before they are scaled"
    )


def test_out_of_memory_fallback_is_unquantised(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = opened("int8")
    stage = handle.stage(Component.DENOISER)
    calls = GuardedDenoiser(stage, features_of(RunContext(handle, stage.plan, stage.report)))
    calls._set_up({"hidden_states": torch.zeros(1)})
    for each in calls._of_calls:
        each.begin_call()
    assert len(weights(handle)) > 0
    assert stage.weights_at_once() > stage.handle.store.model.weights["transformer"].n_bytes / 2
    monkeypatch.setattr("comfyui_onediff_guard.pipelines.weights.components.brings_parts_to", lambda device: True)
    cheaper = stage.cheaper(Offload.GROUP)
    assert cheaper.plan == stage.plan.unquantised and stage.plan.quantised == "int8"
    calls._go_on(cheaper, ())  # as where memory ran out
    assert not weights(handle)
